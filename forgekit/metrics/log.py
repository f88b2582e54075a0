"""Logging of step metrics as rows: to ``metrics.jsonl``, the screen, and the caller.

Metrics stay on the device until the end of a row; then one copy brings those of all its steps to
the host, which waits for the device once per row. Reading a single loss in each step would let the
device idle while the host prepares the next one. Every rank builds the same rows, so that each can
decide on them; one of them writes.

``metrics.jsonl`` holds one JSON object per step, strict JSON (NaN and infinities are null), each
written at once. What an evaluation adds to a step goes into that step's object.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import attrs
import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor

from forgekit.checks import check_integers, counted
from forgekit.mesh import process_rank
from forgekit.metrics.flops import Utilization
from forgekit.metrics.progress import Bar, Lines, short_number
from forgekit.metrics.records import BAD_STEPS, RowFile, Step, append_bad_steps
from forgekit.metrics.trackers import GuardedTracker, Tracker
from forgekit.state import TrainState
from forgekit.terminal import Steady, printable

COUNTS = ("train/targets", "train/skipped", "train/skipped_in_a_row", "train/spikes")
OF_EACH_STEP = ("loss", "grad_norm", "targets", "skipped", "spikes")
"""Metrics kept for all steps of a row, for its sums and the records of bad steps."""
GIB = 2.0**30


def waited(loader: Any) -> float:
    """Return the seconds that a loader's consumer has waited for it; 0 without a loader."""
    return 0.0 if loader is None else loader.wait_seconds


