"""What torchrun adds: it hands signals on, dies of them, or notices that a rank has died.

Its own exit code is 1 after a clean stop as well. That it is stopped or killed once is tested with
the recipes.
"""

from __future__ import annotations

import os
import signal
import sys

import pytest
from chaos.scene import MOST_LOST, RANK, STANDARD, check_checkpoints
from chaos.survival import Outcome
from runs import Job, arguments, last_step, rank_of, saved_step, status_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
LONG = {"steps": 100}
AHEAD = 8
"""Steps to watch before a signal: more than ``save_every``, so that there is a checkpoint."""
PASS_ON = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"


@pytest.fixture
def start(scene, tmp_path):
    """Start the run under torchrun with these options; wait for some steps and a checkpoint."""
    jobs = []

    def begin(*options):
        given = STANDARD | {"data__path": scene.tokens, "out": scene.out} | LONG
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
        command = [sys.executable, *torchrun, str(RANK), "pretrain", *arguments(**given)]
        variables = {"FORGEKIT_TEST_FAULTS": "{}"}
        jobs.append(Job(command, log=tmp_path / "torchrun.log", variables=variables))
        is_ahead = lambda: last_step(scene.out) >= AHEAD and saved_step(scene.out)  # noqa: E731
        jobs[-1].wait_for(is_ahead, f"step {AHEAD} and a checkpoint")
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


def survive(scene, job, *, lost, reason=None):
    """Wait for the end of a job and go on from what it left."""
    code = job.end()
    found = status_of(scene.out)
    assert found.get("reason") == reason, job.output
    reached, saved = last_step(scene.out), check_checkpoints(scene.out)
    assert saved <= reached < LONG["steps"]
    assert reached - saved <= lost
    assert scene.go_on(**LONG) == saved
    ended = f"exit {code}" if code >= 0 else f"of {signal.Signals(-code).name}"
    return Outcome(ended=f"torchrun: {ended}", status=found["status"], lost=lost)


TWICE = [signal.SIGTERM] * 2
GONE = "launcher is gone"
SIGNALS = {
    # Options of torchrun, what it gets, and the reason that the run gives.
    "SIGTERM twice to torchrun": ([], TWICE, "SIGTERM"),
    "SIGUSR1 to torchrun that passes it on": ([PASS_ON], [signal.SIGUSR1], "SIGUSR1"),
    "SIGUSR1 to torchrun that does not, and dies": ([], [signal.SIGUSR1], GONE),
    "no row: SIGINT": ([], [signal.SIGINT], "SIGINT"),
    "no row: SIGKILL": ([], [signal.SIGKILL], GONE),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_the_ranks_save_whatever_signal_torchrun_gets(scene, start, survived, name):
    options, numbers, reason = SIGNALS[name]
    job = start(*options)
    for number in numbers:
        job.process.send_signal(number)
    outcome = survive(scene, job, lost=0, reason=reason)
    if not name.startswith("no row"):
        survived(name, outcome)


def test_torchrun_ends_when_a_rank_is_killed(scene, start, survived):
    job = start()
    (victim,) = (pid for pid in job.members() if rank_of(pid) == 1)
    os.kill(victim, signal.SIGKILL)
    job.end()
    reason = status_of(scene.out)["reason"]
    assert "Connection" in reason
    outcome = survive(scene, job, lost=MOST_LOST, reason=reason)
    assert outcome.status == "failed"
    survived("rank 1 alone, under torchrun", outcome)
