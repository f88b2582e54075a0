"""Run a test's function on several gloo ranks, in a pool of worker processes that are reused.

Spawning four ranks costs seconds, nearly all of it imports; a job on workers that are there costs
hundredths. A *zygote* is forked when the test session starts, before torch has computed anything
(its thread pools do not survive a fork), and forks workers when they are asked for. Each job gets
a process group of its own over a fresh file store. After a failure the workers are replaced.

Half of what a small job costs is what a first step finds out: groups that connect, and what
DTensor keeps for each operation on a mesh. ``run_again`` keeps the groups for the next job on as
many ranks.

What a process can do only once, as installing a device, is a *setup*: each has workers of its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import inspect
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from forgekit import mesh

_FORK = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1
MOST_THREADS = 40
"""Of a worker that is used again. Each gloo group that something in torch still holds has a thread
that wakes a hundred times a second; after some hundred jobs they would use up the machine."""
_zygote: Connection | None = None


class RankError(AssertionError):
    """A rank raised; the message holds the ranks' tracebacks."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    group: bool = True,
    timeout_s: float = 150,
    setup: str = "",
    keep: bool = False,
) -> list[Any]:
    """Call ``function(rank, world, *args)`` on ``world`` ranks and return their results by rank.

    Args:
        function: A function at the top level of its file.
        world: Number of ranks.
        *args: Picklable arguments.
        group: Whether a default gloo process group is made before and destroyed after.
        timeout_s: Seconds until the job is given up.
        setup: ``"module:function"``, called once in each worker, which then serves this setup
            alone. The function returns the backend of the process groups.
        keep: Whether the process groups may be those of the job before and stay for the next one.

    Returns:
        What each rank returned.

    Raises:
        RankError: If a rank raised, died or did not finish in time.
    """
    assert _zygote is not None, "call ranks.start() in conftest.py before torch computes"
    where = (inspect.getfile(function), function.__module__, function.__qualname__)
    assert group or not keep
    job = where, world, pickle.dumps(args), group
    _zygote.send_bytes(pickle.dumps((job, timeout_s, setup, keep)))
    ok, payload = pickle.loads(_zygote.recv_bytes())
    if not ok:
        raise RankError(payload)
    return [pickle.loads(result) for result in payload]


def fresh() -> str:
    """A setup for jobs that measure their process: what others left in its heap would count."""
    return "gloo"


def run_again(function: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
    """As ``run_ranks``, for a function in which no rank raises or leaves a message behind."""
    return run_ranks(function, world, *args, keep=True, **options)


def start() -> None:
    """Fork the zygote; call it once, before torch computes anything in this process."""
    global _zygote
    if _zygote is None:
        _zygote, there = _FORK.Pipe()
        _FORK.Process(target=_serve, args=(there,), daemon=False).start()
        there.close()


def stop() -> None:
    """End the zygote and its workers."""
    global _zygote
    if _zygote is not None:
        _zygote.send_bytes(b"")
        _zygote.close()
        _zygote = None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(parent: Connection) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pools: dict[str, list[tuple[Any, Connection]]] = {}
    kept: dict[str, tuple[int, Path]] = {}
    folder = tempfile.TemporaryDirectory()
    os.chdir(folder.name)  # and not the checkout, where a user's commands leave data and runs
    stores = (Path(folder.name) / str(number) for number in itertools.count())
    while request := parent.recv_bytes():
        job, timeout_s, setup, keep = pickle.loads(request)
        world, workers = job[1], pools.setdefault(setup, [])
        while len(workers) < world:
            here, there = _FORK.Pipe()
            process = _FORK.Process(target=_work, args=(there, setup))
            process.start()
            there.close()  # or a worker that dies would not be noticed
            workers.append((process, here))
        before, store = kept.pop(setup, (0, None))
        again = keep and before == world
        if store is None or not again:
            store = next(stores)
        for rank, (process, connection) in enumerate(workers[:world]):
            os.kill(process.pid, signal.SIGCONT)
            connection.send_bytes(pickle.dumps((rank, job, store, keep, again)))
        ok, payload = _collect([connection for _, connection in workers[:world]], timeout_s)
        if keep and ok:
            kept[setup] = world, store
        if not ok or any(_threads(process.pid) > MOST_THREADS for process, _ in workers):
            while workers:  # all of them, for the groups that they still hold join them
                process, connection = workers.pop()
                process.kill()
                process.join()
                connection.close()
            kept.pop(setup, None)
        for process, _ in workers[:world]:  # threads of groups would go on waking up
            os.kill(process.pid, signal.SIGSTOP)
        parent.send_bytes(pickle.dumps((ok, payload)))
    for process, _ in itertools.chain(*pools.values()):
        process.kill()
        process.join()
    folder.cleanup()
    os._exit(0)


def _threads(process: int) -> int:
    try:
        return len(os.listdir(f"/proc/{process}/task"))
    except FileNotFoundError:
        return 0


def _collect(connections: list[Connection], timeout_s: float) -> tuple[bool, Any]:
    results: dict[int, Any] = {}
    errors: list[str] = []
    deadline = time.monotonic() + timeout_s
    waiting = dict(enumerate(connections))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(waiting.values()), timeout=left):
            rank = connections.index(ready)
            del waiting[rank]
            try:
                ok, payload = pickle.loads(ready.recv_bytes())
            except (EOFError, ConnectionResetError):
                ok, payload = False, f"rank {rank} died"
            if ok:
                results[rank] = payload
            else:
                errors.append(payload)
                deadline = min(deadline, time.monotonic() + 2)
    if waiting and not errors:
        errors.append(f"ranks {sorted(waiting)} did not finish in {timeout_s} s")
    return (False, "\n".join(errors)) if errors else (True, [results[r] for r in sorted(results)])


