"""Replica groups in real processes beside torchft's lighthouse, and what their logs must say."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import replica_rank
import torch
from runs import Job
from torch import Tensor

import forgekit as fk

HEARTBEAT_S = 1.0
"""Without a sign of life for so long a group is lost to the lighthouse."""
PROGRAM = Path(replica_rank.__file__)
PATIENCE_S = 150


class Groups:
    """Groups of one run.

    Args:
        folder: Where they write.
        lighthouse: Its address.
        **common: What each is given; see ``replica_rank``.
    """

    def __init__(self, folder: Path, lighthouse: str, **common: Any) -> None:
        self.folder, self._lighthouse, self._common = folder, lighthouse, common
        self.started: list[tuple[str, Job]] = []

    def prepare(self, name: str, ranks: int = 1, **given: Any) -> Path:
        """Start a group up to where it joins; return the file that lets it."""
        go = self.folder / f"go{len(self.started)}"
        layout = {"dp_shard": ranks} if ranks > 1 else None
        at = {"name": name, "folder": str(self.folder), "lighthouse": self._lighthouse}
        settings = {"layout": layout, "go": str(go), **self._common, **at, **given}
        log = self.folder / f"{go.name}.log"
        job = Job([str(PROGRAM), json.dumps(settings)], log=log, forked=ranks)
        self.started.append((name, job))
        return go

    def wait_until(self, condition: Any, what: str, patience_s: float = PATIENCE_S) -> None:
        """Wait for something; if it takes long, fail with what the groups wrote."""
        deadline = time.monotonic() + patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} in {patience_s} s\n{self.output()}")
            time.sleep(0.01)

    def ready(self, go: Path) -> None:
        """Wait until a group waits to join."""
        number = int(go.name.removeprefix("go"))
        ranks = range(len(self.started[number][1].ranks))
        self.wait_until(lambda: all(Path(f"{go}.ready{r}").exists() for r in ranks), go.name)

    def events(self) -> list[dict[str, Any]]:
        """What all ranks have logged."""
        texts = (file.read_text() for file in self.folder.glob("*.jsonl"))
        # What is behind the last line's end is still being written.
        return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]

    def last_step(self) -> int:
        """The newest step that a group has committed."""
        return max((e["step"] for e in self.updates()), default=-1)

    def next_update(self, since: float, besides: set[int]) -> float:
        """Wait for a step after a time by another process; return when it was."""
        later: list[float] = []

        def look() -> bool:
            updates = (e for e in self.updates() if e["pid"] not in besides)
            later[:] = [e["t"] for e in updates if e["t"] > since]
            return bool(later)

        self.wait_until(look, "step of the survivors")
        return min(later)

    def has_committed(self, processes: set[int]) -> bool:
        """Whether one of these processes has taken a step."""
        return any(e["pid"] in processes for e in self.updates())

    def updates(self) -> list[dict[str, Any]]:
        """Of the last events those of steps that were committed."""
        return [e for e in self.recent() if e["event"] == "updates"]

    def recent(self) -> list[dict[str, Any]]:
        """The last events of each rank."""
        events = []
        for file in self.folder.glob("*.jsonl"):
            with file.open("rb") as stream:
                stream.seek(max(0, stream.seek(0, 2) - 8192))
                lines = stream.read().decode().split("\n")[:-1]
            events += [json.loads(line) for line in lines if line.startswith('{"t"')]
        return events

    def result(self, name: str) -> dict[str, Any]:
        """What a group ended with."""
        result: dict[str, Any] = {}
        for file in self.folder.glob(f"{name}.*.pt"):
            result |= torch.load(file)
        return result

    def output(self) -> str:
        """The end of what each group wrote, without torchft's notes."""
        kept = []
        for name, job in self.started:
            lines = [line for line in job.output.splitlines() if "[INFO]" not in line]
            kept += [f"--- {name}", *lines[-25:]]
        return "\n".join(kept)

    def end(self) -> None:
        """Kill what is left."""
        for _, job in self.started:
            job.kill()


def start_lighthouse() -> Any:
    """A lighthouse in this process."""
    from torchft.coordination import LighthouseServer

    times = {"quorum_tick_ms": 50, "heartbeat_timeout_ms": int(1000 * HEARTBEAT_S)}
    options = {"min_replicas": 1, "join_timeout_ms": 20_000, **times}
    return LighthouseServer(bind="127.0.0.1:0", **options)


@contextmanager
def groups(folder: Path, **common: Any) -> Iterator[Groups]:
    """A lighthouse, and no process left after the block."""
    lighthouse = start_lighthouse()
    run = Groups(folder, lighthouse.address(), **common)
    try:
        yield run
    finally:
        run.end()
        lighthouse.shutdown()


@cache
def undisturbed(steps: int, layers: int) -> Mapping[str, Tensor]:
    """Parameters and averages of one process that trained alone."""
    state = replica_rank.build(model=attrs.evolve(replica_rank.SPEC, layers=layers))
    loader = replica_rank.load(state, batch_size=replica_rank.GLOBAL_BATCH)
    return replica_rank.whole(replica_rank.train(state, loader, fk.OneGroup(), steps=steps))


def assert_undisturbed(result: Mapping[str, Any], steps: int, layers: int = 1) -> None:
    """A group's last state is that of one process, to rounding in float64."""
    assert (result["step"], result["samples"]) == (steps, steps * replica_rank.GLOBAL_BATCH)
    for name, expected in undisturbed(steps, layers).items():
        torch.testing.assert_close(result[name], expected, rtol=1e-10, atol=1e-12, msg=name)


def assert_each_sample_once(events: list[dict[str, Any]], steps: int) -> None:
    """Some attempt at each step was committed, and its groups had each of its rows once."""
    for step in range(steps):
        attempts = [e for e in events if e["step"] == step and e["event"] == "commits"]
        assert attempts, f"no attempt at step {step} was committed"
        tried = [e for e in events if e["step"] == step and e["event"] == "tries"]
        groups = attempts[-1]["part"][1]
        by_part = {(*e["part"], *e["rows"]) for e in tried if e["part"][1] == groups}
        rows = sorted(row for _, _, *rows in by_part for row in rows)
        first = step * replica_rank.GLOBAL_BATCH
        assert rows == [*range(first, first + replica_rank.GLOBAL_BATCH)], step
