"""The SLURM script with real processes: saved at the signal, requeued, gone on, and given up.

``fake_slurm`` has the commands of a cluster, which do what the script depends on. The recipe is the
real one where its numbers count, else a program that ends as the test says.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from runs import Job, arguments, free_port, last_step, rows_of, saved_step, status_of

from forgekit.cli import recipes_folder
from forgekit.run.status import STATUSES, write_status

SCRIPT = recipes_folder() / "slurm" / "train.sh"
STEPS, AHEAD = 60, 8

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

settings = dict(argument.split("=", 1) for argument in sys.argv[1:])
out, texts = Path(settings["out"]), Path(__file__).parent
attempt, rank = (int(os.environ.get(f"SLURM_{n}", 0)) for n in ("RESTART_COUNT", "PROCID"))
signals = {signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)


def say(status):
    text = (texts / status / "status.json").read_text()
    (out / ".new").write_text(text.replace('"attempt": 0', f'"attempt": {attempt}'))
    (out / ".new").rename(out / "status.json")


if rank == 0:
    say("running")
if settings.get("wait"):
    (out / f"waits_{attempt}_{rank}").touch()
    signal.sigwait(signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    (out / f"heard_{attempt}_{rank}").touch()
while settings["wait"] == "twice" and not (out / "go").exists():
    time.sleep(0.005)
ends = settings["ends"].split(",")
end = ends[min(attempt, len(ends) - 1)]
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 0 and end != "silent":
    say(end)
sys.exit(end == "failed")
"""


class Cluster:
    """A folder in which one job at a time is submitted, and what becomes of it."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "run"
        self.slurm = folder / "slurm"
        self._folder = folder
        self.out.mkdir()
        self.slurm.mkdir()

    @contextmanager
    def submit(self, *options, recipe=None, given=()):
        """Submit a job, by default of the program; nothing of it survives the block."""
        log, recipe = self._folder / "log", recipe or self._folder / "program.py"
        command = ["sbatch", "--wait", f"--output={log}", *options]
        command += [SCRIPT, recipe, self.out, *given]
        job = Job([str(word) for word in command], log=log, cwd=self._folder)
        try:
            yield job
        finally:
            job.kill()

    def ask(self, what):
        """Make something happen to the job."""
        (self.slurm / what).touch()

    @property
    def events(self):
        """What happened to the job so far."""
        return (self.slurm / "events").read_text().splitlines()

    def wait(self, job, attempt=0, stage="waits"):
        """Until both tasks of the program have got that far."""
        files = [self.out / f"{stage}_{attempt}_{rank}" for rank in range(2)]
        job.wait_for(lambda: all(file.exists() for file in files), f"{stage} {attempt}")

    def wait_for(self, job, event, count=1):
        """Until something has happened so often."""
        job.wait_for(lambda: self.events.count(event) == count, event)


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o700)


def free_job_id():
    """A job number whose port nobody has."""
    while (port := int(free_port())) >= 40_000:
        continue
    return port - 20_000


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Commands, a program in a recipe's place, and what the library writes into a status file."""
    for status in STATUSES:
        write_status(tmp_path / status, status, attempt=0)
    (tmp_path / "program.py").write_text(PROGRAM)
    commands = tmp_path / "bin"
    commands.mkdir()
    for path in (Path(__file__).parent / "fake_slurm").glob("s*.py"):
        write_program(commands / path.stem, f'#!/bin/sh\nexec {sys.executable} {path} "$@"\n')
    own = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{commands}:{own}:{os.environ['PATH']}")
    cluster = Cluster(tmp_path)
    monkeypatch.setenv("FAKE_SLURM", str(cluster.slurm))
    monkeypatch.setenv("FAKE_SLURM_JOB_ID", str(free_job_id()))
    return cluster


TWO, LATE = "--ntasks-per-node=2", "time_is_nearly_up"


@pytest.mark.oracle
def test_a_run_under_torchrun_on_two_nodes_is_stopped_requeued_and_finished(cluster, tokens):
    recipe = recipes_folder() / "pretrain.py"
    given, out = arguments(data__path=tokens, steps=STEPS), cluster.out
    nodes = "--nodes=2", "--gpus-per-node=1"
    with cluster.submit(*nodes, recipe=recipe, given=given) as job:
        job.wait_for(lambda: last_step(out) >= AHEAD and saved_step(out), f"step {AHEAD}")
        cluster.ask(LATE)
        cluster.wait_for(job, "started 1")
        stopped = saved_step(out)
        assert AHEAD < stopped < STEPS
        assert f"stopped after step {stopped} (" in job.output
        job.end()
    requeued = ["started 0", "signalled USR1", "requeue", "started 1"]
    assert cluster.events == [*requeued, "completed"]
    assert f"step {stopped}, sample {8 * stopped};" in job.output
    assert [row["step"] for row in rows_of(out)] == [*range(1, STEPS + 1)]
    assert status_of(out)["status"] == "finished"


