"""The frame around a recipe: one run in one directory, ended properly whatever is raised.

``open_run`` is where a run's loose ends are tied: the lock, the resolved configuration, what
``status.json`` says in the end, saves that are still being written, process groups.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import attrs

from forgekit.mesh import process_rank, shutdown
from forgekit.run.bad_steps import roll_back
from forgekit.run.checkpoint import PendingSave, wait_for_saves
from forgekit.run.checkpoints.commit import CheckpointError, latest_checkpoint
from forgekit.run.meeting import barrier
from forgekit.run.metrics import MetricsLog
from forgekit.run.resilience import (
    RunLockedError,
    StoppedError,
    lock_run,
    put_back,
    write_atomic,
    write_status,
)
from forgekit.state import TrainState

__all__ = ["Run", "every", "open_run"]

USAGE_ERRORS = (ValueError, FileNotFoundError, FileExistsError, ImportError, CheckpointError)
"""What the library raises in set-up when a run was asked for that cannot be."""

StateT = TypeVar("StateT", bound=TrainState)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

SETUP_TIMEOUT_S = 1800.0
"""Between the first rank that has set up and the last: reading data and models may differ."""

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_RECIPES = _PACKAGE + "recipes" + os.sep
_STDLIB = str(Path(os.__file__).parent) + os.sep


@attrs.define
class Run:
    """A run in its directory.

    Attributes:
        out: The directory.
        config: The resolved configuration; ``start`` keeps it as ``config.json``.
        is_writer: Whether this process writes into it: rank 0.
    """

    out: Path
    config: Mapping[str, Any]
    is_writer: bool
    _opened: float = attrs.field(factory=time.monotonic)
    _status: dict[str, Any] | None = None
    _log: MetricsLog | None = None
    _loader: Any = None

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.out / "checkpoints"

    def start(
        self, state: TrainState, *, every: int, total: int | None = None, loader: Any = None
    ) -> MetricsLog:
        """Say that set-up is over and open the run's log, which continues that of a resumed run.

        What goes wrong from here on is a failure, not a usage error.

        Args:
            state: The state to start from.
            every: Steps per row of metrics.
            total: The last step, which always gets a row.
            loader: Measures how long the loop waits for data.

        Returns:
            The log, to be used in ``with``.

        Raises:
            ValueError: If ``every`` is less than 1, or the loader's dataset has a ``seq_len`` that
                is longer than the ``spec.max_seq_len`` of the model.
            HangError: If another rank does not come.
        """
        _check_places(state, getattr(loader, "dataset", None))
        barrier("set-up is done", timeout_s=SETUP_TIMEOUT_S)
        log = MetricsLog(
            self.out,
            start_step=state.step,
            every=every,
            total=total,
            is_writer=self.is_writer,
            loader=loader,
            start_samples=state.samples,
        )
        if self.is_writer:
            content = json.dumps(self.config, indent=2, default=str)
            write_atomic(self.out / "config.json", f"{content}\n".encode())
        self._note(state, "running")
        log.message(self._greeting(state))
        if total is not None and state.step >= total:
            log.message(f"{self.out}: all {total} steps are done already; more steps would go on")
        self._log, self._loader = log, loader
        return log

    def roll_back(
        self, state: StateT, save: Callable[[StateT, Path], PendingSave], *, times: int = 3
    ) -> StateT:
        """Go back to the last checkpoint before the bad steps; data and log follow.

        Args:
            state: A state whose last steps were bad; consumed.
            save: ``checkpoint_save``, or it with some arguments given. What is left out is saved
                at once, so that a resumed run leaves it out as well.
            times: How often this run may be rolled back, from its start on.

        Returns:
            The state to go on from; see ``forgekit.roll_back``, which raises too.
        """
        state = roll_back(state, self.checkpoints, times=times)
        if self._loader is not None:
            self._loader.seek(state.samples, skip=state.skips)
        if self._log is not None:
            self._log.rewind(state)
            self._log.message(f"{self.out}: rolled back to step {state.step}")
        save(state, self.checkpoints).wait()
        return state

    def end(self, state: TrainState, stopped: str | None = None) -> None:
        """Wait for the last save and say how the run ended.

        Args:
            state: The last state.
            stopped: Why it was stopped before its end; None if it is finished.

        Raises:
            CheckpointError: If the last save failed.
        """
        wait_for_saves()
        self._note(state, "stopped" if stopped else "finished", reason=stopped)
        if stopped and self._log is not None:
            self._log.message(
                f"{self.out}: stopped after step {state.step} ({stopped}), saved; "
                "the same command goes on from there"
            )

    def _fail(self, reason: str) -> None:
        """Say why the run failed, and after which step."""
        fields = {**(self._status or {}), "reason": reason}
        if self._log is not None and self._log.samples is not None:
            fields |= {"step": self._log.step, "samples": self._log.samples}
        write_status(self.out, "failed", is_writer=self.is_writer, **fields)

    def _give_up(self, reason: str) -> None:
        """Say that the run was stopped in the midst of a step, and where it will go on."""
        good = latest_checkpoint(self.checkpoints)
        saved = None if good is None else int(Path(good).name.removeprefix("step_"))
        write_status(self.out, "stopped", is_writer=self.is_writer, reason=reason, step=saved)
        if self._log is not None:
            at = "the start" if saved is None else f"step {saved}"
            self._log.message(f"{self.out}: stopped ({reason}); the same command goes on from {at}")

    def _greeting(self, state: TrainState) -> str:
        seconds = time.monotonic() - self._opened
        parameters = sum(p.numel() for p in state.model.parameters()) / 1e6
        ranks = 1 if state.mesh is None else state.mesh.size()
        return (
            f"{self.out}: step {state.step}, sample {state.samples}; {parameters:.2f} M parameters "
            f"on {ranks} rank{'s' if ranks > 1 else ''}, set up in {seconds:.1f} s"
        )

    def _note(self, state: TrainState, status: str, **fields: Any) -> None:
        self._status = {"step": state.step, "samples": state.samples, **fields}
        write_status(self.out, status, is_writer=self.is_writer, **self._status)


@contextmanager
def open_run(out: str | Path, config: Mapping[str, Any]) -> Iterator[Run]:
    """Hold a run directory for one run, and leave it in order.

    Args:
        out: The run directory; made if it does not exist. A second run into it is refused.
        config: The resolved configuration, for ``config.json``.

    Yields:
        The ``Run``. Call its ``start`` when set-up is done and ``end`` when the loop has ended.

    Raises:
        SystemExit: With code 2 if the library refused what set-up asked for (its message, without
            a traceback), with code 1 if the directory is in use. Everything else goes on as it
            is, after ``status.json`` says "failed" and why. With code 0 if SIGTERM or SIGUSR1 came
            before ``start``, after ``status.json`` says "stopped": nothing was done, so there is
            nothing to save. With code 1 if a stop could not wait for the step's end, also after
            "stopped".
    """
    run = Run(Path(out), config, is_writer=process_rank() == 0)
    try:
        run.out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        _exit(run, error, code=2)
    try:
        with lock_run(out, is_writer=run.is_writer), _closing(run), _stopping(run):
            yield run
    except RunLockedError as error:
        _exit(run, error, code=1)


@contextmanager
def _stopping(run: Run) -> Iterator[None]:
    """Listen to signals until a ``StopSignal`` does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets nobody else
        return

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if run._status is None:
            raise StoppedError(f"{signal.Signals(number).name} during set-up")
        signal.signal(number, signal.SIG_DFL)  # the loop has ended already
        signal.raise_signal(number)

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        put_back(before, on_signal)


