"""The frame around a recipe: one run in one directory, ended properly whatever is raised.

``open_run`` is where a run's loose ends are tied: the lock, the resolved configuration, what
``status.json`` says in the end, saves that are still being written, process groups, and a terminal
that goes away.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import attrs

from forgekit.mesh import process_rank, shutdown
from forgekit.run.bad_steps import roll_back
from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.run.checkpoints.migration import Migration
from forgekit.run.checkpoints.save import PendingSave, wait_for_saves
from forgekit.run.checkpoints.storage import latest_checkpoint
from forgekit.run.health.rendezvous import barrier
from forgekit.run.metrics import MetricsLog
from forgekit.run.run_config import keep_config
from forgekit.run.run_status import RunLockedError, lock_run, write_status
from forgekit.run.stop_signal import StoppedError, is_ignored, put_back
from forgekit.state import SaveHandle, TrainState
from forgekit.terminal import steady_streams, tell

__all__ = ["Run", "every", "open_run"]

USAGE_ERRORS = (ValueError, OSError, ImportError, CheckpointError)
"""What the library raises in set-up when a run was asked for that cannot be."""

StateT = TypeVar("StateT", bound=TrainState)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

FILES = (
    *(".lock", "config.json", "config_changes.jsonl"),
    *("metrics.jsonl", "bad_steps.jsonl", "status.json"),
)
"""What a run keeps in its directory as plain files; a FIFO among them would hang it."""

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
    _is_over: bool = False
    _log: MetricsLog | None = None
    _loader: Any = None
    _saves: SaveHandle | None = None

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
        changed = keep_config(self.out, self.config, state) if self.is_writer else None
        self._note(state, "running")
        log.message(self._greeting(state))
        if changed:
            log.message(f"{self.out}: configuration changed: {changed}")
        if total is not None and state.step >= total:
            log.message(f"{self.out}: all {total} steps are done already; more steps would go on")
        self._log, self._loader, self._saves = log, loader, state.saves
        return log

    def roll_back(
        self,
        state: StateT,
        save: Callable[[StateT, Path], PendingSave],
        *,
        times: int = 3,
        version: int = 1,
        migrate: Migration | None = None,
    ) -> StateT:
        """Go back to the last checkpoint before the bad steps; data and log follow.

        Args:
            state: A state whose last steps were bad; consumed.
            save: ``checkpoint_save``, or it with some arguments given. What is left out is saved
                at once, so that a resumed run leaves it out as well.
            times: How often this run may be rolled back, from its start on.
            version: As for ``checkpoint_load``.
            migrate: As for ``checkpoint_load``.

        Returns:
            The state to go on from; see ``forgekit.roll_back``, which raises too.

        Raises:
            ValueError: If the loader cannot go back, as a stream's; nothing is changed then.
        """
        if self._loader is not None and not hasattr(self._loader, "seek"):
            raise ValueError(
                f"a {type(self._loader).__name__} has no seek, so it cannot go back and leave "
                "samples out. Roll back on a loader of numbered rows, of forgekit.make_loader."
            )
        options = {"times": times, "version": version, "migrate": migrate}
        state = roll_back(state, self.checkpoints, **options)
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
        wait_for_saves(state)
        self._note(state, "stopped" if stopped else "finished", reason=stopped)
        self._is_over = True
        if stopped and self._log is not None:
            self._log.message(
                f"{self.out}: stopped after step {state.step} ({stopped}), saved; "
                "the same command goes on from there"
            )

    def _fail(self, reason: str) -> None:
        """Say why the run failed, and after which step; what comes after its end is no failure."""
        if self._is_over:
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
        if self._log is not None:
            at = "the start" if saved is None else f"step {saved}"
            self._log.message(f"{self.out}: stopped ({reason}); the same command goes on from {at}")

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
        _check_directory(out)
        stack.enter_context(lock_run(out, is_writer=is_writer))
    except RunLockedError as error:
        _exit(error, code=1, is_writer=is_writer)
    except (OSError, ValueError) as error:
        _exit(error, code=2, is_writer=is_writer)
    return Run(Path(out), config, is_writer)


def _check_directory(out: str | Path) -> None:
    """Refuse a run directory in which set-up would fail later, or hang.

    Raises:
        ValueError: If it cannot be made or written, or if something else has the name of a file
            or folder that a run keeps in it.
    """
    try:
        if not str(out):
            raise ValueError("the name is empty")
        Path(out).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(
            f"{_short_name(out)} cannot be a run directory: {why}. Choose another, out=DIR."
        ) from None
    wrong = [name for name in FILES if _exists(path := Path(out) / name) and not path.is_file()]
    checkpoints = Path(out) / "checkpoints"
    wrong += ["checkpoints"] if _exists(checkpoints) and not checkpoints.is_dir() else []
    if wrong:
        kind = "folder" if wrong[0] == "checkpoints" else "file"
        raise ValueError(
            f"{Path(out) / wrong[0]} is not a {kind}, and a run keeps one of that name. Move it "
            "away, or choose another run directory, out=DIR."
        )


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _short_name(out: str | Path) -> str:
    return text if len(text := str(out)) <= 200 else f"{text[:197]}..."


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


def every(steps: int, state: TrainState) -> bool:
    """Whether something that happens every ``steps`` steps is due; 0 never is.

    Raises:
        ValueError: If ``steps`` is negative.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> state = TrainState.create(model, torch.optim.SGD(model.parameters()))
        >>> every(1, state), every(0, state)
        (True, False)
    """
    if steps < 0:
        raise ValueError(f"every {steps} steps cannot be; 0 is never, 1 is at every step.")
    return steps > 0 and state.step % steps == 0


def _check_places(state: TrainState, dataset: Any) -> None:
    """Refuse rows that the model will not take, before the first one is read."""
    places = getattr(dataset, "seq_len", 0)
    limit = state.layout.longest
    if limit is not None and places > limit:
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
        tell(f"the last save failed too: {error}")


def _exit(error: BaseException, *, code: int, is_writer: bool) -> NoReturn:
    if is_writer:
        tell(f"error: {error}")
    raise SystemExit(code) from None
