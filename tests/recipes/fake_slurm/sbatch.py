"""``sbatch`` without a cluster: the machine it is called on plays all nodes of one job.

Always as with ``--wait``: it stays, and returns 1 if the job failed. It runs the script, again
after a requeue, and does what it finds asked for in the folder ``FAKE_SLURM``: a file
``time_is_nearly_up`` or ``node_fails`` (from a test), ``cancel`` (scancel), ``requeue`` (scontrol).
What it did stands in ``events`` there, a line each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.01
HERE = Path(os.environ.get("FAKE_SLURM", "."))


def main() -> int:
    """Take the job, say its number, and run it."""
    script = Path(parser().parse_args().script)
    own = [word for line in directives(script) for word in shlex.split(line)]
    options = parser().parse_args([*own, *sys.argv[1:]])
    HERE.joinpath("job.json").write_text(json.dumps({"requeue": options.requeue}))
    sys.stdout.write(f"Submitted batch job {os.environ['FAKE_SLURM_JOB_ID']}\n")
    sys.stdout.flush()
    return control(options)


def parser() -> argparse.ArgumentParser:
    """Options by their long names; others are refused, as the real one does."""
    parser = argparse.ArgumentParser(prog="sbatch", allow_abbrev=False)
    parser.add_argument("--wait", action="store_true", required=True)
    parser.add_argument("--job-name", default="job")
    parser.add_argument("--output", default="slurm-%j.out")
    parser.add_argument("--open-mode", choices=["append", "truncate"], default="truncate")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--cpus-per-task", type=int)
    parser.add_argument("--time")
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
    restarts, is_over = 0, False
    while not is_over:
        log = options.output.replace("%x", options.job_name).replace("%j", job_id())
        with open(log, "ab" if options.open_mode == "append" else "wb") as stream:
            shell = subprocess.Popen(
                [spool, *options.arguments],
                env=environment(options, restarts),
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        note(f"started {restarts}")
        is_over = not watch(shell, options)
        kill_all()
        restarts += 1
    note("failed" if shell.returncode else "completed")
    return int(shell.returncode != 0)


def job_id() -> str:
    """The number of the job."""
    return os.environ["FAKE_SLURM_JOB_ID"]


def environment(options: argparse.Namespace, restarts: int) -> dict[str, str]:
    """Variables of the batch script; the first task's are among them, as in a real one."""
    tasks = (options.ntasks_per_node or 1) * options.nodes
    given = {
        "SLURM_JOB_ID": job_id(),
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{options.nodes}]",
        "SLURM_JOB_NUM_NODES": options.nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NTASKS_PER_NODE": options.ntasks_per_node,
        "SLURM_GPUS_ON_NODE": options.gpus_per_node,
        "SLURM_CPUS_PER_TASK": options.cpus_per_task,
        "SLURM_RESTART_COUNT": restarts or None,
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_NODEID": 0,
    }
    return os.environ | {name: str(value) for name, value in given.items() if value is not None}


def watch(shell: subprocess.Popen[bytes], options: argparse.Namespace) -> bool:
    """Do what is asked for until the script ends; return whether the job is to start again."""
    while True:
        is_over = shell.poll() is not None
        for why in ("requeue", "node_fails"):
            if asked(why):
                note(why)
                kill_all()
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
            time.sleep(POLL_S)  # for a shell that has no trap to end
            if shell.poll() is None:
                note("cancelled")
        time.sleep(POLL_S)


def asked(what: str) -> bool:
    """Whether a file of this name is there; it is gone then."""
    try:
        HERE.joinpath(what).unlink()
    except FileNotFoundError:
        return False
    return True


def note(event: str) -> None:
    """Add a line to the events."""
    with HERE.joinpath("events").open("a") as file:
        file.write(f"{event}\n")


def send(number: signal.Signals, shell: subprocess.Popen[bytes] | None) -> None:
    """Signal the batch shell, or else the tasks of the steps and nothing that those started."""
    tasks = [int(path.name) for path in HERE.glob("tasks/*")] if shell is None else [shell.pid]
    for pid in tasks:
        os.kill(pid, number)


def kill_all() -> None:
    """Leave no process of the job."""
    mark = f"SLURM_JOB_ID={job_id()}\0".encode()
    while members := [pid for pid, content in environments() if b"\0" + mark in content]:
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def environments() -> Iterator[tuple[int, bytes]]:
    """What /proc says of the variables of each process."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue


if __name__ == "__main__":
    sys.exit(main())
