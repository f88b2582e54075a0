"""The frame around a recipe: one run in one directory, ended properly whatever is raised.

``open_run`` is where a run's loose ends are tied: the lock, the resolved configuration, what
``status.json`` says in the end, saves that are still being written, process groups, and a terminal
that goes away.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import attrs

from forgekit.inputs import brief, is_integer
from forgekit.mesh import process_rank, shutdown
from forgekit.run.bad_steps import roll_back
from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.run.checkpoints.migration import Migration
from forgekit.run.checkpoints.retention import Keep
from forgekit.run.checkpoints.save import PendingSave, checkpoint_save, wait_for_saves
from forgekit.run.checkpoints.storage import latest_checkpoint
from forgekit.run.health.rendezvous import barrier
from forgekit.run.metrics import MetricsLog
from forgekit.run.recipe_parts import Setup
from forgekit.run.run_config import keep_config
from forgekit.run.run_files import check_directory
from forgekit.run.run_status import RunLockedError, lock_run, write_status
from forgekit.run.stop_signal import StoppedError, StopSignal, is_ignored, put_back
from forgekit.state import SaveHandle, TrainState
from forgekit.terminal import steady_streams, tell

__all__ = ["Run", "every", "open_run"]

USAGE_ERRORS = (ValueError, OSError, ImportError, CheckpointError)
"""What the library raises in set-up when a run was asked for that cannot be."""

StateT = TypeVar("StateT", bound=TrainState)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

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
        config: The resolved configuration; ``start`` keeps it as ``config.json``, and what has
            changed since the run was last started in ``config_changes.jsonl``.
        is_writer: Whether this process writes into it: rank 0.
    """

    out: Path
    config: Mapping[str, Any]
    is_writer: bool
    _opened: float = attrs.field(factory=time.monotonic)
    _status: dict[str, Any] | None = None
    _has_ended: bool = False
    _log: MetricsLog | None = None
    _loader: Any = None
    _saves: SaveHandle | None = None
    _total: int | None = None
    _stop: StopSignal | None = None
    _keep: int | Keep | None = 3
    _fingerprint: Any = None
    _version: int = 1
    _saved: int | None = None

    @property
    def checkpoints(self) -> Path:
        """Where the checkpoints are."""
        return self.out / "checkpoints"

    def start(
        self,
        state: TrainState | Setup,
        *,
        every: int,
        total: int | None = None,
        loader: Any = None,
        keep: int | Keep | None = 3,
        fingerprint: Any = None,
        version: int = 1,
    ) -> MetricsLog:
        """Say that set-up is over and open the run's log, which continues that of a resumed run.

        What goes wrong from here on is a failure, not a usage error.

        Args:
            state: What ``setup`` returned, of which ``state``, ``loader`` and ``stop`` are read;
                ``is_over`` and ``end`` ask that ``stop``. Or a state alone, for a recipe that
                stops and saves by itself.
            every: Steps per row of metrics.
            total: The last step, which always gets a row.
            loader: Measures how long the loop waits for data; ``roll_back`` moves it. Given beside
                a state.
            keep: For ``save``, as for ``checkpoint_save``.
            fingerprint: For ``save``, as for ``checkpoint_save``; None is that of the loader's
                dataset.
            version: For ``save``, as for ``checkpoint_save``.

        Returns:
            The log, to be used in ``with``.

        Raises:
            ValueError: If ``every`` is less than 1, or the loader's dataset has a ``seq_len`` that
                is longer than the ``spec.max_seq_len`` of the model.
            HangError: If another rank does not come.
        """
        state, loader, self._stop = _parts(state, loader)
        _check_places(state, getattr(loader, "dataset", None))
        barrier("set-up is done", timeout_s=SETUP_TIMEOUT_S)
        log = MetricsLog(
            self.out,
            start_step=state.step,
            every=every,
            total=total,
            is_writer=self.is_writer,
            loader=loader if hasattr(loader, "wait_seconds") else None,
            start_samples=state.samples,
        )
        changed = keep_config(self.out, self.config, state) if self.is_writer else None
        self._note(state, "running")
        log.message(self._greeting(state))
        if changed:
            log.message(f"{self.out}: configuration changed: {changed}")
        if total is not None and state.step >= total:
            log.message(f"{self.out}: all {total} steps are done already; more steps would go on")
        self._log, self._loader, self._total = log, loader, total
        self._keep, self._version, self._saves = keep, version, state.saves
        self._fingerprint = _fingerprint_of(loader) if fingerprint is None else fingerprint
        self._saved = state.step  # it was loaded, or there is nothing to save yet
        return log

    def is_over(self, state: TrainState) -> bool:
        """Whether no further step is due: all are done, or the ranks agreed to stop.

        Ask between two steps, on every rank.

        Args:
            state: The state after the last step.
        """
        return self._has_all_steps(state) or self._is_stopped

    def save(self, state: TrainState) -> None:
        """Save a checkpoint in the background, unless the run has this state saved already.

        Args:
            state: The state to save; ``start`` was told what to keep.

        Raises:
            CheckpointError: If the save before this one failed.
        """
        if self._saved != state.step:
            self._write_checkpoint(state)

    def roll_back(
        self,
        state: StateT,
        save: Callable[[StateT, Path], PendingSave] | None = None,
        *,
        times: int = 3,
        version: int | None = None,
        migrate: Migration | None = None,
    ) -> StateT:
        """Go back to the last checkpoint before the bad steps; data and log follow.

        What is left out is saved at once, so that a resumed run leaves it out as well.

        Args:
            state: A state whose last steps were bad; consumed.
            save: ``checkpoint_save``, or it with some arguments given; None saves as ``self.save``.
            times: How often this run may be rolled back, from its start on.
            version: As for ``checkpoint_load``; None is that of ``start``.
            migrate: As for ``checkpoint_load``.

        Returns:
            The state to go on from; see ``forgekit.run.roll_back``, which raises too.

        Raises:
            ValueError: If the loader cannot go back, as a stream's; nothing is changed then.
        """
        if self._loader is not None and not hasattr(self._loader, "seek"):
            raise ValueError(
                f"a {type(self._loader).__name__} has no seek, so it cannot go back and leave "
                "samples out. Roll back on a loader of numbered rows, of forgekit.make_loader."
            )
        version = self._version if version is None else version
        state = roll_back(state, self.checkpoints, times=times, version=version, migrate=migrate)
        if self._loader is not None:
            self._loader.seek(state.samples, skip=state.skips)
        if self._log is not None:
            self._log.rewind(state)
        self._say(f"rolled back to step {state.step}")
        pending = self._write_checkpoint(state) if save is None else save(state, self.checkpoints)
        pending.wait()
        return state

    def end(self, state: TrainState, stopped: str | None = None) -> bool:
        """Save the last state, wait for it and say how the run ended.

        A run is finished if nobody asked it to stop. So one that is stopped after its last step,
        while it is evaluated, is not: the same command does what is left.

        Args:
            state: The last state.
            stopped: Why it was stopped before its end, for a run whose ``start`` got no ``stop``
                and that saves for itself; None if it is finished.

        Returns:
            Whether the run is finished.

        Raises:
            CheckpointError: If the last save failed.
        """
        if self._stop is not None:
            self.save(state)
            stopped = self._stop.reason if self._is_stopped else None
        wait_for_saves(state)
        self._note(state, "stopped" if stopped else "finished", reason=stopped)
        self._has_ended = True
        if stopped:
            self._say(
                f"stopped after step {state.step} ({stopped}), saved; the same command goes on "
                "from there"
            )
        elif self._total is not None and state.step < self._total:
            self._say(f"the data ended after step {state.step} of {self._total}")
        return not stopped

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log.message(f"{self.out}: {text}")

    @property
    def _is_stopped(self) -> bool:
        return self._stop is not None and self._stop.requested

    def _has_all_steps(self, state: TrainState) -> bool:
        return self._total is not None and state.step >= self._total

    def _write_checkpoint(self, state: TrainState) -> PendingSave:
        pending = checkpoint_save(
            state,
            self.checkpoints,
            keep=self._keep,
            fingerprint=self._fingerprint,
            version=self._version,
        )
        self._saved = state.step
        return pending

    def _fail(self, reason: str) -> None:
        """Say why the run failed, and after which step; what comes after its end is no failure."""
        if self._has_ended:
            return
        fields = {**(self._status or {}), "reason": reason}
        if self._log is not None and self._log.samples is not None:
            fields |= {"step": self._log.step, "samples": self._log.samples}
        self._write_last("failed", **fields)

    def _give_up(self, reason: str) -> None:
        """Say that the run was stopped in the midst of a step, and where it will go on."""
        good = latest_checkpoint(self.checkpoints)
        saved = None if good is None else int(Path(good).name.removeprefix("step_"))
        self._write_last("stopped", reason=reason, step=saved)
        at = "the start" if saved is None else f"step {saved}"
        self._say(f"stopped ({reason}); the same command goes on from {at}")

    def _write_last(self, status: str, **fields: Any) -> None:
        """Write the status without hiding the exception that brought us here."""
        try:
            write_status(self.out, status, is_writer=self.is_writer, **fields)
        except OSError as error:
            tell(f"status.json could not be written: {error}")

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

    What is written to stdout and stderr meanwhile cannot fail: a display that goes away (`| head`,
    a closed terminal, a full disk) is missed by nobody, and the run goes on.

    Args:
        out: The run directory; made if it does not exist. A second run into it is refused.
        config: The resolved configuration, for ``config.json``.

    Yields:
        The ``Run``. Call its ``start`` when set-up is done and ``end`` when the loop has ended.

    Raises:
        SystemExit: With code 2 if the library refused what set-up asked for (its message, without
            a traceback), with code 1 if the directory is in use. Everything else goes on as it
            is, after ``status.json`` says "failed" and why, unless the run had its ``end`` before.
            With code 0 if SIGTERM, SIGUSR1 or SIGHUP came before ``start``, after ``status.json``
            says "stopped": nothing was done, so there is nothing to save. With code 1 if a stop
            could not wait for the step's end, also after "stopped".
    """
    with ExitStack() as stack:
        stack.enter_context(steady_streams())
        run = _claim(out, config, stack)
        stack.enter_context(_closing(run))
        stack.enter_context(_stopping(run))
        yield run


def _claim(out: str | Path, config: Mapping[str, Any], stack: ExitStack) -> Run:
    """Make the run directory and lock it, or say why it cannot be one."""
    is_writer = True
    try:
        is_writer = process_rank() == 0
        check_directory(out)
        stack.enter_context(lock_run(out, is_writer=is_writer))
    except RunLockedError as error:
        _exit(error, code=1, is_writer=is_writer)
    except (OSError, ValueError) as error:
        _exit(error, code=2, is_writer=is_writer)
    return Run(Path(out), config, is_writer)


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

    heard = [number for number in SIGNALS if not is_ignored(number)]
    before = {number: signal.signal(number, on_signal) for number in heard}
    try:
        yield
    finally:
        put_back(before, on_signal)


@contextmanager
def _closing(run: Run) -> Iterator[None]:
    try:
        yield
        wait_for_saves(run._saves)
        wait_for_saves()  # those of states that the run was not started with
    except StoppedError as stop:
        _drain()
        run._give_up(str(stop))
        raise SystemExit(0 if run._status is None else 1) from None
    except BaseException as error:
        _drain()
        run._fail(f"{type(error).__name__}: {error}")
        if run._status is None and isinstance(error, USAGE_ERRORS) and _is_refusal(error):
            _exit(error, code=2, is_writer=run.is_writer)
        raise
    finally:
        shutdown()


def every(steps: int, state: TrainState, *, last: int | None = None) -> bool:
    """Whether something that happens every ``steps`` steps is due after the last step.

    Before the first step nothing is.

    Args:
        steps: Steps from one time to the next; 0 is never.
        state: The state after the last step.
        last: A step after which it is due as well, and after any later one: the end of the run.

    Raises:
        TypeError: If ``steps`` is no integer.
        ValueError: If ``steps`` is negative.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> state = TrainState.create(model, torch.optim.SGD(model.parameters()))
        >>> every(1, state), every(0, state), every(0, state, last=0)
        (False, False, True)
    """
    if not is_integer(steps):
        raise TypeError(f"every is {brief(steps)}, a {type(steps).__name__}; pass steps, like 100.")
    if steps < 0:
        raise ValueError(f"every {steps} steps cannot be; 0 is never, 1 is at every step.")
    is_last = last is not None and state.step >= last
    return is_last or (steps > 0 and state.step > 0 and state.step % steps == 0)


def _parts(given: TrainState | Setup, loader: Any) -> tuple[TrainState, Any, StopSignal | None]:
    """State, loader and stop signal of what a recipe's ``setup`` returned, or of a state."""
    if isinstance(given, TrainState):
        return given, loader, None
    return given.state, given.loader, given.stop


def _fingerprint_of(loader: Any) -> Any:
    """What identifies a loader's data: of a mixture only those that were consumed."""
    dataset = getattr(loader, "dataset", None)
    return getattr(dataset, "fingerprint_at", getattr(dataset, "fingerprint", None))


def _check_places(state: TrainState, dataset: Any) -> None:
    """Refuse rows that the model will not take, before the first one is read."""
    seq_len = getattr(dataset, "seq_len", 0)
    limit = state.layout.longest
    if limit is not None and seq_len > limit:
        raise ValueError(
            f"seq_len {seq_len} of the data is above max_seq_len {limit} of the model; set "
            f"data.seq_len={limit} or less, or model.max_seq_len={seq_len} or more."
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
        tell(f"the last save failed too: {error}")


def _exit(error: BaseException, *, code: int, is_writer: bool) -> NoReturn:
    if is_writer:
        tell(f"error: {error}")
    raise SystemExit(code) from None
