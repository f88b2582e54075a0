"""What a step returned, as rows of numbers: in ``metrics.jsonl``, on the screen, to the caller.

Metrics stay on the device until a row is due; then one copy brings all of them to the host. Reading
a single loss earlier would make the host wait for the device, and the device then idles while the
host prepares the next step. So on an accelerator the copy is read one step later, when the device
has that step to do. Every rank builds the same rows, so that each can decide on them; one of them
writes.

``metrics.jsonl`` holds one JSON object per step, strict JSON (NaN and infinities are null), each
written at once. What an evaluation adds to a step goes into that step's object.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import attrs
import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor

from forgekit.inputs import check_integers, counted
from forgekit.metrics.bad_step_records import BadStepRecords
from forgekit.metrics.flops import Utilization
from forgekit.metrics.host_copy import HostCopy, Moment
from forgekit.metrics.memory_use import memory_of
from forgekit.metrics.metrics_file import RowFile, read_metrics
from forgekit.metrics.progress import Bar, Lines, short_number
from forgekit.metrics.trackers import GuardedTracker, Tracker
from forgekit.parallel.layout import world_of
from forgekit.state import TrainState
from forgekit.terminal import Steady, printable

__all__ = ["MetricsLog", "Waits", "read_metrics"]

COUNTS = ("train/targets", "train/skipped", "train/skipped_in_a_row", "train/spikes")
SUMMED = frozenset({"loss", "targets", "skipped", "spikes"})
"""Metrics of all steps of a row that its sums are made of."""
TARGETS = "targets"
"""Of all steps of a row; its speed is made of them."""


class Waits(Protocol):
    """A loader that knows how long its user has waited for it, in seconds since it was made."""

    @property
    def wait_seconds(self) -> float:
        """Total so far."""
        ...


class MetricsLog:
    """Log each step; every ``every`` steps turn what was logged into a row.

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
      ``perf/data_wait_seconds``: of the row before, so that one copy brings them with the rest;
    - ``perf/mfu`` and ``perf/mfu_palm``, where the peak of the devices is known;
    - ``memory/peak_gib`` of this process: of an accelerator, else resident; and this rank's
      ``memory/parameters_gib``, ``memory/gradients_gib`` (what the step has left in ``.grad``) and
      ``memory/optimizer_gib``. On an accelerator ``memory/activations_gib`` is the rest of the
      peak: activations, temporaries and buffers of collectives.

    On an accelerator a row is read one step late, that of ``total`` at once, and the times are
    those of the device's queue: a row begins and ends when the device has done its steps, however
    far ahead the host is. The first row begins with the log, by the host's clock.

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
        loader: Waits | None = None,
        start_samples: int | None = None,
        utilization: Utilization | None = None,
        trackers: Sequence[Tracker] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        check_integers(every=(every, 1))
        self._utilization = utilization
        self._times: tuple[float, float] | None = None  # of the row before
        self._every, self._start, self._total = every, start_step, total
        self.step, self.samples = start_step, start_samples
        self._loader = loader
        self._out = Path(out)
        self._file = RowFile(self._out, start_step) if is_writer else None
        bad = self._out / "bad_steps.jsonl" if is_writer else None
        self._bad = BadStepRecords(bad, start_samples, loader)
        self._due: _Due | None = None
        self._row: dict[str, Any] | None = None  # read, and not yet returned
        self._display: Lines | Bar | None = None
        if is_writer and sys.stderr is not None:
            self._display = Lines(Steady(sys.stderr), total)
        own = trackers if is_writer else ()
        self._trackers = [GuardedTracker(tracker, self.message) for tracker in own]
        self._config = {} if config is None else config
        self._start_trackers(start_step)
        self._restart(Moment.now())

    def __enter__(self) -> Self:
        if self._display is not None and sys.stderr.isatty():
            self._display = Bar(Steady(sys.stderr), self._start, self._total)
        return self

    def __exit__(self, error: type[BaseException] | None, *exception: object) -> None:
        if error is None:  # else the device may not answer, and the steps are done again
            self._record_rest()
        else:
            self.status(f"failed: {error.__name__}")
        self.close()

    def status(self, text: str) -> None:
        """Tell trackers how the run ended."""
        for tracker in self._trackers:
            tracker.status(text)

    def close(self) -> None:
        """Close the file and trackers and give the terminal back; all may happen twice."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close()
        if self._display is not None:
            self._display.close()
        if self._file is not None:
            self._file.close()

    def __call__(self, state: TrainState, metrics: TensorDictBase) -> dict[str, Any] | None:
        """Take the metrics of one step; call it on every rank, after every step.

        Args:
            state: The state that the step returned.
            metrics: The metrics that the step returned: 0-d tensors on one device.

        Returns:
            The row if one is due at this step, else None; NaN stays NaN in it. On an accelerator it
            is the row of an earlier step, in which only ``train/skipped_in_a_row`` is of the
            present one, so that whoever acts on it finds the state that it describes. Of two rows
            in a call, which may be at ``total``, the second, with the bad steps of both.

        Raises:
            ValueError: If a metric is not 0-d.
        """
        self.flush()  # the device has this step to do meanwhile
        self.step, self.samples = state.step, state.samples
        self._window.steps.append({name: metrics[name] for name in metrics.keys() & SUMMED})
        self._bad.add(state, metrics)
        device = metrics["loss"].device
        if state.step % self._every == 0 or state.step == self._total:
            self._due = self._begin_row(state, metrics)
            if device.type == "cpu" or state.step == self._total:
                self.flush()
            self._restart(Moment.now(device))
        self._window.called = Moment.now(device)
        if self._display is not None:
            self._display.step(state.step)
        row, self._row = self._row, None
        if row is not None and row["step"] < state.step and row["train/skipped_in_a_row"]:
            row = row | {"train/skipped_in_a_row": int(state.skipped)}
        return row

    def flush(self) -> None:
        """Write the row that is on its way from the device, if there is one; waits for it.

        ``event``, ``outside`` and the end of ``with`` do so. The next call returns the row.
        """
        if self._due is None:
            return
        due, self._due = self._due, None
        row = due.read()
        self._times = row["perf/step_seconds"], row.get("perf/data_wait_seconds", 0.0)
        self._write(row)
        self._bad.end_row(row["train/skipped"])
        if self._display is not None:
            self._display.row(row)
        before = 0 if self._row is None else self._row["train/skipped"]
        self._row = row | {"train/skipped": before + row["train/skipped"]}

    def rewind(self, state: TrainState) -> None:
        """Go back to a state that was loaded: later rows are removed, as when a run is resumed."""
        self._record_rest()
        self._row = None
        self.step, self.samples = state.step, state.samples
        if self._file is not None:
            self._file.close()
            self._file = RowFile(self._out, state.step)
        self._start_trackers(state.step)
        self._bad.restart(state.samples)
        self._restart(Moment.now(state.targets.device))
        if self._display is not None:
            self._display.step(state.step)

    def event(
        self,
        state: TrainState,
        values: Mapping[str, Any] | TensorDictBase | None,
        *,
        show: bool = True,
    ) -> None:
        """Add numbers, for example of an evaluation, to the row of ``state.step``.

        Args:
            state: The state that they belong to.
            values: Full metric names to numbers or 0-d tensors; None or no names add nothing.
            show: Whether a line is printed too.

        Raises:
            ValueError: If a tensor is not 0-d.
        """
        numbers = {} if values is None else _to_host(values)
        if not numbers:
            return
        self.flush()
        self._write({"step": state.step, "samples": state.samples, **numbers})
        text = "  ".join(f"{name} {short_number(number)}" for name, number in numbers.items())
        if show:
            self.message(f"step {state.step}  {text}")
        now = Moment.now(state.targets.device)
        if not self._window.steps:  # nothing but this evaluation has run since the last row
            self._restart(now)
        elif any(name.startswith("eval/") for name in numbers):
            self._window.away.append((self._window.called, now))
        self._window.called = now

    @contextmanager
    def outside(self, device: torch.device) -> Iterator[None]:
        """Leave what happens within, such as a save, out of the times of the present row.

        A row that is on its way is written first, so that a run resumed from the save has it.

        Args:
            device: What the steps ran on.
        """
        self.flush()
        began = Moment.now(device)
        yield
        self._window.away.append((began, Moment.now(device)))

    def message(self, text: str) -> None:
        """Print a line, above the progress bar where there is one; the writing rank only.

        Control characters are escaped. A terminal that has gone away is no error.
        """
        if self._display is not None:
            self._display.message(printable(text))

    def _begin_row(self, state: TrainState, metrics: TensorDictBase) -> _Due:
        """Start the one copy of a row; what the host knows is taken down now."""
        loss, window = metrics["loss"], self._window
        named: dict[str, Any] = {
            name if "/" in name else f"train/{name}": value for name, value in metrics.items()
        }
        named |= window.sums() | self._over_ranks(state, loss)
        named["train/skipped_in_a_row"] = state.skipped.to(loss.device)
        numbers = HostCopy.start(_stacked(named))
        wait = None
        if self._loader is not None:
            wait = (self._loader.wait_seconds - window.waited) / len(window.steps)
        ideal = {}
        if self._utilization is not None and window.first is not None:
            ideal = self._utilization.ideal(window.first, state.samples)
        return _Due(
            step=state.step,
            samples=state.samples,
            names=tuple(named),
            numbers=numbers,
            memory=memory_of(state, loss.device),
            ideal=ideal,
            wait=wait,
            window=window,
        )

    def _over_ranks(self, state: TrainState, like: Tensor) -> dict[str, Tensor]:
        """Least, mean and most of the ranks' times up to the row before, in one reduction.

        They go to the device as arguments of operations, for which the host does not wait.
        """
        ranks = world_of(state.mesh)
        if ranks == 1 or self._times is None:
            return {}
        names = ("step_seconds", "data_wait_seconds")[: 1 if self._loader is None else 2]
        table = torch.zeros(len(names), ranks, dtype=torch.float64, device=like.device)
        for row, seconds in zip(table, self._times, strict=False):
            row[dist.get_rank()].fill_(seconds)
        dist.all_reduce(table)
        columns = {"min": table.amin(1), "mean": table.mean(1), "max": table.amax(1)}
        return {
            f"perf/{name}_{what}": value
            for what, column in columns.items()
            for name, value in zip(names, column.unbind(), strict=True)
        }

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(row)
        step = row["step"]
        # Each once: what an earlier part of the row, or of this step before a resume, has brought.
        shown = self._shown[1] if step == self._shown[0] else frozenset[str]()
        values = {name: row[name] for name in row if name != "step" and name not in shown}
        self._shown = step, shown | row.keys()
        for tracker in self._trackers:
            tracker(step, values)

    def _start_trackers(self, step: int) -> None:
        last = self._file.last if self._file is not None else {}
        self._shown = last.get("step"), frozenset(last)
        for tracker in self._trackers:
            tracker.start(step, self._config)

    def _record_rest(self) -> None:
        """Write down the bad steps since the last row; no row of a resumed run counts them."""
        self.flush()
        if self._file is None or not self._window.steps:
            return
        skipped = int(self._window.sums()["train/skipped"])
        self._bad.end_row(skipped)
        if skipped:
            many = counted(skipped, "bad step")
            self.message(f"{many} since the last row, in {self._out / 'bad_steps.jsonl'}")

    def _restart(self, now: Moment) -> None:
        """Begin the next row."""
        waited = 0.0 if self._loader is None else self._loader.wait_seconds
        self._window = _Window(began=now, called=now, first=self.samples, waited=waited)


@attrs.define(kw_only=True)
class _Window:
    """The steps since the last row.

    Attributes:
        began: When its time begins.
        called: When the log was last called.
        first: Samples before it; None if they are not known.
        waited: Seconds that the loader had made its user wait before it.
        steps: Of each step the metrics that sums are made of, on the device.
        away: From when to when there was no training.
    """

    began: Moment
    called: Moment
    first: int | None
    waited: float
    steps: list[dict[str, Tensor]] = attrs.field(factory=list)
    away: list[tuple[Moment, Moment]] = attrs.field(factory=list)

    def sums(self) -> dict[str, Tensor]:
        """Sums and means over its steps."""
        names = self.steps[0]
        of = {name: torch.stack([step[name] for step in self.steps]).double() for name in names}
        targets = torch.where(of["skipped"] > 0, 0.0, of["targets"])
        losses = torch.where(targets > 0, of["loss"], 0.0)  # those of bad steps may be NaN
        return {
            TARGETS: of["targets"].sum(),
            "train/loss_mean": (losses * (targets / targets.sum())).sum(),
            **{f"train/{name}": of[name].sum() for name in ("skipped", "spikes") if name in of},
        }


@attrs.frozen(kw_only=True)
class _Due:
    """A row whose numbers are on their way from the device.

    Attributes:
        names: Those of ``numbers``.
        ideal: Utilisations, times the seconds since the last row.
        wait: Seconds per step that the loader made its user wait.
        window: Its steps.
    """

    step: int
    samples: int
    names: tuple[str, ...]
    numbers: HostCopy
    memory: dict[str, float]
    ideal: dict[str, float]
    wait: float | None
    window: _Window

    def read(self) -> dict[str, Any]:
        """Wait for the numbers and return the row."""
        numbers = dict(zip(self.names, self.numbers.read().tolist(), strict=True))
        # Only now: the copy has waited for the device, so the clock has seen the steps end.
        seconds = self.window.began.until(self.numbers.arrived)
        seconds -= sum(start.until(end) for start, end in self.window.away)
        targets = numbers.pop(TARGETS)
        numbers |= {name: int(n) for name, n in numbers.items() if _is_count(name, n)}
        return {
            "step": self.step,
            "samples": self.samples,
            **numbers,
            "perf/tokens_per_second": targets / seconds,
            "perf/step_seconds": seconds / len(self.window.steps),
            **self.memory,
            **({} if self.wait is None else {"perf/data_wait_seconds": self.wait}),
            **{name: best / seconds for name, best in self.ideal.items()},
        }


def _is_count(name: str, number: Any) -> bool:
    """Whether a number counts targets; weighted ones need not be whole."""
    return name in COUNTS or (name.endswith("/targets") and float(number).is_integer())


def _to_host(values: Mapping[str, Any] | TensorDictBase) -> dict[str, Any]:
    """Numbers as they are, and all 0-d tensors in one copy."""
    numbers = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
    }
    tensors = {name: value for name, value in numbers.items() if isinstance(value, Tensor)}
    return numbers | dict(zip(tensors, _stacked(tensors).tolist(), strict=True))


def _stacked(tensors: Mapping[str, Tensor]) -> Tensor:
    """All 0-d tensors as one."""
    for name, tensor in tensors.items():
        if tensor.ndim:
            raise ValueError(
                f"metric {name!r} has shape {tuple(tensor.shape)}; a metric is one number. "
                "Reduce it where it arises, for example by .mean()."
            )
    wide = [tensor.detach().double() for tensor in tensors.values()]
    return torch.stack(wide) if wide else torch.empty(0)
