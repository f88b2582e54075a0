"""``srun`` without a cluster: starts the tasks of a step and passes signals on to them.

What matters of the real one: a signal reaches the tasks and nothing that they started;
``--kill-on-bad-exit`` kills the other tasks without warning, ``--wait`` some time after the first
has ended; and with its tasks everything ends that they have left behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import suppress

import sbatch

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main() -> int:
    """Run the tasks; return the highest exit code."""
    parser = argparse.ArgumentParser(prog="srun", allow_abbrev=False)
    parser.add_argument("--kill-on-bad-exit", type=int, nargs="?", const=1, default=0)
    parser.add_argument("--wait", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    tasks: dict[int, int | None] = {}
    for number in FORWARDED:
        signal.signal(number, lambda number, _: forward(number, tasks))
    signal.signal(signal.SIGALRM, lambda *_: forward(signal.SIGKILL, tasks))
    for rank in range(int(os.environ["SLURM_NTASKS"])):
        tasks[start(options.command, rank)] = None
    while None in tasks.values():
        pid, status = os.wait()
        if options.wait and all(code is None for code in tasks.values()):
            signal.alarm(options.wait)
        tasks[pid] = os.waitstatus_to_exitcode(status)
        if tasks[pid] and options.kill_on_bad_exit:
            forward(signal.SIGKILL, tasks)
        (sbatch.HERE / "tasks" / str(pid)).unlink()
    sbatch.kill_all(f"FAKE_SLURM_STEP={os.getpid()}")
    return max(128 - code if code < 0 else code for code in tasks.values() if code is not None)


def start(command: list[str], rank: int) -> int:
    """Start a task on its node."""
    here = int(os.environ["SLURM_NTASKS_PER_NODE"])
    own = {"PROCID": rank, "NODEID": rank // here, "LOCALID": rank % here, "STEP_ID": 0}
    variables = {f"SLURM_{name}": str(value) for name, value in own.items()}
    variables = os.environ | variables | {"FAKE_SLURM_STEP": str(os.getpid())}
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    (sbatch.HERE / "tasks").mkdir(exist_ok=True)
    (sbatch.HERE / "tasks" / str(process.pid)).touch()
    process.returncode = 0  # waited for above
    return process.pid


def forward(number: int, tasks: dict[int, int | None]) -> None:
    """Pass a signal on to the tasks that are alive."""
    for pid, code in tasks.items():
        if code is None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
