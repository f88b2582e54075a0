"""A process of several ranks ends with its own code, whatever gloo's threads are at."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from chaos.scene import in_short
from runs import launch

import forgekit as fk

ENDS = Path(__file__).with_name("ends.py")
SIDE_BY_SIDE = 4
"""Jobs at a time: more processes than cores, so that threads are late."""


@pytest.mark.parametrize("end", ["shutdown", "destroys", "forks"])
def test_a_tensor_that_a_thread_of_gloo_frees_is_waited_for(end, tmp_path):
    """Python ends a thread that wants the GIL too late in a destructor of C++, which aborts."""
    with launch(ENDS, ["slow", end], log=tmp_path / "log", ranks=2) as job:
        assert job.codes() == [3, 3], job.output
        assert "never ended" not in job.output


STUCK = {"exits": 4, "shutdown": 1, "forgets": 1}


@pytest.mark.parametrize("end", in_short(STUCK, "exits"))
def test_a_collective_that_never_ends_holds_up_no_process(end, tmp_path):
    with launch(ENDS, ["stuck", end], log=tmp_path / "log", ranks=2) as job:
        assert job.codes()[0] == STUCK[end], job.output
        assert "group 'default_pg' never ended" in job.output
        assert job.output.count("flushed") == job.output.count("handled") == 2


def test_the_end_of_the_groups_waits_for_a_save(tmp_path):
    place = {"log": tmp_path / "log", "cwd": tmp_path}
    with launch(ENDS, ["saves", "shutdown"], ranks=2, **place) as job:
        assert job.codes() == [3, 3], job.output
    assert fk.latest_checkpoint(tmp_path / "checkpoints"), job.output


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.chaos)])
def test_ranks_that_end_at_once_under_load_end_with_their_code(count, tmp_path):
    for first in range(0, count, SIDE_BY_SIDE):
        with ExitStack() as stack:
            logs = [tmp_path / f"{number}" for number in range(first, first + SIDE_BY_SIDE)]
            jobs = [launch(ENDS, ["many", "shutdown"], log=log, ranks=2) for log in logs]
            started = [stack.enter_context(job) for job in jobs]
            for job in started:
                assert job.codes() == [3, 3], job.output
