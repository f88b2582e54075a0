"""A process of several ranks ends with its own code, whatever gloo's threads are at."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from runs import launch

import forgekit as fk

ENDS = Path(__file__).with_name("ends.py")
CHAOS = pytest.mark.chaos
SIDE_BY_SIDE = 4
"""Jobs at a time: more processes than cores, so that threads are late."""


def codes(job):
    job.end()
    return [rank.wait() for rank in job.ranks]


@pytest.mark.parametrize("end", ["shutdown", "destroys", "forks"])
def test_a_tensor_that_a_thread_of_gloo_frees_is_waited_for(end, tmp_path):
    """Python ends a thread that wants the GIL too late in a destructor of C++, which aborts."""
    with launch(ENDS, ["slow", end], log=tmp_path / "log", ranks=2) as job:
        assert codes(job) == [3, 3], job.output
        assert "never ended" not in job.output


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("exits", 4),
        pytest.param("shutdown", 1, marks=CHAOS),
        pytest.param("forgets", 1, marks=CHAOS),
    ],
)
def test_a_collective_that_never_ends_holds_up_no_process(end, code, tmp_path):
    with launch(ENDS, ["stuck", end], log=tmp_path / "log", ranks=2) as job:
        assert codes(job)[0] == code, job.output
        assert "group 'default_pg' never ended" in job.output
        assert job.output.count("flushed") == job.output.count("handled") == 2


def test_the_end_of_the_groups_waits_for_a_save(tmp_path):
    place = {"log": tmp_path / "log", "cwd": tmp_path}
    with launch(ENDS, ["saves", "shutdown"], ranks=2, **place) as job:
        assert codes(job) == [3, 3], job.output
    assert fk.latest_checkpoint(tmp_path / "checkpoints"), job.output


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("jobs", [20, pytest.param(200, marks=CHAOS)])
def test_ranks_that_end_at_once_under_load_end_with_their_code(jobs, tmp_path):
    for first in range(0, jobs, SIDE_BY_SIDE):
        with ExitStack() as stack:
            started = [
                stack.enter_context(
                    launch(ENDS, ["many", "shutdown"], log=tmp_path / f"{number}", ranks=2)
                )
                for number in range(first, first + SIDE_BY_SIDE)
            ]
            for job in started:
                assert codes(job) == [3, 3], job.output
