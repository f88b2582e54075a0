"""Agents of torchrun that come and go: a run on whatever of them is there."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist
from runs import Job, arguments, last_step

RANK = Path(__file__).parent / "chaos" / "rank.py"
FORK = ("--run-path", "--start-method=fork")
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PATIENCE_S = 150
"""With agents whose workers write nothing."""
QUICK = "is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt="
"""Survivors wait one second for others."""


@attrs.define
class Agents:
    """A run on agents of one worker each, whose store is in this process.

    Attributes:
        out: The run directory.
        settings: What the recipe is given.
        most: The most agents at a time.
        patience_s: After so long without a sign of life an agent is taken for dead.
        least: Without so many none starts its rank.
        restarts: How often an agent starts its rank again.
        faults: What goes wrong in its ranks; see ``chaos.faults``.
        variables: Of the environment of torchrun.
        jobs: The agents, those that are gone too.
    """

    out: Path
    settings: Mapping[str, Any]
    most: int
    least: int = 1
    restarts: int = 100
    patience_s: int = 15
    faults: Mapping[str, Any] = attrs.field(factory=dict)
    variables: Mapping[str, str] = attrs.field(factory=lambda: VARIABLES)
    jobs: list[Job] = attrs.field(factory=list)
    store: Any = attrs.field(
        factory=lambda: dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    )

    def start(self) -> Job:
        """Start one more."""
        torchrun = [
            *("-m", "torch.distributed.run", f"--nnodes={self.least}:{self.most}"),
            *("--nproc-per-node=1", f"--max-restarts={self.restarts}", "--rdzv-backend=c10d"),
            *("--rdzv-id=elastic", f"--rdzv-endpoint=localhost:{self.store.port}"),
            *("--rdzv-conf", f"{QUICK}{self.patience_s}", *FORK, str(RANK), "pretrain"),
        ]
        command = [*torchrun, *arguments(**{"out": self.out, **self.settings})]
        faults = json.dumps(dict.fromkeys(range(self.most), self.faults))
        log = self.out.with_name(f"agent-{len(self.jobs)}.log")
        variables = {**self.variables, "FORGEKIT_TEST_FAULTS": faults}
        self.jobs.append(Job(command, log=log, variables=variables, forked=1))
        return self.jobs[-1]

    def lose(self, job: Job, *, with_workers: bool) -> None:
        """Kill an agent, as a machine is lost, or alone."""
        if (code := job.process.poll()) is not None:
            raise AssertionError(f"an agent has ended by itself ({code}):\n{job.output[-5000:]}")
        members = job.members() if with_workers else [job.process.pid]
        for pid in members:
            with suppress(ProcessLookupError):  # a rank that ends just now
                os.kill(pid, signal.SIGKILL)
        job.process.wait()

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for what the run writes; fail with what agents and ranks said if it falls silent."""
        said, deadline = -1, 0.0
        while not condition():
            size = sum(len(job.output) for job in self.jobs)
            if size != said:
                said, deadline = size, time.monotonic() + PATIENCE_S
            if time.monotonic() > deadline:
                output = "\n".join(f"{job.output[-2000:]}\n---" for job in self.jobs)
                raise AssertionError(f"no {what}: {self.history()}\n{output}")
            time.sleep(0.02)

    def history(self) -> list[dict[str, Any]]:
        """The events of the run."""
        path = self.out / "history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def starts(self) -> list[tuple[int, int]]:
        """For each start of the run: its ranks, and the step that it went on from."""
        return [(e["ranks"], e["step"]) for e in self.history() if e["event"] == "started"]

    def wait_for_steps(self, ranks: int, since: int = 0) -> None:
        """Wait until a start after the first ``since`` ones has taken steps on so many ranks."""

        def are_taken() -> bool:
            last = self.starts()[since:][-1:]
            return bool(last) and last[0][0] == ranks and last_step(self.out) > last[0][1] + 1

        self.wait_for(are_taken, f"steps on {ranks} ranks")

    def stop(self) -> list[int]:
        """Send SIGTERM to all agents; their exit codes, negative for signals."""
        living = [job for job in self.jobs if job.process.poll() is None]
        for job in living:
            job.process.send_signal(signal.SIGTERM)
        return [job.end() for job in living]

    def close(self) -> None:
        """End all of them."""
        for job in self.jobs:
            job.kill()


def stretches(starts: Sequence[tuple[int, int]], last: int) -> list[tuple[int, int]]:
    """The ranks that took the steps which count, and up to which: a later start redoes steps."""
    sizes = [next(n for n, step in reversed(starts) if step < at) for at in range(1, last + 1)]
    ends = [at for at in range(1, last + 1) if at == last or sizes[at] != sizes[at - 1]]
    return [(sizes[at - 1], at) for at in ends]


def rows_by_step(notes: Path) -> dict[int, list[int]]:
    """Rows of each step, of all ranks of the attempt that took it last; see ``note_attempts``."""
    steps: dict[int, list[Any]] = {}
    for line in notes.read_text().splitlines():
        step, *rest = json.loads(line)
        steps.setdefault(step, []).append(rest)
    rows = {}
    for step, taken in steps.items():
        attempt = max(taken, key=lambda each: each[2])[0]
        last = [each for each in taken if each[0] == attempt]
        if len(last) == last[0][1]:  # else not all ranks came to its end
            rows[step] = sorted(row for each in last for row in each[3])
    return rows
