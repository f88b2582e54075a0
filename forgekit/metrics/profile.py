"""Trace some steps of a run, and say where their time went."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import profile

from forgekit.files import write_atomic
from forgekit.inputs import check_integers
from forgekit.mesh import process_rank, rank_name
from forgekit.metrics.log import Waits
from forgekit.parallel.layout import world_of
from forgekit.state import TrainState
from forgekit.steps.ranges import PREFIX

PARTS = (
    ("step", "the sum of the next four"),
    ("data wait", "the loop waited for the loader"),
    ("communication", "collectives, while nothing was computed"),
    ("compute", "kernels of the device; on a CPU operators of torch"),
    ("host", "neither: Python, launches, logging"),
    ("hidden communication", "collectives behind compute; it costs no time of its own"),
)
COMMUNICATION = ("nccl", "gloo:", "c10d::", "_c10d_functional::", "record_param_comms")
NO_WORK = ("autograd::", "profiler::", "torch::")
"""Ranges around operators, which are no work of their own."""


class Profile:
    """Trace the steps ``first`` to ``first + steps - 1`` of a run with ``torch.profiler``.

    In ``with``, call it after each step, on every rank. When the last of the steps is done it
    writes into ``out/profile/steps_00000011_00000013``, for each rank, named by its position in the
    mesh: ``rank0.json.gz``, a trace (chrome://tracing, ui.perfetto.dev) in which the parts of the
    step have names such as ``forgekit.accumulate``; on CUDA with ``memory_history`` also
    ``rank0.pickle``, what the allocator did (https://pytorch.org/memory_viz). The first rank
    writes ``table.txt``: where the steps' time went.

    Out of memory inside these steps, ``forgekit.Health`` writes its own snapshot, and the error
    goes on; with ``memory_history`` what the allocator did is in
    ``out/memory/rank_0_history.pickle``.

    Args:
        out: The run directory.
        first: The first step to trace, the one that takes a state to ``state.step == first``; 0
            traces none. A step that a run starts behind is not traced.
        steps: How many steps.
        loader: Its ``wait_seconds`` say how long this rank waited for data.
        memory_history: Events of the CUDA allocator to remember with their stacks.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        A recipe's loop::

            with fk.run.Profile(run.out, first=11, loader=loader) as profile:
                for batches in groups:
                    state, metrics = step(state, batches)
                    if table := profile(state):
                        log.message(table)
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        first: int = 0,
        steps: int = 3,
        loader: Waits | None = None,
        memory_history: int = 0,
    ) -> None:
        check_integers(first=(first, 0), steps=(steps, 1), memory_history=(memory_history, 0))
        self._out, self._first, self._steps = Path(out), first, steps
        self._loader, self._history = loader, memory_history
        self._profiler: profile | None = None
        self._waited = self._clock = 0.0

    def __enter__(self) -> Self:
        if self._first == 1:  # there is no step before it after which it could begin
            self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End a trace that a stop or an error has cut short; it is not written."""
        is_full = kind is not None and issubclass(kind, torch.OutOfMemoryError)
        if is_full and self._profiler is not None and self._records:
            _dump(self._out / "memory" / f"rank_{process_rank()}_history.pickle")
        self._end()

    def __call__(self, state: TrainState) -> str | None:
        """Begin before the first step that is to be traced, end after the last one.

        Args:
            state: The state that a step returned.

        Returns:
            After the last of the steps the table, on every rank; else None.
        """
        if self._profiler is None:
            if self._first and state.step == self._first - 1:
                self._begin()
            return None
        last = self._first + self._steps - 1
        if state.step < last:
            return None
        _wait_for_device()
        whole = time.perf_counter() - self._clock
        waited = self._wait_seconds() - self._waited
        folder = self._out / "profile" / f"steps_{self._first:08d}_{last:08d}"
        profiler = self._end(folder, rank_name(state.mesh))
        events = profiler.events() or ()
        times = [seconds / self._steps for seconds in _times(events, whole, waited)]
        table = _table(_over_ranks(times, state), f"steps {self._first} to {last}")
        text = "\n".join([table, "", *_ranges(events, self._steps), ""])
        if process_rank() == 0:
            write_atomic(folder / "table.txt", text.encode())
        return text

    def _begin(self) -> None:
        if self._records:
            torch.cuda.memory._record_memory_history(max_entries=self._history)
        self._profiler = profile(profile_memory=torch.accelerator.is_available())  # of all devices
        self._waited = self._wait_seconds()
        self._profiler.start()
        self._clock = time.perf_counter()

    def _end(self, folder: Path | None = None, name: str = "") -> Any:
        """Stop the profiler if it runs; with a folder, write what it has seen."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        profiler.stop()
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
                if self._records:
                    _dump(folder / f"{name}.pickle")
        finally:
            if self._records:
                torch.cuda.memory._record_memory_history(enabled=None)
        return profiler

    @property
    def _records(self) -> bool:
        """Whether the allocator's history is kept; it is forgotten where it is switched off."""
        return bool(self._history) and torch.cuda.is_available()

    def _wait_seconds(self) -> float:
        return 0.0 if self._loader is None else self._loader.wait_seconds


def _dump(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


def _wait_for_device() -> None:
    """Kernels that still run belong to the last step."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@attrs.frozen
class _Spans:
    """When something of one kind was going on, as rows of begin and end in microseconds."""

    rows: np.ndarray

    @classmethod
    def of(cls, events: Iterable[Any]) -> _Spans:
        """Merge the times of events: what overlaps counts once."""
        rows = sorted((e.time_range.start, e.time_range.end) for e in events)
        merged: list[list[float]] = []
        for begin, end in rows:
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        return cls(np.array(merged, dtype=np.float64).reshape(-1, 2))

    @property
    def seconds(self) -> float:
        """Their length."""
        return float((self.rows[:, 1] - self.rows[:, 0]).sum()) * 1e-6

    def with_also(self, other: _Spans) -> _Spans:
        """When either was going on."""
        rows = np.concatenate([self.rows, other.rows])
        rows = rows[rows[:, 0].argsort(kind="stable")]
        if not len(rows):
            return _Spans(rows)
        ends = np.maximum.accumulate(rows[:, 1])
        is_first = np.r_[True, rows[1:, 0] > ends[:-1]]
        return _Spans(np.stack([rows[is_first, 0], ends[np.r_[is_first[1:], True]]], axis=1))


def _times(events: Sequence[Any], whole: float, waited: float) -> list[float]:
    """Seconds of each of ``PARTS``, on this rank."""
    on_device = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
    work = on_device or [e for e in events if "::" in e.name and not e.name.startswith(NO_WORK)]
    work = [e for e in work if not e.is_user_annotation]
    sends = [e for e in work if e.name.lower().startswith(COMMUNICATION)]
    if not on_device:
        sends += [e for e in events if e.name.startswith("gloo:")]
    compute = _Spans.of(e for e in work if not e.name.lower().startswith(COMMUNICATION))
    communication = _Spans.of(sends)
    both = compute.with_also(communication).seconds
    exposed = both - compute.seconds
    host = max(whole - both - waited, 0.0)
    hidden = communication.seconds - exposed
    return [whole, waited, exposed, compute.seconds, host, hidden]


def _over_ranks(times: list[float], state: TrainState) -> np.ndarray:
    """Least, mean and most over the ranks, ``[parts, 3]``; every rank calls it."""
    world = world_of(state.mesh)
    own = torch.zeros(world, len(times), dtype=torch.float64, device=state.targets.device)
    own[process_rank() if world > 1 else 0] = torch.tensor(times, dtype=torch.float64)
    if world > 1:
        dist.all_reduce(own)
    rows = own.cpu().numpy()
    return np.stack([rows.min(0), rows.mean(0), rows.max(0)], axis=1)


def _table(times: np.ndarray, title: str) -> str:
    lines = [f"{title}: milliseconds per step      least      mean      most   share"]
    whole = times[0, 1]
    for (name, note), (least, mean, most) in zip(PARTS, times.tolist(), strict=True):
        numbers = "".join(f"{1e3 * number:10.2f}" for number in (least, mean, most))
        lines.append(f"{name:<35}{numbers} {mean / whole:7.1%}   {note}")
    return "\n".join(lines)


def _ranges(events: Sequence[Any], steps: int) -> list[str]:
    """Time inside of each named part, on this rank; parts are inside of each other."""
    seconds: dict[str, float] = {}
    for event in events:
        if event.name.startswith(PREFIX) and event.device_type == torch.autograd.DeviceType.CPU:
            length = (event.time_range.end - event.time_range.start) * 1e-3
            seconds[event.name] = seconds.get(event.name, 0.0) + length
    return [f"{name:<45}{total / steps:10.2f} ms per step" for name, total in seconds.items()]
