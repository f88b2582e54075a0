"""What a step returned, as rows of numbers: in ``metrics.jsonl``, on the screen, to the caller.

Metrics stay on the device until a row is due; then one copy brings all of them to the host. Reading
a single loss earlier would make the host wait for the device, and the device then idles while the
host prepares the next step. Every rank builds the same rows, so that each can decide on them; one
of them writes.

``metrics.jsonl`` holds one JSON object per step, strict JSON (NaN and infinities are null), each
written at once. What an evaluation adds to a step goes into that step's object.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor

from forgekit.inputs import check_integers, parse_json
from forgekit.optim.shards import local
from forgekit.parallel.layout import world_of
from forgekit.run.bad_step_records import BadStepRecords
from forgekit.run.durable_files import overwrite, write_atomic
from forgekit.run.flops import Utilization
from forgekit.run.strict_json import finite
from forgekit.run.trackers import GuardedTracker, Tracker
from forgekit.state import TrainState
from forgekit.terminal import Steady, printable

COUNTS = ("train/targets", "train/skipped", "train/skipped_in_a_row", "train/spikes")
SUMMED = frozenset({"targets", "skipped", "spikes"})
"""Metrics that are added up over the steps of a row."""
GIB = 2.0**30


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
    - ``train/skipped``: bad steps since the last row, and ``train/skipped_in_a_row``: those one
      after another up to this one;
    - ``train/spikes``: of the bad steps those that were spikes, where ``make_step`` limits them;
    - the loss function's own metrics: ``train/<name>``, or ``<name>`` if it has a slash in it;
    - ``perf/tokens_per_second`` (targets), ``perf/step_seconds``, ``perf/data_wait_seconds``: means
      by the clock since the last row, without evaluations and what ``outside`` held;
    - of several ranks ``perf/step_seconds_min``, ``_mean`` and ``_max`` over them, and those of
      ``perf/data_wait_seconds``: of the row before, so that one copy brings them with the rest;
    - ``perf/mfu`` and ``perf/mfu_palm``, where the peak of the devices is known;
    - ``memory/peak_gib`` of this process: of the device on CUDA, else resident; and this rank's
      ``memory/parameters_gib`` and ``memory/optimizer_gib``.

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
        trackers: Take the rows as well, see ``forgekit.run.trackers``; of the writing rank only.
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
        self._file = _RowFile(self._out, start_step) if is_writer else None
        bad = self._out / "bad_steps.jsonl" if is_writer else None
        self._bad = BadStepRecords(bad, start_samples, loader)
        self._display: _Lines | _Bar | None = None
        if is_writer and sys.stderr is not None:
            self._display = _Lines(Steady(sys.stderr), total)
        own = trackers if is_writer else ()
        self._trackers = [GuardedTracker(tracker, self.message) for tracker in own]
        self._config = {} if config is None else config
        self._start_trackers(start_step)
        self._restart()

    def __enter__(self) -> Self:
        if self._display is not None and sys.stderr.isatty():
            self._display = _Bar(Steady(sys.stderr), self._start, self._total)
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
            The row if one is due at this step, else None; NaN stays NaN in it.

        Raises:
            ValueError: If a metric is not 0-d.
        """
        self.step, self.samples = state.step, state.samples
        self._steps += 1
        for name in metrics.keys() & SUMMED:
            self._sums[name] = self._sums[name] + metrics[name]
        self._bad.add(state, metrics)
        row = None
        if state.step % self._every == 0 or state.step == self._total:
            row = self._row(state, metrics)
            self._write(row)
            self._bad.end_row(row["train/skipped"])
            self._restart()
        if self._display is not None:
            self._display.step(state.step, row)
        self._called = time.perf_counter()
        return row

    def rewind(self, state: TrainState) -> None:
        """Go back to a state that was loaded: later rows are removed, as when a run is resumed."""
        self.step, self.samples = state.step, state.samples
        if self._file is not None:
            self._file.close()
            self._file = _RowFile(self._out, state.step)
        self._start_trackers(state.step)
        self._bad.restart(state.samples)
        self._restart()
        if self._display is not None:
            self._display.step(state.step, None)

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
        self._write({"step": state.step, "samples": state.samples, **numbers})
        text = "  ".join(f"{name} {_short(number)}" for name, number in numbers.items())
        if show:
            self.message(f"step {state.step}  {text}")
        if self._steps == 0:  # nothing but this evaluation has run since the last row
            self._restart()
        elif any(name.startswith("eval/") for name in numbers):
            self._clock += time.perf_counter() - self._called
        self._called = time.perf_counter()

    @contextmanager
    def outside(self, device: torch.device) -> Iterator[None]:
        """Leave what happens within, such as a save, out of the times of the present row.

        Args:
            device: What the steps ran on; they end first, so that their time counts.
        """
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        started = time.perf_counter()
        yield
        self._clock += time.perf_counter() - started

    def message(self, text: str) -> None:
        """Print a line, above the progress bar where there is one; the writing rank only.

        Control characters are escaped. A terminal that has gone away is no error.
        """
        if self._display is not None:
            self._display.message(printable(text))

    def _row(self, state: TrainState, metrics: TensorDictBase) -> dict[str, Any]:
        named = {name if "/" in name else f"train/{name}": value for name, value in metrics.items()}
        sums = {f"train/{name}": self._sums[name] for name in metrics.keys() & SUMMED}
        sums["targets"] = sums.pop("train/targets")
        sums["train/skipped_in_a_row"] = state.skipped.to(metrics["skipped"].device)
        numbers = _to_host(named | sums | self._over_ranks(state, metrics["loss"]))
        # Only now: the copy has waited for the device, so the clock has seen the steps end.
        seconds = time.perf_counter() - self._clock
        targets = numbers.pop("targets")
        numbers |= {name: int(n) for name, n in numbers.items() if _is_count(name, n)}
        row = {
            "step": state.step,
            "samples": state.samples,
            **numbers,
            "perf/tokens_per_second": targets / seconds,
            "perf/step_seconds": seconds / self._steps,
            "memory/peak_gib": _peak_gib(metrics["loss"].device),
            **_memory_of(state),
        }
        waited = 0.0
        if self._loader is not None:
            waited = (self._loader.wait_seconds - self._waited) / self._steps
            row["perf/data_wait_seconds"] = waited
        if self._utilization is not None and self._first is not None:
            row |= self._utilization.metrics(state.samples - self._first, seconds)
        self._times = seconds / self._steps, waited
        return row

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
        # What a process before this one has shown of the step that the run goes on from.
        shown = self._shown[1] if step == self._shown[0] else ()
        values = {name: row[name] for name in row if name != "step" and name not in shown}
        for tracker in self._trackers:
            tracker(step, values)

    def _start_trackers(self, step: int) -> None:
        last = self._file.last if self._file is not None else {}
        self._shown = last.get("step"), frozenset(last)
        for tracker in self._trackers:
            tracker.start(step, self._config)

    def _record_rest(self) -> None:
        """Write down the bad steps since the last row; no row of a resumed run counts them."""
        if self._file is None or self._steps == 0:
            return
        skipped = int(self._sums["skipped"])
        self._bad.end_row(skipped)
        if skipped:
            many = f"{skipped} bad step{'s' if skipped > 1 else ''}"
            self.message(f"{many} since the last row, in {self._out / 'bad_steps.jsonl'}")
        self._restart()

    def _restart(self) -> None:
        """Begin the sums of the next row."""
        self._steps = 0
        self._sums: dict[str, Any] = dict.fromkeys(SUMMED, 0.0)
        self._first = self.samples
        self._waited = 0.0 if self._loader is None else self._loader.wait_seconds
        self._clock = self._called = time.perf_counter()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl`` as a list of rows; a last line that was cut by a crash is left out.

    Raises:
        ValueError: If another line is not a JSON object with a step.
    """
    lines = Path(path).read_bytes().splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            row["step"]
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number}: {line[:60].decode(errors='replace')!r} is not a JSON "
                'object with a "step". Repair or delete that line.'
            ) from None
        rows.append(row)
    return rows


class _RowFile:
    """The open ``metrics.jsonl``; a second row for the last step is merged into the first."""

    def __init__(self, out: Path, start_step: int) -> None:
        path = out / "metrics.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        rows = read_metrics(path) if path.exists() else []
        lines = [_line(row) for row in rows if row["step"] <= start_step]
        write_atomic(path, b"".join(lines))
        self._path, self._line = path, lines[-1] if lines else b""
        self._last: dict[str, Any] = json.loads(self._line) if lines else {}
        # Unbuffered, so that one write is one system call.
        self._file = path.open("r+b", buffering=0)
        self._start = self._file.seek(0, os.SEEK_END) - len(self._line)

    @property
    def last(self) -> Mapping[str, Any]:
        """The last row."""
        return self._last

    def write(self, row: dict[str, Any]) -> None:
        """Write a row at the end, or its new keys into the last one; all of it or nothing."""
        is_same = row["step"] == self._last.get("step")
        if is_same:
            row = self._last | row
        else:
            self._start = self._file.seek(0, os.SEEK_END)
        line = _line(row)
        try:
            overwrite(self._file, self._start, line, self._line if is_same else b"")
        except OSError as error:
            what = f"{error.strerror}: no room for the row of step {row['step']}"
            rest = "the rows before it are whole. Make room; the same command resumes the run"
            raise OSError(error.errno, f"{what}; {rest}", str(self._path)) from error
        self._last, self._line = row, line

    def close(self) -> None:
        self._file.close()


class _Lines:
    """Progress where there is no terminal: a line per row."""

    def __init__(self, stream: Steady, total: int | None) -> None:
        self._stream, self._total = stream, total

    def step(self, step: int, row: dict[str, Any] | None) -> None:
        if row is not None:
            of = "" if self._total is None else f"/{self._total}"
            self.message(f"step {step}{of}  {_summary(row)}")

    def message(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class _Bar:
    """Progress on a terminal."""

    def __init__(self, stream: Steady, start: int, total: int | None) -> None:
        # A tenth of what importing forgekit costs, for a terminal alone.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step {task.completed:.0f}" + ("" if total is None else f"/{total}")),
            BarColumn(),
            TextColumn("{task.fields[summary]}"),
            TimeRemainingColumn(compact=True),
            console=Console(file=cast("IO[str]", stream)),
            # Rich would send what the recipe prints to stderr, away from a file or pipe.
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("", total=total, completed=start, summary="")
        self._progress.start()

    def step(self, step: int, row: dict[str, Any] | None) -> None:
        if row is not None:
            self._progress.update(self._task, summary=_summary(row))
        self._progress.update(self._task, completed=step)

    def message(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def _summary(row: dict[str, Any]) -> str:
    bad = f"  {row['train/skipped']} bad steps" if row["train/skipped"] else ""
    mfu = f"  mfu {row['perf/mfu']:.1%}" if "perf/mfu" in row else ""
    return (
        f"loss {row['train/loss']:.4f}  lr {row['train/lr']:.1e}  "
        f"{row['perf/tokens_per_second']:,.0f} tokens/s{mfu}{bad}"
    )


def _short(number: Any) -> str:
    if isinstance(number, float) and not (number.is_integer() and abs(number) >= 1000):
        return f"{number:.4f}"
    return f"{number:,.0f}" if isinstance(number, float) else str(number)


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
    for name, tensor in tensors.items():
        if tensor.ndim:
            raise ValueError(
                f"metric {name!r} has shape {tuple(tensor.shape)}; a metric is one number. "
                "Reduce it where it arises, for example by .mean()."
            )
    if tensors:
        stacked = torch.stack([tensor.detach().double() for tensor in tensors.values()])
        numbers |= zip(tensors, stacked.tolist(), strict=True)
    return numbers


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(finite(row), allow_nan=False)}\n".encode()


def _memory_of(state: TrainState) -> dict[str, float]:
    """What this rank's parameters and the optimizer's state take."""
    moments = [
        value
        for values in state.optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    named = {"parameters": state.model.parameters(), "optimizer": moments}
    return {
        f"memory/{name}_gib": sum(local(tensor).nbytes for tensor in tensors) / GIB
        for name, tensors in named.items()
    }


def _peak_gib(device: torch.device) -> float:
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts in KiB
