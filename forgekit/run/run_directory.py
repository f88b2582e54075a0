"""The context of a recipe: one run in one directory, ended properly whatever is raised.

``open_run`` is where a run's loose ends are tied: the lock, the resolved configuration, what
``status.json`` says in the end, saves that are still being written, process groups, and a terminal
that goes away.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
import torch
import torch.distributed as dist

from forgekit.checkpoints.directory import Keep, newest, storage_of
from forgekit.checkpoints.save import checkpoint_save, join_saves, wait_for_saves
from forgekit.checks import RankCountError, check_integers, counted
from forgekit.environment import end_launcher, is_library
from forgekit.mesh import process_rank, shutdown
from forgekit.metrics.flops import Flops, Utilization
from forgekit.metrics.log import MetricsLog
from forgekit.metrics.trackers import Tracker, make_trackers
from forgekit.parallel.layout import world_of
from forgekit.ranks import CheckpointError
from forgekit.remote.urls import Location, Url, entries_below, fs_of, location_of
from forgekit.report import write_report
from forgekit.run.bad_steps import roll_back
from forgekit.run.elastic import (
    PAUSE_S,
    WANTED,
    Attempt,
    check_connections,
    hold_run,
    is_left,
    is_wanted,
)
from forgekit.run.mirror import Mirror, working_folder
from forgekit.run.rendezvous import barrier, is_lost
from forgekit.run.setup import Setup, check_length
from forgekit.run.status import (
    RunLockedError,
    append_history,
    check_directory,
    keep_config,
    write_status,
)
from forgekit.run.stop_signal import STOP_SIGNALS, StoppedError, StopSignal, is_ignored, put_back
from forgekit.run.summary import start_summary
from forgekit.state import SaveHandle, TrainState
from forgekit.terminal import steady_streams, tell

STATUS_EVERY_S = 30.0
"""Time between two updates of ``status.json`` by ``is_over``."""

PATIENCE_S = 5.0
"""How long a rank waits at the end for the others, which may still use its groups."""

USAGE_ERRORS = (ValueError, OSError, ImportError, CheckpointError)
"""Errors that the library raises in set-up for impossible requests."""

StateT = TypeVar("StateT", bound=TrainState)

VALIDATORS = os.path.join("attr", "validators.py")
STDLIB = str(Path(os.__file__).parent) + os.sep


@attrs.define
class Run:
    """A run and its directory.

    Attributes:
        out: The directory; of a run behind a URL the local one, which is mirrored there.
        config: The resolved configuration; ``start`` keeps it as ``config.json``, and what has
            changed since the run was last started in ``config_changes.jsonl``. Each start and end
            is a line of ``history.jsonl``.
        is_writer: Whether this process writes into it: rank 0.
        trackers: Take the rows of metrics too.
        url: Where the run directory is, if it is behind a URL.
        attempt: Who starts it again when it fails.
    """

    out: Path
    config: Mapping[str, Any]
    is_writer: bool
    trackers: tuple[Tracker, ...] = ()
    url: Url | None = None
    attempt: Attempt = attrs.field(factory=Attempt)
    _mirror: Mirror | None = None
    _opened: float = attrs.field(factory=time.monotonic)
    _has_ended: bool = False
    _log: MetricsLog | None = None
    _loader: Any = None
    _saves: SaveHandle | None = None
    _total: float = math.inf
    _stop: StopSignal | None = None
    _options: dict[str, Any] = attrs.field(factory=dict)  # of checkpoint_save
    _saved: int | None = None
    _noted: float = 0.0
    _is_stopped: bool = False

    @property
    def checkpoints(self) -> Location:
        """The folder of checkpoints."""
        return (self.url or self.out) / "checkpoints"

    def start(
        self,
        state: TrainState | Setup,
        *,
        every: int,
        total: int | None = None,
        loader: Any = None,
        keep: int | Keep | None = 3,
        peak_flops: float | None = None,
    ) -> MetricsLog:
        """End set-up and open the run's log; a resumed run's log is continued.

        What goes wrong from here on is a failure, not a usage error.

        Args:
            state: What ``setup`` returned, of which ``state``, ``loader`` and ``stop`` are read;
                ``is_over`` and ``end`` ask that ``stop``. Or a state alone, for a recipe that
                stops and saves by itself.
            every: Steps per row of metrics.
            total: The last step, which always gets a row.
            loader: Given beside a state; it measures waits for data, and ``roll_back`` moves it.
            keep: As for ``checkpoint_save``; the fingerprint is that of the loader's dataset.
            peak_flops: Floating-point operations per second that one device can do, for
                ``perf/mfu``; None is that of ``forgekit.metrics.device_specs``, or no such metric.

        Returns:
            The log, to be used in ``with``.

        Raises:
            ValueError: If ``every`` is less than 1, or the loader's dataset has a ``seq_len`` that
                is longer than the ``spec.max_seq_len`` of the model.
            HangError: If another rank does not come.
        """
        if not isinstance(state, TrainState):
            state, loader, self._stop = state.state, state.loader, state.stop
        dataset = getattr(loader, "dataset", None)
        check_length(state, dataset)
        check_connections()
        barrier("set-up is done", timeout_s=1800)  # ranks may take longer to read data and models
        flops = Flops.of(state.model).over_stages(state)
        log = MetricsLog(
            self.out,
            start_step=state.step,
            every=every,
            total=total,
            is_writer=self.is_writer,
            loader=loader if hasattr(loader, "wait_seconds") else None,
            start_samples=state.samples,
            utilization=Utilization.of(flops, state, loader, peak_flops),
            trackers=self.trackers,
            config=self.config,
        )
        changed = keep_config(self.out, self.config, state) if self.is_writer else None
        self._total = math.inf if total is None else total
        self._note(state, "running")
        ranks = world_of(state.mesh)
        runs_on = {  # which may differ between starts of a run
            "ranks": ranks,
            "device": state.targets.device.type,
            "forgekit": version_of("forgekit"),
            "torch": torch.__version__,
        }
        size = {"parameters": flops.parameters, "arguments": sys.argv[1:]}
        self._remember("started", state, **runs_on, **size, **self.attempt.facts)
        self._log, self._loader = log, loader
        self._say(
            f"step {state.step}, sample {state.samples}; {flops.parameters / 1e6:.2f} M parameters "
            f"on {counted(ranks, 'rank')}, set up in {time.monotonic() - self._opened:.1f} s"
        )
        for line in start_summary(state, flops, dataset, self.config):
            log.message(f"  {line}")
        if changed:
            self._say(f"configuration changed: {changed}")
        if state.step >= self._total:
            self._say(f"all {total} steps are done already; increase steps to continue")
        # A mixture's fingerprint covers the consumed samples only.
        fingerprint = getattr(dataset, "fingerprint_at", getattr(dataset, "fingerprint", None))
        before_commit = None if self._mirror is None else self._mirror.settle
        self._options = {"keep": keep, "fingerprint": fingerprint, "before_commit": before_commit}
        self._saves = state.saves
        self._saved = state.step  # loaded, or nothing to save yet
        return log

    def is_over(self, state: TrainState) -> bool:
        """Whether all steps are done or the ranks agreed to stop; for all ranks, between steps."""
        if self._log is not None and time.monotonic() - self._noted >= STATUS_EVERY_S:
            with suppress(OSError):  # a full disk is reported by the next row of metrics
                self._note(state, "running")
            if self._stop is not None and self.attempt.facts and is_wanted(self.url or self.out):
                self._stop.request(WANTED)
        if self._mirror is not None:
            self._mirror.lease.check_known()
        return state.step >= self._total or (self._stop is not None and self._stop.requested)

    def save(self, state: TrainState, *, blocking: bool = False) -> None:
        """Save a checkpoint in the background, unless this step is saved already.

        Args:
            state: The state.
            blocking: Whether to return once it is there, as before a stream's ``commit``.

        Raises:
            CheckpointError: If the save before this one failed.
        """
        if self._saved == state.step:
            return
        log = self._log
        with nullcontext() if log is None else log.outside(state.targets.device):
            checkpoint_save(state, self.checkpoints, blocking=blocking, **self._options)
        self._saved = state.step

    def roll_back(self, state: StateT, *, times: int = 3) -> StateT:
        """Go back to the last checkpoint before the bad steps, with data and log.

        What is left out is saved at once, so that a resumed run leaves it out as well.

        Args:
            state: A state whose last steps were bad; consumed.
            times: How often this run may be rolled back, from its start on.

        Returns:
            The state to go on from; see ``forgekit.run.roll_back``, which raises too.

        Raises:
            ValueError: If the loader cannot go back, as a stream's; nothing is changed then.
        """
        if self._loader is not None and not hasattr(self._loader, "seek"):
            raise ValueError(
                f"{type(self._loader).__name__} has no seek(), so it cannot go back and skip "
                "samples. Use a loader of numbered rows, as forgekit.make_loader returns."
            )
        state = roll_back(state, self.checkpoints, times=times)
        if self._loader is not None:
            self._loader.seek(state.samples, skip=state.skips)
        if self._log is not None:
            self._log.rewind(state)
        self._say(f"rolled back to step {state.step}")
        self._remember("rolled_back", state, skips=state.skips)
        self._saved = None  # an existing checkpoint of this step lacks the skips
        self.save(state)
        wait_for_saves(state)
        return state

    def end(self, state: TrainState) -> bool:
        """Save the last state, wait for the save and write how the run ended.

        A run is finished if nobody asked it to stop. So one that is stopped after its last step,
        while it is evaluated, is not: the same command does what is left.

        Args:
            state: The last state; saved unless ``start`` got a state alone.

        Returns:
            Whether the run is finished.

        Raises:
            CheckpointError: If the last save failed.
        """
        stopped = None
        if self._stop is not None:
            self.save(state)
            stopped = self._stop.reason if self._stop.requested else None
        wait_for_saves(state)
        ending = "stopped" if stopped else "finished"
        self._note(state, ending, reason=stopped)
        self._remember(ending, state, reason=stopped)
        self._has_ended, self._is_stopped = True, bool(stopped)
        after = f"after step {state.step}"
        if self._log is not None:
            self._log.status(f"stopped {after} ({stopped})" if stopped else f"finished {after}")
        if stopped:
            self._say(f"stopped {after} ({stopped}), saved; the same command resumes")
        elif state.step < self._total < math.inf:
            self._say(f"the data ended {after} of {self._total}")
        return not stopped

    def _write_page(self) -> None:
        """Write ``report.html`` of a finished run, unless the recipe already has."""
        page, status = self.out / "report.html", self.out / "status.json"
        if not self.is_writer or not self._has_ended or self._is_stopped:
            return
        try:
            if not page.exists() or page.stat().st_mtime < status.stat().st_mtime:
                write_report(self.out)
        except Exception as error:  # drawing libraries and disks raise anything
            tell(f"no report: {error}")

    def _say(self, text: str) -> None:
        if self._log is not None:
            self._log.message(f"{self.url or self.out}: {text}")

    def _fail(self, reason: str, *, is_lost: bool = False) -> None:
        """Write why and after which step the run failed; errors after its end do not count.

        Args:
            reason: Why this rank fails.
            is_lost: Whether it is because it has lost another one.
        """
        if not self._has_ended:
            log = self._log
            reason = self.attempt.first_failure("" if is_lost else reason) or reason
            at = {} if log is None else {"step": log.step, "samples": log.samples}
            self._write_last("failed", **at, reason=reason, **self.attempt.facts)

    def _give_up(self, reason: str) -> None:
        """Write that the run was stopped during a step, and where it will resume.

        If another rank has failed, that is why torchrun sent a signal to this one.
        """
        if failure := self.attempt.first_failure():
            self._fail(failure, is_lost=True)
            return
        saved = newest(storage_of(self.checkpoints))
        self._write_last("stopped", reason=reason, step=saved)
        at = "the start" if saved is None else f"step {saved}"
        self._say(f"stopped ({reason}); the same command resumes at {at}")

    def _pause(self, error: RankCountError) -> NoReturn:
        """Wait before torchrun tries again: machines may join, or lost ones be noticed."""
        self._write_last("stopped", reason=f"waits for another number of ranks: {error}")
        if self.is_writer:
            tell(f"{self.out} waits for another number of ranks: {error}")
        time.sleep(PAUSE_S)
        raise SystemExit(1)

    def _write_last(self, status: str, **fields: Any) -> None:
        """Write the final status without hiding the current exception."""
        if not self.is_writer:
            return
        try:
            write_status(self.out, status, **fields)
        except OSError as error:
            tell(f"status.json could not be written: {error}")
        append_history(self.out, status, **fields)

    def _note(self, state: TrainState, status: str, **fields: Any) -> None:
        self._noted = time.monotonic()
        total = {"total": self._total} if self._total < math.inf else {}
        if self.is_writer:
            at = {"step": state.step, "samples": state.samples, **total}
            write_status(self.out, status, **at, **fields)

    def _remember(self, event: str, state: TrainState, **fields: Any) -> None:
        if self.is_writer:
            append_history(self.out, event, step=state.step, samples=state.samples, **fields)


@contextmanager
def open_run(
    out: str | Path, config: Mapping[str, Any], *, trackers: Sequence[str | Tracker] | None = None
) -> Iterator[Run]:
    """Hold a run directory for one run, and write how the run ended.

    Writing to stdout and stderr cannot fail meanwhile: if the display goes away (`| head`, a closed
    terminal, a full disk), the run goes on. A rank that has ended waits up to five seconds for the
    others before it destroys its process groups; those that were there before, as Ray's, stay.

    Args:
        out: The run directory, a path or a URL such as ``s3://bucket/run``; made if it does not
            exist. A second run into it is refused.
        config: The resolved configuration, for ``config.json``.
        trackers: Take the rows of metrics too: ``"tensorboard"``, ``"wandb"``, or any callable
            ``(step, values) -> None`` with ``close()``; by default those that the
            configuration names under ``"trackers"``.

    Yields:
        The ``Run``. Call its ``start`` when set-up is done and ``end`` when the loop has ended.

    Raises:
        SystemExit: With code 2 if the library refused what set-up asked for (its message, without
            a traceback), with code 1 if the directory is in use. With code 0 if a signal of
            ``StopSignal``, Ctrl-C too, came before ``start``, when there is nothing to save, and
            with code 1 if a stop could not wait for the step's end; ``status.json`` says "stopped"
            then. All other errors are raised again after ``status.json`` says "failed" and why,
            unless ``end`` was called.
    """
    with ExitStack() as stack:
        stack.enter_context(steady_streams())
        is_writer = True
        try:
            is_writer = process_rank() == 0
            where = location_of("out", out)
            url = None if isinstance(where, Path) else where
            if url is not None:  # on all ranks: rank 0 alone writes there
                entries_below(*fs_of(url))
            folder = where if isinstance(where, Path) else working_folder(where)
            check_directory(folder)
            made = make_trackers(
                config.get("trackers", ()) if trackers is None else trackers, folder
            )
            held = hold_run(folder, url, is_writer=is_writer)
            attempt, mirror = stack.enter_context(held)
        except RunLockedError as error:
            _exit(error, code=1, is_writer=is_writer)
        except (OSError, ValueError, ImportError) as error:
            _exit(error, code=2, is_writer=is_writer)
        run = Run(folder, config, is_writer, made, url, attempt, mirror)
        stack.callback(run._write_page)  # last, when no rank waits any more
        stack.enter_context(_closing(run))
        stack.enter_context(_stopping(run))
        yield run


@contextmanager
def _stopping(run: Run) -> Iterator[None]:
    """Handle stop signals until a ``StopSignal`` does; only the main thread may."""

    def on_signal(number: int, _frame: object) -> None:
        if run._log is None:
            raise StoppedError(f"{signal.Signals(number).name} during set-up")
        is_interrupt = number == signal.SIGINT  # after the loop
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
        signal.raise_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    heard = [number for number in STOP_SIGNALS if is_main and not is_ignored(number)]
    before = {number: signal.signal(number, on_signal) for number in heard}
    try:
        yield
    finally:
        put_back(before, on_signal)


@contextmanager
def _closing(run: Run) -> Iterator[None]:
    is_ours = not dist.is_initialized()  # Ray made its group before and uses it afterwards
    try:
        yield
        wait_for_saves(run._saves)
        wait_for_saves()  # saves of other states than the run's
        # gloo aborts a process that still sends to one whose groups are destroyed.
        with suppress(Exception):
            barrier("the run has ended", timeout_s=PATIENCE_S)
        if run._is_stopped and run.attempt.facts and is_left(run._stop and run._stop.reason):
            raise SystemExit(1)  # for torchrun 0 is the end of the whole run
    except StoppedError as stop:
        join_saves()  # a second failure is in the log
        run._give_up(str(stop))
        raise SystemExit(0 if run._log is None else 1) from None
    except BaseException as error:
        join_saves()
        if run._log is None and run.attempt.has_run and isinstance(error, RankCountError):
            run._pause(error)
        run._fail(f"{type(error).__name__}: {error}", is_lost=is_lost(error))
        if isinstance(error, RunLockedError):  # the lease was taken over
            _exit(error, code=1, is_writer=run.is_writer)
        if run._log is None and isinstance(error, USAGE_ERRORS) and _is_refusal(error):
            _exit(error, code=2, is_writer=run.is_writer)
        raise
    finally:
        if is_ours:
            shutdown()


def every(steps: int, state: TrainState, *, last: int | None = None) -> bool:
    """Whether an action of every ``steps`` steps is to be taken after the last step.

    Before the first step nothing is.

    Args:
        steps: Steps from one time to the next; 0 is never.
        state: The state after the last step.
        last: The run's last step, after which, or any later one, it is to be taken as well.

    Raises:
        TypeError: If ``steps`` is not an integer.
        ValueError: If ``steps`` is negative.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1)
        >>> state = TrainState.create(model, torch.optim.SGD(model.parameters()))
        >>> every(1, state), every(0, state), every(0, state, last=0)
        (False, False, True)
    """
    check_integers(every=(steps, 0))
    is_last = last is not None and state.step >= last
    return is_last or (steps > 0 and state.step > 0 and state.step % steps == 0)


def _is_refusal(error: BaseException) -> bool:
    """Whether the library raised an error; a recipe's own errors keep their traceback."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    while frames and (
        (frames[-1].startswith(STDLIB) and "site-packages" not in frames[-1])
        or frames[-1].endswith(VALIDATORS)
    ):
        frames.pop()  # raised there: missing files, fields that do not fit
    # attrs names generated code after its class: <attrs generated methods forgekit...>.
    return bool(frames) and (is_library(frames[-1]) or " forgekit." in frames[-1])


def _exit(error: BaseException, *, code: int, is_writer: bool) -> NoReturn:
    if is_writer:
        tell(f"error: {error}")
    end_launcher()
    raise SystemExit(code) from None
