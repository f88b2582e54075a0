"""Real processes of recipes and commands that start in hundredths of a second instead of seconds.

A process that has imported everything waits for requests, and forks a child for each: a process of
its own, from its first line to the end of the interpreter, with its own signals and exit code. A
shell reaches it through a small client that hands over its descriptors, process group and limits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import resource
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
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

PATIENCE_S = 150
LINE = "FORGEKIT_TEST_SHELLS"
"""Variable with the name of its socket: workers of pytest-xdist share one."""
_PR_SET_PDEATHSIG = 1
CLIENT = """
import json, os, resource, signal, socket, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
fds = []
for fd in (0, 1, 2):
    try: os.fstat(fd); fds.append(fd)
    except OSError: pass
request = {"fds": fds, "group": os.getpgrp(), "argv": sys.argv[2:], "cwd": os.getcwd(),
    "nohup": signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, "environ": dict(os.environ),
    "limit": resource.getrlimit(resource.RLIMIT_FSIZE)}
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


class Shell:
    """Runs command lines in which ``recipe`` is a program; ``recipe pretrain out=a | head``."""

    def __init__(self, line: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", CLIENT, line]
        self._preamble = f'recipe() {{ {shlex.join(command)} "$@"; }}\nset -m +m\n'
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: str, **options: object) -> subprocess.Popen[str]:
        """Start a command line in a process group of its own."""
        process = subprocess.Popen(
            ["bash", "-c", self._preamble + command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            **options,  # pyright: ignore[reportArgumentType]
        )
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

    Attributes:
        pid: Its process id.
        returncode: None while it runs; negative for the signal that ended it.
    """

    def __init__(
        self, argv: Sequence[str], *, log: int, env: Mapping[str, str], cwd: Path | None, group: int
    ) -> None:
        request: dict[str, Any] = {
            "fds": [0, 1, 2],
            "group": group,
            "argv": list(argv),
            "cwd": str(cwd or Path.cwd()),
            "nohup": False,
            "environ": dict(env),
            "limit": resource.getrlimit(resource.RLIMIT_FSIZE),
        }
        message = json.dumps(request).encode()
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(server())
        with open(os.devnull) as nothing:
            head = len(message).to_bytes(8, "big")
            socket.send_fds(self._line, [head], [nothing.fileno(), log, log])
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
    head, fds, _, _ = socket.recv_fds(line, 8, 3)
    message = b""
    while len(message) < int.from_bytes(head, "big"):
        message += line.recv(1 << 16)
    return json.loads(message), fds


def _become(request: dict, fds: list[int]) -> None:
    """Take over what the shell gave to its client; streams are opened as Python does at start."""
    taken = dict(zip(request["fds"], fds, strict=True))
    for fd in (0, 1, 2):
        if fd in taken:
            os.dup2(taken[fd], fd)
        else:
            os.close(fd)
    for fd in fds:
        os.close(fd)
    try:
        os.setpgid(0, request["group"])
    except PermissionError:  # the group was killed before this process came to it
        os.kill(os.getpid(), signal.SIGKILL)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    resource.setrlimit(resource.RLIMIT_FSIZE, tuple(request["limit"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["nohup"]:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = None
        if fd in taken:
            stream = open(fd, mode, closefd=False, buffering=1 if fd == 2 else -1)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


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
        _become(request, fds)
        os.write(started, b".")
        os.close(start)
        os.close(started)
        return request["argv"]
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

    import s3fs  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.profiler

    import forgekit
    import forgekit.config
    from forgekit.cli import recipes_folder

    for name in forgekit.__all__:  # each is imported when it is first asked for
        getattr(forgekit, name)
    torch.set_num_threads(1)
    draw()
    _die_with_parent()
    gc.freeze()  # what was imported stays shared with the children, also while they end
    name, *sys.argv[1:] = _serve(sys.argv[1])
    if name == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[0] = name if name.endswith(".py") else str(recipes_folder() / f"{name}.py")
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[:1] = [os.path.dirname(sys.argv[0]), *paths]
        runpy.run_path(sys.argv[0], run_name="__main__")
