"""``sbatch`` without a cluster: the machine it is called on plays all nodes of one job.

Always as with ``--wait``: it stays, and returns 1 if the job failed. It runs the script, again
after a requeue, and does what it finds asked for in the folder ``FAKE_SLURM``: a file
``time_is_nearly_up`` or ``node_fails`` (from a test), ``cancel`` (scancel), ``requeue`` (scontrol).
What it did stands in ``events`` there, a line each.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

POLL_S = 0.01
HERE = Path(os.environ.get("FAKE_SLURM", "."))


def main() -> int:
    """Take the job, say its number, and run it."""
    script = Path(parser().parse_args().script)
    own = [word for line in directives(script) for word in shlex.split(line)]
    options = parser().parse_args([*own, *sys.argv[1:]])
    print(f"Submitted batch job {job_id()}", flush=True)  # noqa: T201
    return control(options)


def parser() -> argparse.ArgumentParser:
    """Options by their long names; others are refused, as the real one does."""
    parser = argparse.ArgumentParser(prog="sbatch", allow_abbrev=False)
    parser.add_argument("--wait", action="store_true", required=True)
    for name in ("job-name", "output", "time"):
        parser.add_argument(f"--{name}")
    for name in ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--open-mode", choices=["append", "truncate"], default="truncate")
    parser.add_argument("--signal", type=re.compile(r"(B:)?([A-Z0-9]+)@(\d+)").fullmatch)
    parser.add_argument("--requeue", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("script", nargs="?", default="")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def directives(script: Path) -> Iterator[str]:
    """The options in a script: up to its first line that is not a comment."""
    first, *lines = script.read_text().splitlines()
    assert first.startswith("#!"), "sbatch: error: This does not look like a batch script."
    for line in lines:
        if line.strip() and not line.startswith("#"):
            return
        if line.startswith("#SBATCH "):
            yield line.removeprefix("#SBATCH ")


def control(options: argparse.Namespace) -> int:
    """Run the job until it ends by itself; return whether it failed."""
    spool = HERE / "slurm_script"
    spool.write_bytes(Path(options.script).read_bytes())
    spool.chmod(0o700)
    log = options.output.replace("%x", options.job_name).replace("%j", job_id())
    restarts, is_over = 0, False
    while not is_over:
        with open(log, "ab" if options.open_mode == "append" else "wb") as stream:
            to = {"stdout": stream, "stderr": subprocess.STDOUT}
            given = environment(options, restarts)
            shell = subprocess.Popen([spool, *options.arguments], env=given, **to)
        note(f"started {restarts}")
        is_over = not watch(shell, options)
        kill_all(f"SLURM_JOB_ID={job_id()}")
        restarts += 1
    note("failed" if shell.returncode else "completed")
    return int(shell.returncode != 0)


def job_id() -> str:
    """The number of the job."""
    return os.environ["FAKE_SLURM_JOB_ID"]


def environment(options: argparse.Namespace, restarts: int) -> dict[str, str]:
    """Variables of the batch script; the first task's are among them, as in a real one."""
    nodes, here = options.nodes, options.ntasks_per_node
    given = {"JOB_ID": job_id(), "JOB_NODELIST": f"127.0.0.[1-{nodes}]", "JOB_NUM_NODES": nodes}
    given |= {"NTASKS": (here or 1) * nodes, "NTASKS_PER_NODE": here}
    given |= {"GPUS_ON_NODE": options.gpus_per_node, "CPUS_PER_TASK": options.cpus_per_task}
    given |= {"RESTART_COUNT": restarts or None, "PROCID": 0, "LOCALID": 0, "NODEID": 0}
    given = {f"SLURM_{name}": str(value) for name, value in given.items() if value is not None}
    return os.environ | given | {"FAKE_SLURM_REQUEUE": str(options.requeue)}


def watch(shell: subprocess.Popen[bytes], options: argparse.Namespace) -> bool:
    """Do what is asked for until the script ends; return whether the job is to start again."""
    while True:
        is_over = shell.poll() is not None
        for why in ("requeue", "node_fails"):
            if asked(why):
                note(why)
                kill_all(f"SLURM_JOB_ID={job_id()}")
                shell.wait()
                return options.requeue
        if is_over:
            return False
        if asked("time_is_nearly_up"):
            to_shell_only, name, _ = options.signal.groups()
            note(f"signalled {name}")
            send(signal.Signals[f"SIG{name}"], shell if to_shell_only else None)
        if asked("cancel"):
            send(signal.SIGTERM, None)
            send(signal.SIGTERM, shell)
            with suppress(subprocess.TimeoutExpired):  # as it is if it has a trap
                shell.wait(0.5)
            if shell.poll() is None:
                note("cancelled")
        time.sleep(POLL_S)


def asked(what: str) -> bool:
    """Whether a file of this name is there; it is gone then."""
    with suppress(FileNotFoundError):
        HERE.joinpath(what).unlink()
        return True
    return False


def note(event: str) -> None:
    """Add a line to the events."""
    with HERE.joinpath("events").open("a") as file:
        file.write(f"{event}\n")


def send(number: signal.Signals, shell: subprocess.Popen[bytes] | None) -> None:
    """Signal the batch shell, or else the tasks of the steps and nothing that those started."""
    tasks = [int(path.name) for path in HERE.glob("tasks/*")] if shell is None else [shell.pid]
    for pid in tasks:
        os.kill(pid, number)


def kill_all(variable: str) -> None:
    """Leave no process that has inherited a variable, as /proc says."""
    mark, found = f"\0{variable}\0".encode(), True
    while found:
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if mark in b"\0" + (folder / "environ").read_bytes():
                    found = True
                    os.kill(int(folder.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
