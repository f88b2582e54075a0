"""Detection of ranks that hang and of ranks that slow the others down.

A rank that hangs shows on the others only: they wait in a collective until it times out, and that
error does not say for which rank. Here ranks meet in the store through which the process groups
were made. A meeting touches neither the device nor a process group, and it can say who is missing;
when all are there, they compare the parameters that several hold. Between meetings a thread of each
rank, its watchdog, reports where the rank is.
"""

from __future__ import annotations

import logging
import os
import socket
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from forgekit.checkpoints.save import GROUP_NAME
from forgekit.checks import check_integers
from forgekit.metrics.log import waited
from forgekit.run.memory import periodic_collection, report_out_of_memory
from forgekit.run.rendezvous import RankStore
from forgekit.run.watchdog import Watchdog
from forgekit.state import TrainState
from forgekit.steps.audit.agreement import check_replicas

LEAST_SHARE = 0.1
"""Fraction of a step that a rank must cost the others to be reported as slow."""
LEAST_S = 0.5
"""Minimum time between two meetings; over less, differences are noise."""

_log = logging.getLogger("forgekit")


class Health:
    """Watch over a training loop: hangs, slow ranks, garbage and memory.

    In ``with``, call it once per step, on every rank. The first call shortens the time-outs of all
    process groups but those of checkpoints: compiling and first connections may take long, a
    collective of a later step may not. ``with`` puts back what was there before.

    Every ``every`` steps the ranks meet, and compare the parameters of which several hold a copy. A
    rank that does not come makes all others raise an error that names it. When a collective fails
    (it timed out, or another rank is gone), its error becomes the cause of a ``HangError`` that
    says where each rank was. Then, and when no step has ended for three quarters of the time-out (a
    long evaluation may be the reason; nothing is raised), each rank writes the Python stacks of its
    threads into ``out/hang/rank_0.txt``. What its collectives were doing torch writes itself, with
    ``TORCH_NCCL_DUMP_ON_TIMEOUT=1``.

    In other steps there is no collective, no message and no host synchronisation. On one process
    only garbage and memory remain.

    Args:
        out: The run directory.
        mesh: Of the ranks that train together; None for one process.
        every: Steps between two meetings; 0 for none.
        timeout_s: Seconds that a rank may be late, to a meeting or in a collective.
        first_timeout_s: The same until the first step is done.
        collect_every: Steps between two garbage collections, at the same step on all ranks; 0
            leaves it to Python. See ``periodic_collection``.
        loader: Its ``wait_seconds`` say how long this rank waited for data.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        A recipe's loop::

            with fk.Health(run.out, state.mesh, every=100, timeout_s=120, loader=loader) as health:
                for batches in groups:
                    state, metrics = step(state, batches)
                    health(state)
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        mesh: DeviceMesh | None = None,
        *,
        every: int = 100,
        timeout_s: float = 120.0,
        first_timeout_s: float = 1800.0,
        collect_every: int = 50,
        loader: Any = None,
    ) -> None:
        check_integers(every=(every, 0))
        self._out, self._mesh = Path(out), mesh
        self._every, self._loader = every, loader
        self._timeouts = (first_timeout_s, timeout_s)
        self._collect_every = collect_every
        self._stack = ExitStack()
        self._ranks: RankStore | None = None
        self._watchdog: Watchdog | None = None
        self._before: dict[dist.ProcessGroup, timedelta] = {}
        self._is_first = True

    def __enter__(self) -> Self:
        members = [] if self._mesh is None else self._mesh.mesh.flatten().tolist()
        self._ranks = RankStore.of(members)
        rank = 0 if self._ranks is None else self._ranks.rank
        with ExitStack() as stack:  # closed again if something in here fails
            stack.enter_context(report_out_of_memory(self._out, rank=rank))
            self._collect = stack.enter_context(periodic_collection(self._collect_every))
            if self._ranks is not None:
                stack.callback(self._restore)
                self._watchdog = Watchdog(self._out / "hang", self._ranks, self._timeouts[0])
                stack.callback(self._watchdog.stop)
            self._stack = stack.pop_all()
        self._restart()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if self._watchdog is not None:
                self._watchdog.end(error)
        finally:
            self._stack.__exit__(kind, error, trace)

    def __call__(self, state: TrainState) -> dict[str, Any] | None:
        """Record the end of a step; every so often compare with the other ranks.

        Args:
            state: The state that the step returned.

        Returns:
            At a meeting numbers per step since the last one, the same on every rank:
            ``health/own_seconds_max`` and ``health/own_seconds_median`` (of the other ranks): the
            processor time of a rank's main thread plus its wait for data, which leaves out the wait
            for others; ``health/slowest_rank`` (whose own time is longest),
            ``health/data_wait_seconds_max``. Else None.

        Raises:
            HangError: If a rank did not come in time, or came from another step.
            ValueError: If copies of one parameter differ between the ranks that hold it.
        """
        self._collect(state.step)
        if self._ranks is None or self._watchdog is None:
            return None
        self._watchdog.beat(state.step, self._timeouts[1])
        if self._is_first:
            self._is_first = False
            self._shorten()
            self._restart()  # the first step's time does not represent the others
        else:
            self._steps += 1
        if self._every == 0 or state.step % self._every:
            return None
        row = self._meet(self._ranks, state.step)
        check_replicas(state)
        return row

    def _meet(self, ranks: RankStore, step: int) -> dict[str, Any]:
        self._shorten()  # groups made since then
        notes = ranks.gather("step", f"step {step}", self._note(), self._timeouts[1])
        slowest = max(notes, key=lambda rank: notes[rank]["own"])
        slow, others = notes[slowest], [note for rank, note in notes.items() if rank != slowest]
        median = statistics.median(note["own"] for note in others)
        loss = slow["own"] - median
        is_slow = loss > LEAST_SHARE * slow["seconds"] and slow["own"] > 2 * median
        if is_slow and slow["interval"] >= LEAST_S and ranks.is_first:
            _log.warning(
                "step %d: rank %d (%s) is slow: %.3f s of each step are its own work, %.3f s of "
                "them waiting for data; the median of the other ranks is %.3f s",
                *(step, slowest, slow["host"], slow["own"], slow["data"], median),
            )
        self._restart()
        return {
            "health/own_seconds_max": slow["own"],
            "health/own_seconds_median": median,
            "health/slowest_rank": slowest,
            "health/data_wait_seconds_max": max(note["data"] for note in notes.values()),
        }

    def _note(self) -> dict[str, Any]:
        """Return this rank's times since the last meeting, for the others."""
        seconds, steps = time.perf_counter() - self._clock, max(self._steps, 1)
        data_wait = waited(self._loader) - self._waited
        # A rank that waits for others uses no CPU time. One that reads its own data without
        # workers does while it waits for them, so the sum may count that time twice.
        own = min(time.thread_time() - self._worked + data_wait, seconds)
        return {
            "interval": seconds,
            "seconds": seconds / steps,
            "own": own / steps,
            "data": data_wait / steps,
            "host": socket.gethostname(),
        }

    def _shorten(self) -> None:
        now = _timeouts()
        self._before = now | self._before
        _set_timeouts(dict.fromkeys(now, timedelta(seconds=self._timeouts[1])))

    def _restore(self) -> None:
        _set_timeouts(self._before)
        self._before = {}

    def _restart(self) -> None:
        self._steps = 0
        self._waited = waited(self._loader)
        self._clock, self._worked = time.perf_counter(), time.thread_time()


def _timeouts() -> dict[dist.ProcessGroup, timedelta]:
    """Return the time-outs of all process groups but those of checkpoints.

    In those, ranks wait for as long as the slowest one writes.
    """
    groups = [group for group in c10d._world.pg_map if group.group_desc != GROUP_NAME]
    options = {group: getattr(_backend(group), "options", None) for group in groups}
    return {group: each._timeout for group, each in options.items() if each is not None}


def _set_timeouts(timeouts: Mapping[dist.ProcessGroup, timedelta]) -> None:
    # torch has no public way to change an existing group's time-out.
    for group, timeout in timeouts.items():
        if group in c10d._world.pg_map:  # None if it was destroyed
            c10d._set_pg_timeout(timeout, group)


def _backend(group: dist.ProcessGroup) -> Any:
    kinds = group._device_types
    return group._get_backend(next((kind for kind in kinds if kind.type != "cpu"), kinds[0]))
