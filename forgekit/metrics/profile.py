"""Trace some steps of a run, and say where their time went."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import profile

from forgekit.checks import check_integers
from forgekit.files import write_atomic
from forgekit.mesh import process_rank, rank_name
from forgekit.metrics.log import Waits, over_ranks, waited
from forgekit.state import TrainState

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
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # kernels that still run belong to the last step
        whole = time.perf_counter() - self._clock
        data_wait = waited(self._loader) - self._waited
        folder = self._out / "profile" / f"steps_{self._first:08d}_{last:08d}"
        profiler = self._end(folder, rank_name(state.mesh))
        events = profiler.events() or ()
        times = [seconds / self._steps for seconds in _times(events, whole, data_wait)]
        text = _table(over_ranks(times, state), f"steps {self._first} to {last}")
        if process_rank() == 0:
            write_atomic(folder / "table.txt", text.encode())
        return text

    def _begin(self) -> None:
        if self._records:
            torch.cuda.memory._record_memory_history(max_entries=self._history)
        self._profiler = profile(profile_memory=torch.accelerator.is_available())  # of all devices
        self._waited = waited(self._loader)
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


def _dump(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


def _seconds(events: Iterable[Any]) -> float:
    """Time in which any of some events was going on: what overlaps counts once."""
    total, last = 0.0, -math.inf
    for begin, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(end - max(begin, last), 0.0)
        last = max(end, last)
    return total * 1e-6


def _times(events: Sequence[Any], whole: float, data_wait: float) -> list[float]:
    """Seconds of each of ``PARTS``, on this rank."""
    on_device = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
    work = on_device or [e for e in events if "::" in e.name and not e.name.startswith(NO_WORK)]
    work = [e for e in work if not e.is_user_annotation]
    sends = [e for e in work if e.name.lower().startswith(COMMUNICATION)]
    if not on_device:
        sends += [e for e in events if e.name.startswith("gloo:")]
    kernels = [e for e in work if not e.name.lower().startswith(COMMUNICATION)]
    compute, both = _seconds(kernels), _seconds([*kernels, *sends])
    exposed, host = both - compute, max(whole - both - data_wait, 0.0)
    return [whole, data_wait, exposed, compute, host, _seconds(sends) - exposed]


def _table(times: Sequence[Sequence[float]], title: str) -> str:
    lines = [f"{title}: milliseconds per step      least      mean      most   share"]
    for (name, note), least, mean, most in zip(PARTS, *times, strict=True):
        numbers = "".join(f"{1e3 * number:10.2f}" for number in (least, mean, most))
        lines.append(f"{name:<35}{numbers} {mean / times[1][0]:7.1%}   {note}")
    return "\n".join([*lines, ""])
