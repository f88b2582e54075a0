"""Runs of recipes on next to nothing: in this process or in real ones, and what they left behind.

Real processes are only ever watched through what they write: a test waits for a step or a file, not
for the clock, so that a busy machine makes it slower and not wrong.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import torch
from pool import Forked
from safetensors.torch import load_file
from saved import assert_same

import forgekit as fk
from forgekit import report
from forgekit.cli import recipes_folder

PATIENCE_S = 150
"""With a job that writes nothing: on a busy machine it is slow, but it goes on."""
POLL_S = 0.005
MODEL = {"vocab_size": 64, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 64}
TINY = {"device": "cpu", "log_every": 1, "save_every": 5, "eval_every": 0, "optim.warmup": 5}
TINY |= {"global_batch_size": 8, "batch_size": 4, "data.seq_len": 16, "data.workers": 1}
TINY |= {"model.max_seq_len": 16} | {f"model.{name}": size for name, size in MODEL.items()}


def arguments(**settings: Any) -> list[str]:
    """Settings as the command line takes them, on top of ``TINY``; ``__`` stands for a dot."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return [f"{name}={value}" for name, value in (TINY | given).items()]


def load_recipe(recipe: str | Path) -> ModuleType:
    """Import a recipe from its file."""
    path = recipe if isinstance(recipe, Path) else recipes_folder() / f"{recipe}.py"
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_here(recipe: str | Path, command_line: Sequence[str], *, is_drawn: bool = False) -> None:
    """Run a recipe's ``main`` in this process; signal handlers are as before in the end.

    The pictures at its end, which take as long as a small run, are left out unless asked for.
    """
    with (
        signal_handlers_kept(),
        mock.patch.object(sys, "argv", [f"{Path(recipe).stem}.py", *command_line]),
        mock.patch.object(fk, "wrap_up", fk.wrap_up if is_drawn else draw_nothing),
        mock.patch.object(report, "find_spec", report.find_spec if is_drawn else draw_nothing),
    ):
        load_recipe(recipe).main()


def draw_nothing(*_arguments: Any, **_options: Any) -> None:
    """Stands in for ``forgekit.wrap_up``, and for the search for a drawing library."""


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Put back the handlers that a recipe's ``setup`` installs for the life of its process."""
    heard = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Job:
    """A command and all processes that it starts, whatever sessions they put themselves into.

    Args:
        command: The command, or a recipe and its arguments if it is forked.
        log: File for what its processes write.
        cwd: Folder to start in.
        forked: Number of ranks to fork instead of starting a command: processes that ``pool``
            forks with what torchrun tells its ranks.
        variables: Further variables of their environment.

    Attributes:
        process: The process of the command itself, or of the first rank.
    """

    def __init__(self, command, *, log, cwd=None, forked=0, variables=MappingProxyType({})):
        self._log = log
        self._mark = uuid.uuid4().hex
        given = os.environ | {"OMP_NUM_THREADS": "1", "FORGEKIT_TEST_JOB": self._mark} | variables
        self.ranks: list[Any] = []
        with log.open("ab" if forked else "wb") as stream:
            stream.truncate(0)
            for place in _ranks(forked):  # one process group, that of the first
                group = self.ranks[0].pid if self.ranks else 0
                options = {"env": given | place, "cwd": cwd, "group": group}
                self.ranks.append(Forked(command, log=stream.fileno(), **options))
            if not forked:
                to = {"stdout": stream, "stderr": subprocess.STDOUT}
                self.ranks = [subprocess.Popen(command, env=given, cwd=cwd, **to)]
        self.process = self.ranks[0]

    @property
    def output(self) -> str:
        """What its processes have written so far."""
        return self._log.read_text(errors="replace")

    def members(self) -> list[int]:
        """Its processes that are alive, found by a variable that they inherit, or their group."""
        found = []
        leader = str(self.process.pid) if isinstance(self.process, Forked) else ""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                state, _, group = (folder / "stat").read_text().rpartition(") ")[2].split()[:3]
            except OSError:
                continue
            if self._mark.encode() in environment or (group == leader and state not in "ZX"):
                found.append(int(folder.name))
        return found

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until ``condition()``; fail with the output if the job ends or falls silent."""
        said, deadline = -1, 0.0
        while not condition():
            if self._is_over() and not condition():
                raise AssertionError(f"the job ended before {what}:\n{self.output}")
            if (size := self._log.stat().st_size) != said:
                said, deadline = size, time.monotonic() + PATIENCE_S
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what}, silent for {PATIENCE_S} s:\n{self.output}")
            time.sleep(POLL_S)

    def end(self) -> int:
        """Wait until no process is left; return the exit code of the command itself."""
        return self.codes()[0]

    def codes(self) -> list[int]:
        """Wait until no process is left; the exit code of each rank, negative for signals."""
        self.wait_for(self._is_over, "end")
        return [rank.wait() for rank in self.ranks]

    def kill(self) -> None:
        """Kill all of its processes, and those that they start meanwhile."""
        while members := self.members():
            for pid in members:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.poll()
        for rank in self.ranks:
            rank.wait()

    def _is_over(self) -> bool:
        return all(rank.poll() is not None for rank in self.ranks) and not self.members()


def free_port() -> str:
    """A port that nobody has."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def rank_variables(rank: int, world: int, port: str) -> dict[str, str]:
    """What torchrun tells a rank."""
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return address | {name: str(size) for name, size in sizes.items()}


