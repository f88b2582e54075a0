"""Ranks on this machine: processes that call one function each, as torchrun would start them.

The ranks find each other through the variables that torchrun sets, and through a store that this
process holds, so no port has to be guessed. Each computes with one thread and without an
accelerator, so any number of them runs on any number of cores.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

GRACE_S = 2.0
"""How long the other ranks have to say what went wrong after the first one did."""
LOG_LINES = 12


class LocalRankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message holds what it said."""


def run_local_ranks(
    function: Callable[..., Any], world: int, *args: Any, folder: Path, timeout_s: float
) -> list[Any]:
    """Call ``function(*args)`` in ``world`` processes and return their results by rank.

    Args:
        function: What each rank calls. It and its arguments are pickled, so it is at the top level
            of a file that a process can import.
        world: Number of ranks.
        *args: Its arguments.
        folder: Where the ranks' output goes, a file for each.
        timeout_s: Seconds after which ranks that have not finished are killed.

    Returns:
        What each rank returned.

    Raises:
        ValueError: If the function or its arguments cannot be pickled.
        LocalRankError: If a rank raised, died or did not finish in time.
    """
    job = _pickled(function, args)
    # Processes forked from a server that has imported torch; spawned ones cost seconds each.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forgekit.verification.measure"])
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    deadline = time.monotonic() + timeout_s
    processes: list[Any] = []
    connections: list[Connection] = []
    try:
        for rank in range(world):
            here, there = context.Pipe()
            variables = _variables(rank, world, store.port)
            log = str(folder / f"rank{rank}.log")
            process = context.Process(
                target=_work, args=(there, variables, log, job, deadline), daemon=True
            )
            process.start()
            there.close()  # or a rank that dies would not be noticed
            processes.append(process)
            connections.append(here)
        return _collect(connections, folder, deadline, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"ranks are processes of their own, which import what they call, and {error}. Define "
            "it at the top level of a file (functools.partial adds arguments)."
        ) from None


def _variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets, and what turns accelerators, further threads and the compiler off."""
    return {
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


def _work(
    connection: Connection, variables: dict[str, str], log: str, job: bytes, deadline: float
) -> None:
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    with open(f"{log}.stack", "w") as file:
        # Where each thread is when the time is over; the other process reads it. The monotonic
        # clock is the same in both, and this process may have started late.
        faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.1), file=file)
        try:
            function, args = pickle.loads(job)
            answer = True, function(*args)
        except BaseException as error:  # a SystemExit of a script is a failure here
            answer = False, _describe(error)
        sys.stdout.flush()
        connection.send(answer)
        os._exit(0)  # nothing of torch's threads and groups is worth a clean end


def _end_with_parent(connection: Connection) -> None:
    """Leave with the process that started this one, also if it is killed."""
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _describe(error: BaseException) -> str:
    """One sentence, and the traceback."""
    said = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, AttributeError) and "Can't get attribute" in said:
        said += ": a process cannot import it; define it at the top level of a file"
    return f"{said}\n\n{''.join(traceback.format_exception(error)).rstrip()}"


def _collect(
    connections: list[Connection], folder: Path, deadline: float, timeout_s: float
) -> list[Any]:
    world, results, raised, died = len(connections), {}, [], []
    waiting: dict[Any, int] = {there: rank for rank, there in enumerate(connections)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in wait([*waiting], timeout=left):
            rank = waiting.pop(ready)
            try:
                is_good, results[rank] = ready.recv()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
                if not is_good:
                    raised.append(f"rank {rank} of {world} raised {results[rank]}")
            except (EOFError, OSError):
                output = _tail(folder / f"rank{rank}.log")
                died.append(f"rank {rank} of {world} died without an error of its own.{output}")
            if raised or died:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if died or raised:
        # A rank that died comes first: the others raise because they lost the connection to it.
        raise LocalRankError([*died, *raised][0])
    if waiting:
        time.sleep(0.2)  # the ranks are writing where they are
        raise LocalRankError(_hanging([*waiting.values()], world, folder, timeout_s))
    return [results[rank] for rank in sorted(results)]


def _hanging(ranks: list[int], world: int, folder: Path, timeout_s: float) -> str:
    names = ", ".join(map(str, ranks))
    text = f"of {world} ranks {names} did not finish within {timeout_s:g} s."
    for rank in ranks:
        if tail := _tail(folder / f"rank{rank}.log.stack"):  # else it has not even started
            text += f"\nrank {rank} is here:{tail}"
    return text


def _tail(path: Path) -> str:
    """The last lines that a rank wrote; of stacks the first, the innermost."""
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    lines = lines[:LOG_LINES] if path.suffix == ".stack" else lines[-LOG_LINES:]
    return "".join(f"\n  {line}" for line in lines)