SEEN = {LATE: "signalled USR1", "node_fails": "node_fails"}
AGAIN, THIRD = (["requeue", f"started {n}", "signalled USR1"] for n in (1, 2))
FAILS = ["started 1", "node_fails", "started 2", "node_fails", "started 3"]
CASES = {
    "finished": ("ends=finished", [], ["completed"]),
    "failed": ("ends=failed", [], ["failed"]),
    "stopped by itself": ("ends=stopped", [], ["failed"]),
    "finished after the signal": ("ends=finished", [LATE], ["completed"]),
    "failed after the signal": ("ends=failed", [LATE], ["failed"]),
    "stopped, then finished": ("ends=stopped,finished", [LATE] * 2, [*AGAIN, "completed"]),
    "stopped, and may not be requeued": ("ends=stopped", [LATE], ["failed"], "--no-requeue"),
    "stopped too often": ("ends=stopped", [LATE] * 3, [*AGAIN, *THIRD, "failed"]),
    "a node failed too often": ("ends=stopped", ["node_fails"] * 3, [*FAILS, "failed"]),
}
"""How a job's attempts end, what happens to each, what is seen after that; options of the job."""


@pytest.mark.parametrize("how", CASES)
def test_only_a_run_that_stopped_at_the_signal_is_requeued(how, cluster, monkeypatch):
    """Or one whose node failed, and no more often than is allowed."""
    monkeypatch.setenv("MAX_RESTARTS", "2")
    ends, happens, expected, *options = CASES[how]
    given = [ends, "wait=yes" if happens else "wait="]
    with cluster.submit(TWO, *options, given=given) as job:
        for attempt, what in enumerate(happens):
            cluster.wait(job, attempt)
            cluster.ask(what)
        job.end()
    first = [SEEN[what] for what in happens[:1]]
    assert cluster.events == ["started 0", *first, *expected], job.output
    assert ("MAX_RESTARTS is 2" in job.output) == ("too often" in how)


def test_an_old_word_in_the_run_directory_does_not_count(cluster, tmp_path):
    """A run that cannot even start leaves ``status.json`` as the one before it wrote it."""
    shutil.copy(tmp_path / "stopped" / "status.json", cluster.out)
    (tmp_path / "program.py").write_text(PROGRAM.replace('say("running")', "pass"))
    with cluster.submit(TWO, given=["ends=silent", "wait=yes"]) as job:
        cluster.wait(job)
        cluster.ask(LATE)
        job.end()
    assert cluster.events == ["started 0", "signalled USR1", "failed"]
    assert "status.json says nothing" in job.output


def test_a_second_signal_does_not_reach_the_tasks(cluster):
    with cluster.submit(TWO, given=["ends=stopped", "wait=twice"]) as job:
        for count, stage in enumerate(("waits", "heard"), start=1):
            cluster.wait(job, stage=stage)
            cluster.ask(LATE)
            cluster.wait_for(job, "signalled USR1", count)
        (cluster.out / "go").touch()
        cluster.wait_for(job, "started 1")
    assert cluster.events[:4] == ["started 0", *2 * ["signalled USR1"], "requeue"]


def test_a_cancelled_run_may_save_first(cluster):
    """What is left of a job is killed when its batch shell ends, so that has to stay."""
    with cluster.submit(TWO, given=["ends=stopped", "wait=twice"]) as job:
        cluster.wait(job)
        subprocess.run(["scancel", os.environ["FAKE_SLURM_JOB_ID"]], check=True)
        cluster.wait_for(job, "cancelled")
        (cluster.out / "go").touch()
        job.end()
    assert cluster.events == ["started 0", "cancelled", "failed"]
    assert status_of(cluster.out)["status"] == "stopped"


TORCHRUN = """
import os, signal, sys, time
from pathlib import Path

out, node = Path({0!r}), os.environ["SLURM_NODEID"]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
(out / f"waits_0_{{node}}").touch()
signal.sigwait([signal.SIGUSR1])
if node == "0":
    while len(list((Path(os.environ["FAKE_SLURM"]) / "tasks").iterdir())) > 1:
        time.sleep(0.005)
    (out / "status.json").write_text(Path({1!r}).read_text())
sys.exit(1)
"""


def test_a_node_that_is_done_first_does_not_end_the_save_of_another(cluster, tmp_path):
    """It returns 1, as torchrun does after each stop, while the first node still writes."""
    torchrun = TORCHRUN.format(str(cluster.out), str(tmp_path / "stopped" / "status.json"))
    write_program(tmp_path / "bin" / "torchrun", f"#!{sys.executable}\n{torchrun}")
    with cluster.submit("--nodes=2") as job:
        cluster.wait(job)
        cluster.ask(LATE)
        cluster.wait_for(job, "started 1")


def test_a_task_that_fails_ends_the_others(cluster, tmp_path):
    text = "import os, time\nif os.environ['SLURM_PROCID'] == '0': time.sleep(600)\n1/0"
    (tmp_path / "program.py").write_text(text)
    with cluster.submit(TWO) as job:
        job.end()
    assert cluster.events == ["started 0", "failed"]


def test_a_job_without_a_run_directory_is_a_usage_error():
    done = subprocess.run(["bash", SCRIPT, "a.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch [option...] train.sh RECIPE.py RUN_DIRECTORY ")
