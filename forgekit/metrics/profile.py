"""Trace some steps of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

import torch
from torch.profiler import profile

from forgekit.checks import check_integers
from forgekit.mesh import rank_name
from forgekit.state import TrainState


class Profile:
    """Trace the steps ``first`` to ``first + steps - 1`` of a run with ``torch.profiler``.

    In ``with``, call it after each step, on every rank. When the last of the steps is done each
    rank writes ``out/profile/steps_00000011_00000013/rank0.json.gz``, named by its position in the
    mesh: a trace (chrome://tracing, ui.perfetto.dev) in which the parts of the step have names such
    as ``forgekit.accumulate``. One that a stop or an error cuts short is not written.

    Args:
        out: The run directory.
        first: The first step to trace, the one that takes a state to ``state.step == first``; 0
            traces none. A step that a run starts behind is not traced.
        steps: How many steps.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        A recipe's loop::

            with fk.metrics.Profile(run.out, first=11) as profile:
                for batches in groups:
                    state, metrics = step(state, batches)
                    profile(state)
    """

    def __init__(self, out: str | os.PathLike[str], *, first: int = 0, steps: int = 3) -> None:
        check_integers(first=(first, 0), steps=(steps, 1))
        self._first, self._last = first, first + steps - 1
        self._folder = Path(out) / "profile" / f"steps_{first:08d}_{self._last:08d}"
        self._profiler: profile | None = None

    def __enter__(self) -> Self:
        self._begin(after=0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is not None:
            self._profiler.stop()

    def __call__(self, state: TrainState) -> None:
        """Begin before the first step that is to be traced, write after the last one."""
        if self._profiler is None:
            self._begin(after=state.step)
        elif state.step >= self._last:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # running kernels belong to the last step
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"{rank_name(state.mesh)}.json.gz"))

    def _begin(self, *, after: int) -> None:
        if self._first and after == self._first - 1:
            self._profiler = profile(profile_memory=torch.accelerator.is_available())
            self._profiler.start()
