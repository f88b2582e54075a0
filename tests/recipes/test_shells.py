"""What people do to a run in a shell: the display may go away, the run and its records do not."""

from __future__ import annotations

import os
import signal
import time

import pytest
from pool import open_shell
from runs import TINY, assert_same_run, last_step, saved_step, status_of

STEPS = 10


@pytest.fixture
def shell():
    with open_shell() as opened:
        yield opened


def command_line(recipe, tokens, out):
    given = TINY | {"out": out, "data.path": tokens, "steps": STEPS}
    return f"recipe {recipe} " + " ".join(f"{name}={value}" for name, value in given.items())


@pytest.fixture
def command(plain, tokens, tmp_path):
    """The command line of a small run into ``run``."""
    return command_line(plain, tokens, tmp_path / "run")


@pytest.fixture(scope="module")
def undisturbed(plain, tokens, tmp_path_factory):
    """The directory of a run that nobody disturbs."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    with open_shell() as shell:
        code, output = shell.run(command_line(plain, tokens, out))
    assert code == 0, output
    assert f"step {STEPS}/{STEPS}" in output
    assert f"\nstep {STEPS}\n" in output
    return out


FORMS = "2>&1 | head -n 1; exit ${PIPESTATUS[0]}", "<&- >&- 2>&-"


@pytest.mark.parametrize("form", FORMS)
def test_a_run_ends_as_if_its_display_were_there(form, shell, command, undisturbed, tmp_path):
    code, output = shell.run(f"{command} {form}", cwd=tmp_path)
    assert code == 0, output
    assert status_of(tmp_path / "run")["status"] == "finished"
    assert_same_run(tmp_path / "run", undisturbed)


def wait_for_step(step, out):
    deadline = time.monotonic() + 60
    while last_step(out) < step:
        assert time.monotonic() < deadline, "no step"
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
    line, number = LINES[form]
    process = shell.start(line.format(run=command + " steps=100000"), cwd=tmp_path)
    wait_for_step(3, tmp_path / "run")
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while status_of(tmp_path / "run")["status"] == "running" and time.monotonic() < deadline:
        time.sleep(0.005)
    found = status_of(tmp_path / "run")
    assert (found["status"], found["reason"]) == ("stopped", number.name)
    assert 3 < saved_step(tmp_path / "run") == last_step(tmp_path / "run") == found["step"]


def test_a_refusal_keeps_its_exit_code_where_nobody_reads_it(shell, command, tmp_path):
    for display in ("2>/dev/full", "2>&1 | true; exit ${PIPESTATUS[0]}"):
        code, _ = shell.run(f"{command} data.path=gone {display}", cwd=tmp_path)
        assert code == 2, display
    assert status_of(tmp_path / "run")["status"] == "failed"
