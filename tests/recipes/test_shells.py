"""What people do to a run in a shell: the display may go away, the run and its records do not."""

from __future__ import annotations

import os
import signal
import time

import pytest
from pool import open_shell
from runs import arguments, last_step, rows_of, saved_step, status_of

STEPS = 10


@pytest.fixture
def shell():
    with open_shell() as opened:
        yield opened


@pytest.fixture
def command(plain, tokens, tmp_path):
    """The command line of a small run into ``run``."""
    given = arguments(out=tmp_path / "run", data__path=tokens, steps=STEPS)
    return f"recipe {plain} {' '.join(given)}"


FORMS = "2>&1", "2>&1 | head -n 1; exit ${PIPESTATUS[0]}", "<&- >&- 2>&-"


@pytest.mark.parametrize("form", FORMS)
def test_a_run_ends_as_if_its_display_were_there(form, shell, command, tmp_path):
    code, output = shell.run(f"{command} {form}", cwd=tmp_path)
    assert code == 0, output
    assert [text in output for text in ("step 10/10  ", "\nstep 10\n")] == [form == "2>&1"] * 2
    assert status_of(tmp_path / "run")["status"] == "finished"
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [*range(1, STEPS + 1)]
    assert saved_step(tmp_path / "run") == STEPS


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


LINES = {
    "tee and Ctrl-C": ("{run} 2>&1 | tee all", signal.SIGINT),
    "SIGHUP, disk full": ("{run} 2>/dev/full", signal.SIGHUP),
}


@pytest.mark.parametrize("form", LINES)
def test_a_signal_to_the_whole_line_stops_the_run_with_its_checkpoint(
    form, shell, command, tmp_path
):
    """The other end of a pipe dies of the signal; what the run still says has no reader."""
    (line, number), out = LINES[form], tmp_path / "run"
    process = shell.start(line.format(run=command + " steps=100000"), cwd=tmp_path)
    wait_until(lambda: last_step(out) >= 3)
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    wait_until(lambda: status_of(out)["status"] != "running")
    found = status_of(out)
    assert (found["status"], found["reason"]) == ("stopped", number.name)
    assert 3 < saved_step(out) == last_step(out) == found["step"]


def test_a_refusal_keeps_its_exit_code_where_nobody_reads_it(shell, command, tmp_path):
    for display in ("2>/dev/full", "2>&1 | true; exit ${PIPESTATUS[0]}"):
        code, _ = shell.run(f"{command} data.path=gone {display}", cwd=tmp_path)
        assert code == 2, display
    assert status_of(tmp_path / "run")["status"] == "failed"
