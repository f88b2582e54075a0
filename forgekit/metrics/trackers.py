"""Trackers of metrics beside ``metrics.jsonl``: TensorBoard, Weights & Biases, or your own.

A tracker is a callable ``(step, values) -> None`` with ``close()``. Where it has them,
``start(step, config)`` is called before its first row, and again where a run goes back to an
earlier step, and ``status(text)`` when the run ends.

``metrics.jsonl`` is the truth and never waits: each tracker has a thread and a queue of its own.
One that raises is left alone from then on, and one that hangs misses rows once its queue is full;
each says so once.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from traceback import format_exception_only
from typing import Any, Protocol

from forgekit.checks import quoted
from forgekit.environment import require
from forgekit.files import write_atomic
from forgekit.metrics.records import finite

ROOM = 1000
"""Queued calls of a slow tracker; further ones are dropped."""

CLOSING_S = 10.0
"""How long the end of a run waits for a tracker, in seconds."""

BEHIND = "does not keep up, or hangs"


class Tracker(Protocol):
    """Receives the metrics of steps; ``start(step, config)`` and ``status(text)`` are optional.

    All trackers are given the same ``config``: none may change it.
    """

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log numbers by metric name; may be called again for a step, with other names."""
        ...

    def close(self) -> None:
        """Write pending metrics."""
        ...


class TensorBoard:
    """Writes ``<out>/tensorboard``; ``tensorboard --logdir <out>`` shows it.

    Where a run goes on from a checkpoint, what was written of later steps is hidden
    (``purge_step``).

    Args:
        out: The run directory.

    Raises:
        ImportError: If tensorboard is not installed.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        require("tensorboard", extra="tensorboard")
        self._folder = Path(out) / "tensorboard"
        self._writer: Any = None

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """Open a file that hides the steps after ``step``."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1 if step else 0)
        text = json.dumps(finite(dict(config)), indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```", step)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write each value as a scalar, unbuffered, so that a killed run loses nothing."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """Logs to Weights & Biases, on an axis of its own: ``train/step``.

    A run directory is one W&B run, whose id is kept in ``<out>/wandb.json``. Where a run goes on
    from a checkpoint, the rows after it are sent again. What a killed process had not uploaded is
    in ``metrics.jsonl`` alone: offline W&B keeps most of it in memory.

    Args:
        out: The run directory.
        project: Of W&B; by default the name of the folder that ``out`` is in.
        **options: For ``wandb.init``, such as ``entity``, ``name`` or ``mode="offline"``.

    Raises:
        ImportError: If wandb is not installed.
    """

    def __init__(
        self, out: str | os.PathLike[str], project: str | None = None, **options: Any
    ) -> None:
        require("wandb", extra="wandb")
        self._out = Path(out)
        self._options = {"project": project or self._out.absolute().parent.name, **options}
        self._run: Any = None

    def start(self, step: int, config: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Start a tracker run, or resume this directory's."""
        if self._run is not None:
            return
        path = self._out / "wandb.json"
        run_id = json.loads(path.read_text())["id"] if path.exists() else secrets.token_hex(4)
        write_atomic(path, json.dumps({"id": run_id}).encode())
        self._run = require("wandb", extra="wandb").init(
            dir=str(self._out),
            id=run_id,
            resume="allow",
            config=finite(dict(config)),
            **{"name": self._out.name, **self._options},
        )
        self._run.define_metric("train/step")
        self._run.define_metric("*", step_metric="train/step")

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step."""
        self._run.log({**values, "train/step": step})

    def status(self, text: str) -> None:
        """Write the run's outcome to its summary."""
        if self._run is not None:
            self._run.summary["status"] = text

    def close(self) -> None:
        """Send pending metrics."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def make_trackers(
    trackers: Sequence[str | Tracker], out: str | os.PathLike[str]
) -> tuple[Tracker, ...]:
    """Build trackers by name, for a recipe's configuration.

    Args:
        trackers: Of ``"tensorboard"`` and ``"wandb"``; trackers stay as they are.
        out: The run directory.

    Raises:
        ImportError: If a package is not installed.
        ValueError: If a name is unknown.
    """
    kinds: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB}
    if unknown := [one for one in trackers if isinstance(one, str) and one not in kinds]:
        raise ValueError(f"unknown trackers {quoted(unknown)}; the known ones are {quoted(kinds)}.")
    return tuple(kinds[one](out) if isinstance(one, str) else one for one in trackers)


class GuardedTracker:
    """Calls a tracker in a thread, so that its failures cannot stop a run.

    Args:
        tracker: The tracker.
        say: Prints a line.
    """

    def __init__(self, tracker: Tracker, say: Callable[[str], None]) -> None:
        self._tracker, self._say = tracker, say
        self._name = getattr(tracker, "__name__", type(tracker).__name__)
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(ROOM)
        self._has_spoken = self._is_broken = False
        self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._thread.start()

    def start(self, step: int, config: Mapping[str, Any]) -> None:
        """Pass on the step at which the run starts or to which it goes back."""
        self._put("start", step, config)

    def __call__(self, step: int, values: Mapping[str, Any]) -> None:
        """Pass on the values that are numbers."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if numbers:
            self._put("__call__", step, numbers)

    def status(self, text: str) -> None:
        """Pass on the run's outcome."""
        self._put("status", text)

    def close(self) -> None:
        """Wait for queued calls, for a limited time."""
        self._put("close")
        with suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(0.0 if self._is_broken else CLOSING_S)
        if self._thread.is_alive():
            self._complain(BEHIND)

    def _put(self, method: str, *args: Any) -> None:
        if self._is_broken:
            return
        try:
            self._calls.put_nowait((method, args))
        except queue.Full:
            self._complain(BEHIND)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            method, args = call
            try:
                if not self._is_broken and (method == "__call__" or hasattr(self._tracker, method)):
                    getattr(self._tracker, method)(*args)
            except BaseException as error:  # trackers raise anything, SystemExit included
                self._complain(f"failed: {format_exception_only(error)[-1].strip()}")
                self._is_broken = True
            self._calls.task_done()

    def _complain(self, how: str) -> None:
        """Warn once; ``metrics.jsonl`` has all rows."""
        if not self._has_spoken:
            self._has_spoken = True
            self._say(f"tracker {self._name} {how}; metrics.jsonl has all rows")