@contextmanager
def _closing(run: Run) -> Iterator[None]:
    try:
        yield
        wait_for_saves()
    except StoppedError as stop:
        _drain()
        run._give_up(str(stop))
        raise SystemExit(0 if run._status is None else 1) from None
    except BaseException as error:
        _drain()
        run._fail(f"{type(error).__name__}: {error}")
        if run._status is None and isinstance(error, USAGE_ERRORS) and _is_refusal(error):
            _exit(run, error, code=2)
        raise
    finally:
        shutdown()


def every(steps: int, state: TrainState) -> bool:
    """Whether something that happens every ``steps`` steps is due; 0 never is.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> state = TrainState.create(model, torch.optim.SGD(model.parameters()))
        >>> every(1, state), every(0, state)
        (True, False)
    """
    return steps > 0 and state.step % steps == 0


def _check_places(state: TrainState, dataset: Any) -> None:
    """Refuse rows that the model will not take, before the first one is read."""
    places = getattr(dataset, "seq_len", 0)
    limit = getattr(getattr(state.model, "spec", None), "max_seq_len", places)
    if places > limit:
        raise ValueError(
            f"seq_len {places} of the data is above max_seq_len {limit} of the model; set "
            f"data.seq_len={limit} or less, or model.max_seq_len={places} or more."
        )


def _is_refusal(error: BaseException) -> bool:
    """Whether the library raised it; what a recipe raises itself keeps its traceback."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    while frames and frames[-1].startswith(_STDLIB) and "site-packages" not in frames[-1]:
        frames.pop()  # where a missing file is noticed
    return bool(frames) and frames[-1].startswith(_PACKAGE) and not frames[-1].startswith(_RECIPES)


def _drain() -> None:
    """Let a save that is under way end, without hiding the exception that brought us here."""
    try:
        wait_for_saves()
    except Exception as error:
        _tell(f"the last save failed too: {error}")


def _exit(run: Run, error: BaseException, code: int) -> NoReturn:
    if run.is_writer:
        _tell(f"error: {error}")
    raise SystemExit(code) from None


def _tell(text: str) -> None:
    sys.stderr.write(f"{text}\n")