def _ranks(count: int) -> list[dict[str, str]]:
    """The variables of each rank; none for a process alone."""
    port = free_port()
    return [rank_variables(n, count, port) if count > 1 else {} for n in range(count)]


def rank_of(pid: int) -> int | None:
    """The rank of a process that a launcher has started; None for another."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), None)


@contextmanager
def launch(
    recipe: str | Path,
    command_line: Sequence[str],
    *,
    log: Path,
    ranks: int = 1,
    by: str = "fork",
    **options: Any,
) -> Iterator[Job]:
    """Start a recipe; nothing of it survives the block.

    Args:
        recipe: Its name, or its file.
        command_line: Its arguments.
        log: File for what it writes.
        ranks: Number of ranks.
        by: ``"fork"`` from a process that has imported everything, which costs nearly nothing;
            ``"command"``, as a user types it: by the interpreter, or torchrun for several ranks.
        **options: As for ``Job``.
    """
    path = recipe if isinstance(recipe, Path) else recipes_folder() / f"{recipe}.py"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher = [sys.executable, *(torchrun if ranks > 1 else [])] if by == "command" else []
    forked = 0 if by == "command" else ranks
    job = Job([*launcher, str(path), *command_line], log=log, forked=forked, **options)
    try:
        yield job
    finally:
        job.kill()


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Rows of ``metrics.jsonl``; none if it is not there yet."""
    path = out / "metrics.jsonl"
    return fk.metrics.read_metrics(path) if path.exists() else []


def last_step(out: Path) -> int:
    """The newest step in ``metrics.jsonl``."""
    return max((row["step"] for row in rows_of(out)), default=0)


def saved_step(out: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    path = fk.latest_checkpoint(out / "checkpoints")
    return 0 if path is None else int(path.name.removeprefix("step_"))


def status_of(out: Path) -> dict[str, Any]:
    """What ``status.json`` says."""
    return json.loads((out / "status.json").read_text())


def results(out: Path) -> list[dict[str, Any]]:
    """What must be bitwise the same in two runs: each row without clock and memory."""
    measured = ("perf/", "memory/", "health/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows_of(out)]


def tensors_of(out: Path, step: int | None = None) -> Mapping[str, torch.Tensor]:
    """All tensors of a checkpoint, by default the newest, whole, however many ranks wrote it."""
    checkpoints = out / "checkpoints"
    path = fk.latest_checkpoint(checkpoints) if step is None else checkpoints / f"step_{step:08d}"
    assert path is not None
    specs = json.loads((path / "manifest.json").read_text())["tensors"]
    files = {int(file.stem[-5:]): load_file(file) for file in path.glob("rank_*.safetensors")}
    tensors = {}
    for key, spec in specs.items():
        tensors[key] = torch.empty(spec["shape"], dtype=getattr(torch, spec["dtype"]))
        for rank, name, box in spec.get("chunks", []):
            inside = () if box is None else zip(*box, strict=True)
            tensors[key][tuple(slice(at, at + n) for at, n in inside)] = files[rank][name]
    return tensors


def assert_same_run(out: Path, expected: Path) -> None:
    """Compare two runs bit by bit: each step once, each loss, and what was saved at the end."""
    for found, row in zip(results(out), results(expected), strict=True):
        assert found == row
    assert saved_step(out) == saved_step(expected)
    assert_same(tensors_of(out), tensors_of(expected))