class MetricsLog:
    """Log each step; write a row every ``every`` steps.

    The file is opened at once and cut back to ``start_step``, so that a resumed run repeats no
    step. ``with`` shows a progress bar where stderr is a terminal (elsewhere there is a plain line
    per row), and closes file and bar, whatever happens inside. Bad steps after the last row are in
    ``bad_steps.jsonl`` then, too.

    A row has ``step``, ``samples`` and

    - ``train/loss``, ``train/grad_norm``, ``train/lr``, ``train/targets`` of the step itself;
    - ``train/loss_mean``: the mean loss of all targets of good steps since the last row;
    - ``train/skipped``: bad steps since the last row, and ``train/skipped_in_a_row``: those one
      after another up to this one;
    - ``train/spikes``: of the bad steps those that were spikes, where ``make_step`` limits them;
    - the loss function's own metrics: ``train/<name>``, or ``<name>`` if it has a slash in it;
    - ``perf/tokens_per_second`` (targets), ``perf/step_seconds``, ``perf/data_wait_seconds``: means
      by the clock since the last row, without evaluations and what ``outside`` held;
    - of several ranks ``perf/step_seconds_min``, ``_mean`` and ``_max`` over them, and those of
      ``perf/data_wait_seconds``;
    - ``perf/mfu`` and ``perf/mfu_palm``, where the peak of the devices is known;
    - ``memory/peak_gib`` of this process: of an accelerator, else resident.

    Times are the host's, read when the copy of a row has waited for the device. An evaluation
    between two rows counts from the last call, when steps may still be queued: evaluate at the
    step of a row.

    Attributes:
        step: The last step that was logged.
        samples: Rows consumed up to it; None before the first step if ``start_samples`` is.

    Args:
        out: The run directory; made if it does not exist.
        start_step: The step that the run starts from, ``state.step`` after loading a checkpoint.
        every: Steps per row.
        total: The last step, which always gets a row; None if it is not known.
        is_writer: False on all ranks but the first: they get the same rows and write nothing.
        loader: Measures ``perf/data_wait_seconds``, and knows the rows of bad steps.
        start_samples: Rows consumed before ``start_step``, ``state.samples``.
        utilization: What ``perf/mfu`` is computed from; None leaves it out.
        trackers: Take the rows as well, see ``forgekit.metrics.trackers``; the writing rank's.
        config: The run's configuration, for trackers.

    Raises:
        ValueError: If ``every`` is less than 1, or the file there has a broken line.

    Examples:
        A recipe's loop::

            with MetricsLog(out, start_step=state.step, total=1000, loader=loader) as log:
                for batches in groups(loader, micro_batches):
                    state, metrics = step(state, batches)
                    check(log(state, metrics))
                    if state.step % 100 == 0:
                        log.event(state, {"eval/held_out/loss": evaluate(state)})
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        start_step: int = 0,
        every: int = 10,
        total: int | None = None,
        is_writer: bool = True,
        loader: Any = None,
        start_samples: int | None = None,
        utilization: Utilization | None = None,
        trackers: Sequence[Tracker] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_integers(every=(every, 1))
        self._every, self._start, self._total = every, start_step, total
        self.step, self.samples = start_step, start_samples
        self._loader, self._utilization = loader, utilization
        self._out = Path(out)
        self._file = RowFile(self._out, start_step) if is_writer else None
        self._stream = Steady(sys.stderr) if is_writer and sys.stderr is not None else None
        self._display: Lines | Bar = Lines(self._stream, total)
        self._trackers = [GuardedTracker(each, self.message) for each in trackers if is_writer]
        self._config = config or {}
        self._restart(start_step)

    def __enter__(self) -> Self:
        if self._stream is not None and sys.stderr.isatty():
            self._display = Bar(self._stream, self._start, self._total)
        return self

    def __exit__(self, error: type[BaseException] | None, *exception: object) -> None:
        if error is None:  # else the device may not respond, and the steps are redone
            self._record_rest()
        else:
            self.status(f"failed: {error.__name__}")
        self.close()

    def status(self, text: str) -> None:
        """Pass the run's outcome to trackers."""
        for tracker in self._trackers:
            tracker.status(text)

    def close(self) -> None:
        """Close file and trackers and restore the terminal; may be called twice."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close()
        self._display.close()
        if self._file is not None:
            self._file.close()

    def __call__(self, state: TrainState, metrics: TensorDictBase) -> dict[str, Any] | None:
        """Record the metrics of a step; call it on every rank, after every step.

        Args:
            state: The state that the step returned.
            metrics: The metrics that the step returned: 0-d tensors on one device.

        Returns:
            The row if this step ends one, else None; NaN stays NaN in it.

        Raises:
            ValueError: If a metric is not 0-d.
        """
        self._window.add(state, self.samples, metrics)
        self.step, self.samples = state.step, state.samples
        row = None
        if state.step % self._every == 0 or state.step == self._total:
            row = self._read_row(state, metrics)
            self._write(row)
            self._window = self._new_window()
        self._window.called = time.perf_counter()
        self._display.step(state.step)
        if row is not None:
            self._display.row(row)
        return row

    def rewind(self, state: TrainState) -> None:
        """Go back to a loaded state: later rows are removed, as when a run is resumed."""
        self._record_rest()
        self.step, self.samples = state.step, state.samples
        if self._file is not None:
            self._file.close()
            self._file = RowFile(self._out, state.step)
        self._restart(state.step)
        self._display.step(state.step)

    def event(
        self,
        state: TrainState,
        values: Mapping[str, Any] | TensorDictBase | None,
        *,
        show: bool = True,
    ) -> None:
        """Add numbers, such as an evaluation's, to the row of ``state.step``.

        Args:
            state: The state that they belong to.
            values: Full metric names to numbers or 0-d tensors; None or no names add nothing.
            show: Whether a line is printed too.

        Raises:
            ValueError: If a tensor is not 0-d.
        """
        if not (numbers := {} if values is None else _to_host(values)):
            return
        self._write({"step": state.step, "samples": state.samples, **numbers})
        text = "  ".join(f"{name} {short_number(number)}" for name, number in numbers.items())
        if show:
            self.message(f"step {state.step}  {text}")
        window, now = self._window, time.perf_counter()
        # Before a row's first step all elapsed time is this event's.
        if not window.steps or any(name.startswith("eval/") for name in numbers):
            window.excluded += now - window.called
        window.called = now

    @contextmanager
    def outside(self, device: torch.device) -> Iterator[None]:
        """Exclude the block, such as a save, from the times of the current row.

        Args:
            device: What the steps ran on; those that are queued are waited for.
        """
        if device.type != "cpu":
            torch.accelerator.synchronize()
        began = time.perf_counter()
        yield
        self._window.called = time.perf_counter()  # an evaluation that follows counts from here
        self._window.excluded += self._window.called - began

    def message(self, text: str) -> None:
        """Print a line above the progress bar, on the writing rank.

        Control characters are escaped. A terminal that has gone away is not an error.
        """
        self._display.message(printable(text))

    def _read_row(self, state: TrainState, metrics: TensorDictBase) -> dict[str, Any]:
        """Copy the window's numbers to the host and build the row."""
        device, window = metrics["loss"].device, self._window
        named: dict[str, Any] = {n if "/" in n else f"train/{n}": v for n, v in metrics.items()}
        named["train/skipped_in_a_row"] = state.skipped.to(device)
        # The only copy, and the only wait of the host for the device.
        host = torch.cat([_stacked(named), window.stacked().flatten()]).cpu()
        seconds = time.perf_counter() - window.began - window.excluded
        numbers = dict(zip(named, host[: len(named)].tolist(), strict=True))
        of_steps = window.by_name(host[len(named) :])
        self._record_bad_steps(of_steps)
        numbers |= _sums(of_steps)
        count = len(window.steps)
        times = {"perf/step_seconds": seconds / count}
        if self._loader is not None:
            times["perf/data_wait_seconds"] = (waited(self._loader) - window.waited) / count
        ideal = {}
        if self._utilization is not None and window.first is not None:
            ideal = self._utilization.ideal(window.first, state.samples)
        return {
            "step": state.step,
            "samples": state.samples,
            **{name: int(n) if _is_count(name, n) else n for name, n in numbers.items()},
            "perf/tokens_per_second": float(of_steps["targets"].sum()) / seconds,
            **times,
            **_over_ranks(times, state),
            "memory/peak_gib": peak_memory(device) / GIB,
            **{name: best / seconds for name, best in ideal.items()},
        }

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        new = self._file.write(row)
        for tracker in self._trackers:
            tracker(row["step"], new)

    def _record_rest(self) -> None:
        """Record the bad steps since the last row, which no row of a resumed run counts."""
        window = self._window
        if self._file is None or not window.steps:
            return
        if bad := self._record_bad_steps(window.by_name(window.stacked().cpu())):
            self.message(
                f"{counted(bad, 'bad step')} since the last row, in {self._out / BAD_STEPS}"
            )

    def _record_bad_steps(self, of_steps: Mapping[str, Tensor]) -> int:
        """Record and count the bad steps of a window."""
        bad = int(of_steps["skipped"].sum())
        if bad and self._file is not None:
            append_bad_steps(self._out, self._window.steps, of_steps, self._loader)
        return bad

    def _restart(self, step: int) -> None:
        """Begin after a step, at the start or after a rollback."""
        for tracker in self._trackers:
            tracker.start(step, self._config)
        self._window = self._new_window()

    def _new_window(self) -> _Window:
        now = time.perf_counter()
        return _Window(began=now, called=now, first=self.samples, waited=waited(self._loader))


