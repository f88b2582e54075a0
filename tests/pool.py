"""The pool: one process that has imported everything and forks whatever tests need.

A recipe or command is a child of its own, from its first line to the end of the interpreter, with
its own signals and exit code; a shell reaches the pool through a small client that hands over its
descriptors and process group. The ranks of ``run_ranks`` are children too, which stay for
the next job: spawning four costs seconds, nearly all of it imports, a job on those that are there
hundredths. Each job gets a process group of its own over a fresh file store. Half of what a small
job costs is what a first step finds out: groups that connect, and what DTensor keeps for each
operation on a mesh; ``run_again`` keeps the groups for the next job on as many ranks.

What a process can do only once, as installing a device, is a *setup*: each has ranks of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import pickle
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache, wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

PATIENCE_S = 150
RANK = "-rank"
"""In place of a program: a rank of ``run_ranks``."""
LINE = "FORGEKIT_TEST_POOL"
"""Variable with the name of its socket: workers of pytest-xdist share one."""
MOST_THREADS = 40
"""Of a rank that is used again. Each gloo group that something in torch still holds has a thread
that wakes a hundred times a second; after some hundred jobs they would use up the machine."""
_PR_SET_PDEATHSIG = 1
CLIENT = """
import json, os, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
fds = []
for fd in (0, 1, 2):
    try: os.fstat(fd); fds.append(fd)
    except OSError: pass
request = {"fds": fds, "group": os.getpgrp(), "argv": sys.argv[2:], "cwd": os.getcwd(),
    "environ": dict(os.environ)}
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with socket.socket(socket.AF_UNIX) as line:
    line.connect(sys.argv[1])
    socket.send_fds(line, [len(message := json.dumps(request).encode()).to_bytes(8, "big")], fds)
    line.sendall(message)
    for fd in fds: os.close(fd)
    answer = line.makefile().read().split()
code = int(answer[1]) if len(answer) == 2 else 99
os._exit(code if code >= 0 else 128 - code)
"""


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
        setup: ``"module:function"``, called once in each rank, which then serves this setup
            alone. The function returns the backend of the process groups.
        keep: Whether the process groups may be those of the job before and stay for the next one.

    Returns:
        What each rank returned.

    Raises:
        RankError: If a rank raised, died or did not finish in time.
    """
    assert group or not keep
    where = inspect.getfile(function), function.__module__, function.__qualname__
    ranks = _RANKS.setdefault(setup, Ranks())
    return ranks.call(setup, (where, world, pickle.dumps(args), group), timeout_s, keep)


def fresh() -> str:
    """A setup for jobs that measure their process: what others left in its heap would count."""
    return "gloo"


def run_again(function: Callable[..., Any], world: int, *args: Any, **options: Any) -> list[Any]:
    """As ``run_ranks``, for a function in which no rank raises or leaves a message behind."""
    return run_ranks(function, world, *args, keep=True, **options)


