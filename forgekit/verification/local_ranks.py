"""Local ranks: processes that call a function, as torchrun would start them.

The ranks find each other through the variables that torchrun sets, and through a store that this
process holds, so no port has to be guessed. Each computes with one thread and without an
accelerator, so any number of them runs on any number of cores.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from forgekit.environment import end_with_parent

GRACE_S = 0.5
"""How long a rank that raised stays, so that a dead one is noticed first."""
LOG_LINES = 12


class LocalRankError(RuntimeError):
    """A rank raised, died or timed out; the message has its output."""


def run_local_ranks(
    function: Callable[..., Any], world: int, *args: Any, folder: Path, timeout_s: float
) -> list[Any]:
    """Call ``function(*args)`` in ``world`` processes and return their results by rank.

    Args:
        function: What each rank calls. It and its arguments are pickled, so it is at the top level
            of a file that a process can import.
        world: Number of ranks.
        *args: Its arguments.
        folder: Where the ranks' output and results go, a file for each.
        timeout_s: Seconds after which ranks that have not finished are killed.

    Returns:
        What each rank returned.

    Raises:
        LocalRankError: If a rank raised, died or did not finish in time.
    """
    job = pickle.dumps((function, args))
    # Forks of a server that has imported torch; spawned processes cost seconds each.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forgekit.verification.measure"])
    limit = timedelta(seconds=timeout_s)
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
    deadline = time.monotonic() + timeout_s
    given = (job, world, store.port, folder, deadline)
    ranks = [
        context.Process(target=_work, args=(rank, *given), daemon=True) for rank in range(world)
    ]
    try:
        for process in ranks:
            process.start()
        while waiting := [process for process in ranks if process.exitcode is None]:
            if any(process.exitcode for process in ranks) or time.monotonic() > deadline:
                break
            wait([process.sentinel for process in waiting], deadline - time.monotonic())
        if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
            raise LocalRankError(f"rank {failed[0]} of {world} {_failure(failed[0], folder)}")
        if waiting:
            late = [rank for rank, process in enumerate(ranks) if process in waiting]
            raise LocalRankError(_hanging(late, world, folder, timeout_s))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [pickle.loads((folder / f"rank{rank}.result").read_bytes()) for rank in range(world)]


def _work(rank: int, job: bytes, world: int, port: int, folder: Path, deadline: float) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    output = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_COMPILE_DISABLE": "1",
    }
    torch.set_num_threads(1)
    with (folder / f"rank{rank}.stack").open("w") as file:
        # Where each thread is when the time is over; the other process reads it. The monotonic
        # clock is the same in both, and this process may have started late.
        faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.1), file=file)
        try:
            function, args = pickle.loads(job)
            (folder / f"rank{rank}.result").write_bytes(pickle.dumps(function(*args)))
        except BaseException as error:  # a script's SystemExit is a failure here
            sentence = traceback.format_exception_only(error)[-1].strip()
            text = f"{sentence}\n\n{''.join(traceback.format_exception(error)).rstrip()}"
            (folder / f"rank{rank}.error").write_text(text)
            time.sleep(GRACE_S)
            os._exit(1)
        os._exit(0)  # skips the clean-up of torch's threads and groups


def _failure(rank: int, folder: Path) -> str:
    error = folder / f"rank{rank}.error"
    if error.exists():
        return f"raised {error.read_text()}"
    output = _lines(folder / f"rank{rank}.log", slice(-LOG_LINES, None))
    return f"died without raising an error.{output}"


def _hanging(late: list[int], world: int, folder: Path, timeout_s: float) -> str:
    """Describe the ranks that have not finished and where they are."""
    time.sleep(0.2)  # time for the ranks to write their stacks
    names = ", ".join(map(str, late))
    text = f"of {world} ranks {names} did not finish within {timeout_s:g} s."
    for rank in late:
        if stack := _lines(folder / f"rank{rank}.stack", slice(LOG_LINES)):
            text += f"\nrank {rank} is at:{stack}"
    return text


def _lines(path: Path, part: slice) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return "".join(f"\n  {line}" for line in lines[part])