@attrs.define(kw_only=True)
class _Window:
    """The steps since the last row; times are in seconds of ``time.perf_counter``.

    Attributes:
        began: When its time begins.
        called: When the log was last called.
        first: Samples before it; None if they are not known.
        waited: Seconds that the loader had made its user wait before it.
        excluded: Seconds in which there was no training.
        steps: Of each step its number, the samples before and after it, and what is left out.
        metrics: Those of each step, on the device, by name.
    """

    began: float
    called: float
    first: int | None
    waited: float
    excluded: float = 0.0
    steps: list[Step] = attrs.field(factory=list)
    metrics: dict[str, list[Tensor]] = attrs.field(factory=dict)

    def add(self, state: TrainState, first: int | None, metrics: TensorDictBase) -> None:
        self.steps.append((state.step, first, state.samples, state.skips))
        for name in OF_EACH_STEP:
            if (value := metrics.get(name, None)) is not None:
                self.metrics.setdefault(name, []).append(value)

    def stacked(self) -> Tensor:
        """``[names steps]`` float64 on the device."""
        return torch.stack([torch.stack(values).double() for values in self.metrics.values()])

    def by_name(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return ``[steps]`` on the host, by metric."""
        return dict(zip(self.metrics, numbers.view(-1, len(self.steps)), strict=True))


def _sums(by_name: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums and means over the steps of a row."""
    # A bad step's loss may be NaN and its targets are not trained: neither counts.
    targets = torch.where(by_name["skipped"] > 0, 0.0, by_name["targets"])
    losses = torch.where(targets > 0, by_name["loss"], 0.0)
    return {
        "train/loss_mean": float((losses * (targets / targets.sum())).sum()),
        **{f"train/{n}": float(by_name[n].sum()) for n in ("skipped", "spikes") if n in by_name},
    }


def _over_ranks(numbers: Mapping[str, float], state: TrainState) -> dict[str, float]:
    """Reduce numbers to min, mean and max over several ranks; every rank calls it."""
    if state.mesh is None or state.mesh.size() == 1:
        return {}
    shape, device = (state.mesh.size(), len(numbers)), state.targets.device
    table = torch.zeros(shape, dtype=torch.float64, device=device)
    table[process_rank()] = torch.tensor([*numbers.values()], dtype=torch.float64)
    dist.all_reduce(table)
    kinds = {"min": table.amin(0), "mean": table.mean(0), "max": table.amax(0)}
    names = [f"{name}_{kind}" for kind in kinds for name in numbers]
    return dict(zip(names, torch.cat([*kinds.values()]).tolist(), strict=True))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes of tensors on an accelerator so far; on a CPU those of the process."""
    if device.type == "cpu":  # Linux counts in KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated(device)


def _is_count(name: str, number: Any) -> bool:
    """Whether a number is a whole count; weighted targets may be fractional."""
    return name in COUNTS or (name.endswith("/targets") and float(number).is_integer())


def _to_host(values: Mapping[str, Any] | TensorDictBase) -> dict[str, Any]:
    """Convert to numbers, with all 0-d tensors in one copy."""
    numbers = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
    }
    tensors = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    return numbers | dict(zip(tensors, _stacked(tensors).tolist(), strict=True))


def _stacked(tensors: Mapping[str, Tensor]) -> Tensor:
    """Stack 0-d tensors."""
    for name, tensor in tensors.items():
        if tensor.ndim:
            raise ValueError(
                f"metric {name!r} has shape {tuple(tensor.shape)}; a metric must be one number. "
                "Reduce it where it is computed, for example by .mean()."
            )
    wide = [tensor.detach().double() for tensor in tensors.values()]
    return torch.stack(wide) if wide else torch.empty(0)