def _work(connection: Connection, setup: str) -> None:
    _die_with_parent()
    import torch

    torch.set_num_threads(1)
    module, _, name = setup.partition(":")
    backend = getattr(importlib.import_module(module), name)() if setup else "gloo"
    groups: dict[Any, Any] = {}
    gc.freeze()  # what was imported; a collection after each job then costs little
    gc.disable()  # groups of past jobs are not to be taken down in the midst of the next one
    while True:
        try:
            rank, (where, world, args, group), store, keep, again = pickle.loads(
                connection.recv_bytes()
            )
        except EOFError:
            os._exit(0)
        try:
            function = _load(*where)
            if groups and not again:
                _leave(groups)
            with warnings.catch_warnings(), _sharing(groups) if keep else nullcontext():
                warnings.simplefilter("error")
                # FSDP's advice on in-place operations for each model that ends in a biased Linear.
                warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
                if group and not again:
                    _join(rank, world, backend, store)
                    groups[None] = torch.distributed.group.WORLD
                torch.manual_seed(0)
                result = function(rank, world, *pickle.loads(args))
                if group:
                    torch.distributed.barrier()
            answer = True, pickle.dumps(result)
            del result
            if keep:
                gc.collect()
            else:
                _leave(groups)
        except BaseException:  # torch's CheckpointException derives from it
            answer = False, f"rank {rank} of {world}:\n{traceback.format_exc()}"
        connection.send_bytes(pickle.dumps(answer))


def _join(rank: int, world: int, backend: str, file: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(file), world)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=40)
    )


def _leave(groups: dict[Any, Any]) -> None:
    """Destroy the groups of the jobs before, and forget what was kept with them."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    groups.clear()
    _forget_meshes()


def _sharing(groups: dict[Any, Any]) -> AbstractContextManager[Any]:
    """Let meshes of the same ranks share their groups, those of a later job too."""
    from torch.distributed import device_mesh

    new_group = device_mesh.new_group

    def shared(**options: Any) -> Any:
        key = pickle.dumps(options)
        if key not in groups:
            groups[key] = new_group(**options)
        return groups[key]

    return mock.patch.object(device_mesh, "new_group", shared)


def _forget_meshes() -> None:
    """Let go of the job's meshes, and with them of its groups: torch's caches hold both."""
    from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop

    mesh._forget_groups()
    for holder, name in (
        (_redistribute, "_gen_transform_infos"),
        (_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_cached"),
        (_collective_utils.MeshTopoInfo, "build_from_mesh"),
    ):
        if cached := getattr(holder, name, None):
            cached.cache_clear()
    gc.collect()


def _load(path: str, module: str, name: str) -> Callable[..., Any]:
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found