def on_ranks(world: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let ``world`` ranks run a test, which takes its rank and their number before all else.

    Args:
        world: Number of ranks.
        **options: As for ``run_ranks``.

    Returns:
        What makes a test of a function at the top level of its file.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(**arguments: Any) -> None:
            run_ranks(function, world, *arguments.values(), **options)

        function.__qualname__ += ".__wrapped__"  # there ranks find it
        arguments = [*inspect.signature(function).parameters.values()][2:]
        vars(test)["__signature__"] = inspect.Signature(arguments)
        return test

    return decorate


class Ranks:
    """The ranks of a setup, kept for the next job; after a failure they are replaced."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Forked, Connection]] = []
        self._kept: tuple[int, Path | None] = 0, None
        """World and store of the job before, if its groups are still there."""
        atexit.register(self.end)

    def call(self, setup: str, job: tuple[Any, ...], timeout_s: float, keep: bool) -> list[Any]:
        """Run a job on as many ranks as it wants."""
        world, (before, store) = job[1], self._kept
        again = keep and before == world
        store = store if again else next(_stores())
        while len(self._ranks) < world:
            here, there = Pipe()
            command = [RANK, json.dumps(sys.path), setup]
            process = Forked(command, log=1, group=os.getpgrp(), keep=there.fileno())
            there.close()  # or a rank that dies would not be noticed
            self._ranks.append((process, here))
        ranks = self._ranks[:world]
        for rank, (process, connection) in enumerate(ranks):
            os.kill(process.pid, signal.SIGCONT)
            connection.send_bytes(pickle.dumps((rank, job, store, keep, again)))
        results, errors = _collect([connection for _, connection in ranks], timeout_s)
        self._kept = (world, store) if keep and not errors else (0, None)
        if errors or any(_threads(process.pid) > MOST_THREADS for process, _ in self._ranks):
            self.end()  # all of them, for the groups that they still hold join them
        for process, _ in self._ranks[:world]:  # threads of groups would go on waking up
            os.kill(process.pid, signal.SIGSTOP)
        if errors:
            raise RankError("\n".join(errors))
        return [pickle.loads(results[rank]) for rank in range(world)]

    def end(self) -> None:
        """Kill all ranks."""
        while self._ranks:
            process, connection = self._ranks.pop()
            process.kill()
            process.wait()
            connection.close()
        self._kept = 0, None


_RANKS: dict[str, Ranks] = {}


@cache
def _stores() -> Iterator[Path]:
    """Files for the stores of jobs, in a folder that is empty at first and gone in the end."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return (folder / str(number) for number in itertools.count())


def _threads(process: int) -> int:
    return len([*Path(f"/proc/{process}").glob("task/*")])  # none if it is gone


def _collect(connections: list[Connection], timeout_s: float) -> tuple[dict[int, bytes], list[str]]:
    """The results by rank, and the ranks' errors."""
    results: dict[int, bytes] = {}
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
    return results, errors


def _work(connection: Connection, setup: str) -> None:
    """Be a rank: do jobs until nobody sends any."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, name = setup.partition(":")
    backend = getattr(importlib.import_module(module), name)() if setup else "gloo"
    groups: dict[Any, Any] = {}
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
        sys.stdout.flush()
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

    from forgekit import mesh

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


class Shell:
    """Runs command lines in which ``recipe`` is a program; ``recipe pretrain out=a | head``."""

    def __init__(self, line: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", CLIENT, line]
        self._preamble = f'recipe() {{ {shlex.join(command)} "$@"; }}\nset -m +m\n'
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: str, **options: object) -> subprocess.Popen[str]:
        """Start a command line in a process group of its own."""
        shown: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        line = ["bash", "-c", self._preamble + command]
        process = subprocess.Popen(line, process_group=0, **shown | options)
        self._started.append(process)
        return process

    def run(self, command: str, **options: object) -> tuple[int, str]:
        """Run a command line to its end; its exit code and what it wrote."""
        process = self.start(command, **options)
        output, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output

    def close(self) -> None:
        """Kill what is left of what was started, recipes that outlived their command line too."""
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self._started.clear()


@contextlib.contextmanager
def open_shell() -> Iterator[Shell]:
    """A shell whose recipes are forked from the process that has imported everything."""
    shell = Shell(server())
    try:
        yield shell
    finally:
        shell.close()


def start() -> None:
    """Start that process for this one and its children; it ends with this one.

    Nobody waits for it before it is needed.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[LINE] = str(Path(folder) / "line")
    process = subprocess.Popen(
        [sys.executable, __file__, os.environ[LINE]],
        stdin=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    atexit.register(process.wait)
    atexit.register(process.kill)


@cache
def server() -> str:
    """The name of its socket, once it listens."""
    if LINE not in os.environ:
        start()
    while not Path(os.environ[LINE]).exists():  # however long a busy machine imports
        time.sleep(0.01)
    return os.environ[LINE]


class Forked:
    """A process that was forked, as ``subprocess.Popen`` shows one.

    Args:
        argv: A recipe and its arguments.
        log: Descriptor for what it writes.
        env: Its environment.
        cwd: Folder to start in.
        group: Its process group, by the process that leads it; 0 for one of its own.
        keep: A further descriptor; its number there is the last argument.

    Attributes:
        pid: Its process id.
        returncode: None while it runs; negative for the signal that ended it.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: int,
        env: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        group: int = 0,
        keep: int | None = None,
    ) -> None:
        kept = [] if keep is None else [keep]
        request: dict[str, Any] = {"fds": [0, 1, 2], "group": group, "argv": [*argv]}
        request |= {"cwd": str(cwd or Path.cwd()), "environ": {**env}}
        message = json.dumps(request).encode()
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(server())
        with open(os.devnull) as nothing:
            head = len(message).to_bytes(8, "big")
            socket.send_fds(self._line, [head], [nothing.fileno(), log, log, *kept])
        self._line.sendall(message)
        self._answers = self._line.makefile()
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        if self.returncode is None and select.select([self._line], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def _receive(line: socket.socket) -> tuple[dict, list[int]]:
    head, fds, _, _ = socket.recv_fds(line, 8, 4)
    message = b""
    while len(message) < int.from_bytes(head, "big"):
        message += line.recv(1 << 16)
    return json.loads(message), fds


def _become(request: dict, fds: list[int]) -> list[str]:
    """Take over what the shell gave to its client; streams are opened as Python does at start."""
    taken = dict(zip(request["fds"], fds, strict=False))
    for fd in (0, 1, 2):
        if fd in taken:
            os.dup2(taken[fd], fd)
        else:
            os.close(fd)
    for fd in taken.values():
        os.close(fd)
    try:
        os.setpgid(0, request["group"])
    except PermissionError:  # the group was killed before this process came to it
        os.kill(os.getpid(), signal.SIGKILL)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = None
        if fd in taken:
            stream = open(fd, mode, closefd=False, buffering=1 if fd == 2 else -1)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    return [*request["argv"], *map(str, fds[len(taken) :])]


def _serve(path: str) -> list[str]:
    """Answer requests; returns in a child only, with the arguments of its recipe."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that keep a child
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}-")
        server.listen()
        os.rename(f"{path}-", path)  # who sees it can connect
        while True:
            line, _ = server.accept()
            if os.fork() == 0:
                server.close()
                return _keep(line)
            line.close()


def _keep(line: socket.socket) -> list[str]:
    """Fork a child and tell its process id, wait for it and tell its exit code."""
    _die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, fds = _receive(line)
    start, started = os.pipe()
    if (child := os.fork()) == 0:
        line.close()
        _die_with_parent()
        argv = _become(request, fds)
        os.write(started, b".")
        os.close(start)
        os.close(started)
        return argv
    for fd in (*fds, started):
        os.close(fd)
    os.read(start, 1)  # it is what it was asked to be, so a signal finds it so
    with contextlib.suppress(OSError):
        line.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def draw() -> None:
    """Draw a picture such as runs do at their end: most of it is imports and fonts."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    figure.subplots().loglog([1, 10])
    figure.savefig(io.BytesIO())


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    import gc

    import pytest  # noqa: F401
    import s3fs  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.profiler
    import transformers.models.llama.modeling_llama  # noqa: F401

    import forgekit
    import forgekit.config
    from forgekit.cli import recipes_folder

    for name in dir(forgekit):  # each is imported when it is first asked for
        getattr(forgekit, name)
    torch.set_num_threads(1)
    draw()
    _die_with_parent()
    gc.freeze()  # what was imported stays shared with the children, also while they end
    name, *sys.argv[1:] = _serve(sys.argv[1])
    if name == RANK:
        _, path, setup, descriptor = sys.argv
        sys.path[:] = json.loads(path)
        _work(Connection(int(descriptor)), setup)
    elif name == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = name if name.endswith(".py") else str(recipes_folder() / f"{name}.py")
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:1] = [os.path.dirname(sys.argv[0]), *paths]
        runpy.run_path(sys.argv[0], run_name="__main__")
