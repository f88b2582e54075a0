"""Recipes in a real shell, with its pipes, redirections, limits and signals, in a second each.

A process that has imported everything waits for requests. What a shell starts is a small client: it
hands over its descriptors, process group and limits, and the process forks a child that takes them
and runs the recipe from its first line to the end of the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 60
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
    code = line.makefile().readline()
os._exit(int(code) if code.strip() else 99)
"""


class Shell:
    """Runs command lines in which ``recipe`` is a program; ``recipe pretrain out=a | head``."""

    def __init__(self, line: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", CLIENT, line]
        self._preamble = f'recipe() {{ {shlex.join(command)} "$@"; }}\nset -m +m\n'

    def start(self, command: str, **options: object) -> subprocess.Popen[str]:
        """Start a command line in a process group of its own."""
        return subprocess.Popen(
            ["bash", "-c", self._preamble + command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
            **options,  # pyright: ignore[reportArgumentType]
        )

    def run(self, command: str, **options: object) -> tuple[int, str]:
        """Run a command line to its end; its exit code and what it wrote."""
        process = self.start(command, **options)
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, output


@contextmanager
def open_shell() -> Iterator[Shell]:
    """Start the process that has imported everything; with it all runs end."""
    folder = Path(tempfile.mkdtemp())
    line = str(folder / "line")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, __file__, line], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield Shell(line)
    finally:
        server.kill()
        server.communicate()
        shutil.rmtree(folder)


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
    os.setpgid(0, request["group"])
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
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        print("ready", flush=True)  # noqa: T201
        while True:
            line, _ = server.accept()
            request, fds = _receive(line)
            if (child := os.fork()) == 0:
                line.close()
                server.close()
                _become(request, fds)
                return request["argv"]
            for fd in fds:
                os.close(fd)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                line.sendall(f"{code if code >= 0 else 128 - code}\n".encode())
            line.close()


if __name__ == "__main__":
    import gc

    import torch._dynamo
    import torch.distributed.fsdp

    from forgekit.cli import recipes_folder

    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays shared with the children, also while they end
    name, *sys.argv[1:] = _serve(sys.argv[1])
    sys.argv[0] = name if name.endswith(".py") else str(recipes_folder() / f"{name}.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
