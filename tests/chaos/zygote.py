"""Starts runs of a recipe by forking from a process that has imported everything.

A restart then costs hundredths of a second instead of seconds, so that a run can be killed a
hundred times. Run as a script, this is the process that forks: it reads requests, one JSON object
per line, forks the ranks of each into a process group of their own, and answers twice: with their
process ids when they are there, and with their exit codes when all have ended. It has computed
nothing, so there are no threads for a fork to lose.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
PATIENCE_S = 60
POLL_S = 0.005
_PR_SET_PDEATHSIG = 1


class Life:
    """One start of a run, until it ends or is killed.

    Attributes:
        pids: The process of each rank; the first leads their process group.
        codes: Exit code of each rank, negative for a signal; None while the run is going on.
    """

    def __init__(self, zygote: Zygote, log: Path, pids: Sequence[int]) -> None:
        self._zygote, self._log = zygote, log
        self.pids = list(pids)
        self.codes: list[int] | None = None

    @property
    def output(self) -> str:
        """What its ranks have written so far."""
        return self._log.read_text(errors="replace")

    def wait_for(self, condition: Any, what: str) -> None:
        """Wait until ``condition()``; fail with the output if all ranks end or time is up."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if not any(_is_alive(pid) for pid in self.pids) and not condition():
                raise AssertionError(f"the run ended before {what}:\n{self.output}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} in {PATIENCE_S} s:\n{self.output}")
            time.sleep(POLL_S)

    def end(self) -> list[int]:
        """Wait until every rank has ended; kill them and fail if they do not."""
        if self.codes is None:
            deadline = time.monotonic() + PATIENCE_S
            while any(_is_alive(pid) for pid in self.pids):
                if time.monotonic() > deadline:
                    self.kill()
                    raise AssertionError(f"the run did not end in {PATIENCE_S} s:\n{self.output}")
                time.sleep(POLL_S)
            self.codes = self._zygote.read()
        return self.codes

    def kill(self) -> None:
        """Kill every rank that is left."""
        if self.codes is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pids[0], signal.SIGKILL)
            self.codes = self._zygote.read()


class Zygote:
    """The process that forks; ``close`` ends it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def start(
        self,
        recipe: str,
        command_line: Sequence[str],
        *,
        log: Path,
        ranks: int = 1,
        faults: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> Life:
        """Fork the ranks of a run.

        Args:
            recipe: Name of the recipe.
            command_line: Its arguments.
            log: File for what the ranks write.
            ranks: Number of ranks.
            faults: What goes wrong on which rank; see ``faults.py``.
        """
        request = {
            "recipe": recipe,
            "command_line": list(command_line),
            "log": str(log),
            "ranks": ranks,
            "faults": {str(rank): dict(given) for rank, given in (faults or {}).items()},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(request)}\n".encode())
        self._process.stdin.flush()
        return Life(self, log, self.read())

    def read(self) -> list[int]:
        """Read an answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that forks has died"
        return json.loads(line)

    def close(self) -> None:
        """End the process and every rank that it has forked."""
        self._process.communicate()


def _is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie: its parent collects ranks one after another."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _serve() -> None:
    import torch
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    from chaos import faults

    import forgekit

    for name in forgekit.__all__:  # each is imported when it is first asked for
        getattr(forgekit, name)
    torch.set_num_threads(1)
    faults.warm_up()
    gc.freeze()
    _die_with_parent()
    for line in sys.stdin:
        request = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            pids = _fork(request, folder)
            _answer(pids)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        _answer(codes)


def _answer(numbers: Sequence[int]) -> None:
    sys.stdout.write(f"{json.dumps(numbers)}\n")
    sys.stdout.flush()


def _fork(request: Mapping[str, Any], folder: str) -> list[int]:
    pids: list[int] = []
    for rank in range(request["ranks"]):
        pid = os.fork()
        if not pid:
            os.setpgid(0, pids[0] if pids else 0)  # before anything can kill the group
            _die_with_parent()
            _live(request, rank, folder)
        leader = pids[0] if pids else pid
        os.setpgid(pid, leader)
        pids.append(pid)
    return pids


def _live(request: Mapping[str, Any], rank: int, folder: str) -> None:
    """Be one rank of a run; does not return."""
    from chaos import faults

    code = 1
    try:
        world = request["ranks"]
        _redirect(request["log"])
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
        sys.argv = [request["recipe"], *request["command_line"]]
        if world > 1:
            _join(rank, world, folder)
        faults.run(request["recipe"], request["faults"].get(str(rank), {}))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _join(rank: int, world: int, folder: str) -> None:
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/store", world)
    limit = timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _redirect(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    empty = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, empty), (1, file), (2, file)):
        os.dup2(source, target)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
