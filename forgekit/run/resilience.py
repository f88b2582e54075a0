"""Stopping cleanly, and one process per run directory.

A run must not be stopped by one rank alone: the others would wait for it in the next collective.
So a signal only sets a flag, the flag becomes a vote inside the step's one collective, and every
rank hears the same sum. Reading that sum at once would make the host wait for the device in each
step; ``StopSignal.requested`` therefore reads the sum of two steps ago, which has long arrived.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any, Self

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from forgekit.data.corpus.atomic import UNSUPPORTED

__all__ = [
    "HostCopy",
    "RunLockedError",
    "StopSignal",
    "append_lines",
    "lock_run",
    "overwrite",
    "write_atomic",
    "write_status",
]

log = logging.getLogger("forgekit")

LAG = 2
"""Steps between hearing the votes and reading them; the device has finished the older step."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
NUDGE_S = 0.25
DATA_PACKAGE = "forgekit.data."
STATUSES = ("running", "finished", "stopped", "failed")


class RunLockedError(RuntimeError):
    """Another process writes into this run directory."""


class StoppedError(BaseException):
    """A run was asked to stop where it cannot go on to a step's end; nobody should catch it."""


class StopSignal:
    """Turn signals, a time budget or a stop file into one decision of all ranks.

    Handlers are installed at once, so that ``make_step(..., stop=StopSignal())`` is complete;
    ``with`` (or ``close``) puts the previous ones back. Give each rank its own: a signal that
    reaches one of them stops all, after the same step. A second Ctrl-C interrupts at once.

    Args:
        signals: What to listen to; empty for none. SIGHUP comes from a terminal that was closed,
            and stays ignored under nohup.
        budget_s: Ask to stop this many seconds after construction.
        file: Ask to stop once this path exists.
        watch_parent: Ask to stop when the process that started this one has died, so that workers
            of a killed launcher do not live on. None: only under torchrun.
        patience_s: Seconds after a signal for which data are waited for: a loader that is stuck
            never reaches the vote. The run then ends with its last checkpoint, on all ranks, for
            the others cannot finish the step either. torchrun kills after 30.

    Raises:
        ValueError: If there are signals to listen to and this is not the main thread, or if
            ``patience_s`` is negative.

    Examples:
        >>> import torch
        >>> stop = StopSignal(signals=())
        >>> stop.request("enough")
        >>> for _ in range(3):  # a step votes, reduces the votes over the ranks, and hears the sum
        ...     stop.hear(torch.tensor(stop.vote()))
        >>> stop.requested, stop.reason
        (True, 'enough')
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = STOP_SIGNALS,
        *,
        budget_s: float | None = None,
        file: str | os.PathLike[str] | None = None,
        watch_parent: bool | None = None,
        patience_s: float = 20.0,
    ) -> None:
        if not patience_s >= 0:
            raise ValueError(f"patience_s is {patience_s}; it must be 0 seconds or more.")
        self._started = time.monotonic()
        self._budget_s = budget_s
        self._file = None if file is None else Path(file)
        if watch_parent is None:
            watch_parent = "TORCHELASTIC_RUN_ID" in os.environ
        self._parent = os.getppid() if watch_parent else None
        self._reason: str | None = None
        self._interrupted = False
        self._agreed = False
        self._heard: deque[HostCopy] = deque(maxlen=LAG + 1)
        self._patience_s = patience_s
        self._signalled: float | None = None
        self._closed = threading.Event()
        self._nudging = threading.RLock()
        self._waiting_since: float | None = None
        self._nudge_by: int | None = None
        self._previous = self._install(signals)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        if self._is_late and isinstance(error, RuntimeError) and _is_of_ranks(error):
            raise StoppedError(f"{self._reason}, and another rank has given up") from error

    def close(self) -> None:
        """Put back the handlers that were there before, where ours are still in place."""
        with self._nudging:  # no nudge is on its way to the handlers that were there before
            self._closed.set()
        put_back(self._previous, self._on_signal)
        self._previous = {}

    def request(self, reason: str) -> None:
        """Make this process vote for a stop from the next step on; the first reason is kept."""
        self._reason = self._reason or reason

    def vote(self) -> float:
        """Return 1.0 if this process wants to stop, else 0.0; called before the reduction.

        Looks at the clock, the stop file and the parent process only while there is no reason yet.
        """
        self._waiting_since = None
        if self._reason is None:
            self._reason = self._look()
        return 0.0 if self._reason is None else 1.0

    def hear(self, votes: Tensor) -> None:
        """Take the votes of all ranks, without waiting for them.

        Args:
            votes: ``[]``, the sum over all ranks, on the device.
        """
        self._heard.append(HostCopy.start(votes))

    @property
    def requested(self) -> bool:
        """Whether all ranks stop here: the votes of two steps ago, so that nothing waits.

        Read it between steps, at the same step on every rank. Once True, it stays True.
        """
        if not self._agreed and len(self._heard) > LAG:
            self._agreed = self._heard[0].read() > 0
        return self._agreed

    @property
    def reason(self) -> str | None:
        """Why this process voted for a stop, "another rank" if only others did, else None."""
        if self._reason is None and self._agreed:
            return "another rank"
        return self._reason

    def _look(self) -> str | None:
        if self._budget_s is not None and time.monotonic() - self._started >= self._budget_s:
            return f"budget {self._budget_s:g} s"
        if self._file is not None and self._file.exists():
            return f"stop file {self._file}"
        if self._parent is not None and os.getppid() != self._parent:
            return "launcher is gone"
        return None

    def _install(self, signals: Sequence[signal.Signals]) -> dict[signal.Signals, Any]:
        if signals and threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"StopSignal was built in thread {threading.current_thread().name!r}; Python lets "
                "only the main thread handle signals. Build it there, or pass signals=()."
            )
        heard = [number for number in signals if not is_ignored(number)]
        return {number: signal.signal(number, self._on_signal) for number in heard}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == self._nudge_by:
            self._nudge_by = None
            self._give_up_waiting(frame)
            return
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.request(signal.Signals(number).name)
        if self._signalled is None:
            self._signalled = time.monotonic()
            # By another signal than Ctrl-C, the second of which is not to be taken for ours.
            others = [other for other in self._previous if other != signal.SIGINT]
            by = next(iter(others), number)
            threading.Thread(target=self._nudge, args=(by,), daemon=True).start()

    def _give_up_waiting(self, frame: FrameType | None) -> None:
        """Raise once the main thread has waited for the same data long enough."""
        if not _waits_for_data(frame):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()
        elif time.monotonic() - self._waiting_since >= self._patience_s:
            self.close()
            raise StoppedError(f"{self._reason} while waiting for data")

    @property
    def _is_late(self) -> bool:
        """Whether a signal came so long ago that a step should have ended since."""
        return (
            self._signalled is not None and time.monotonic() - self._signalled >= self._patience_s
        )

    def _nudge(self, number: int) -> None:
        """Wake the main thread now and then: only there can waiting be interrupted."""
        while not self._closed.wait(NUDGE_S):
            with self._nudging:
                if self._closed.is_set():  # since the time-out of the wait
                    return
                self._nudge_by = number
                signal.pthread_kill(threading.main_thread().ident or 0, number)


def is_ignored(number: signal.Signals) -> bool:
    """Whether a signal was switched off from outside: nohup lets a run outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def put_back(previous: Mapping[signal.Signals, Any], ours: Callable[..., None]) -> None:
    """Install former signal handlers where ours are still in place."""
    for number, handler in previous.items():
        if signal.getsignal(number) == ours:
            signal.signal(number, handler or signal.SIG_DFL)


def _waits_for_data(frame: FrameType | None) -> bool:
    """Whether the main thread is inside the data package."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(DATA_PACKAGE):
            return True
        frame = frame.f_back
    return False


def _is_of_ranks(error: BaseException | None) -> bool:
    """Whether a collective failed; gloo raises plain errors that name its files."""
    while error is not None:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            return True
        error = error.__cause__  # of what says where the ranks were
    return False


@attrs.frozen
class HostCopy:
    """A 0-d tensor on its way to the host, and the event after which it has arrived."""

    value: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def start(cls, value: Tensor) -> Self:
        """Start the copy; nothing waits for it."""
        # An asynchronous copy from CUDA goes to pinned memory; on CPU this is a plain copy, since
        # the caller may reuse its tensor before it is read here.
        host = value.detach().to("cpu", non_blocking=True, copy=True)
        if not value.is_cuda:
            return cls(host, None)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(value.device))
        return cls(host, arrived)

    def read(self) -> float:
        """Wait for the copy and return the number."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return float(self.value)


@contextmanager
def lock_run(out: str | os.PathLike[str], *, is_writer: bool = True) -> Iterator[None]:
    """Hold the run directory for this process; a second run into it is refused at once.

    The system drops the lock when the process dies, however it dies, so a lock that is left behind
    cannot block a restart. Workers that outlived their launcher do hold it, which is the point:
    they still write.

    Args:
        out: The run directory; made if it does not exist.
        is_writer: False on all ranks but the first, which then hold nothing.

    Raises:
        RunLockedError: If another process holds it.
    """
    if not is_writer:
        yield
        return
    path = Path(out) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunLockedError(
                f"{out} is in use by {file.read() or 'another process'}. Wait until that run has "
                "ended, stop it, or choose another run directory."
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            log.warning(
                "%s cannot be locked (%s): see to it yourself that no second run writes there",
                *(out, error.strerror),
            )
        file.truncate(0)
        file.write(f"pid {os.getpid()} on host {socket.gethostname()}")
        file.flush()
        yield


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that readers, and a crash, find the old content or the new, never a part."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_status(
    out: str | os.PathLike[str], status: str, *, is_writer: bool = True, **fields: Any
) -> None:
    """Write ``status.json``: how a run ended, for scripts that cannot trust exit codes.

    torchrun turns each exit code into 1, a clean stop included. Where no new file can be written,
    as on a full disk, the old one is overwritten: better torn by a crash than out of date.

    Args:
        out: The run directory; made if it does not exist.
        status: "running", "finished", "stopped" or "failed".
        is_writer: False on all ranks but the first, which then write nothing.
        **fields: What else to say, for example ``step``, ``samples``, ``reason``. ``time`` (UTC)
            is added.

    Raises:
        ValueError: If ``status`` is none of the four.
    """
    if status not in STATUSES:
        raise ValueError(f"status {status!r} is not known; it is one of {', '.join(STATUSES)}.")
    if not is_writer:
        return
    Path(out).mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    content = json.dumps({"status": status, "time": now} | fields, indent=2, default=str)
    path, encoded = Path(out) / "status.json", f"{content}\n".encode()
    try:
        write_atomic(path, encoded)
    except OSError:
        if not path.is_file():
            raise
        with path.open("r+b", buffering=0) as file:
            overwrite(file, 0, encoded, file.read())


def overwrite(file: FileIO, start: int, new: bytes, old: bytes = b"") -> None:
    """Write the end of a file anew: all of ``new``, or what was there, never a part.

    A full disk takes the first bytes of a write and refuses the rest. What was written then goes
    away again, so that the next writer does not begin in the midst of a line.

    Args:
        file: Opened unbuffered for reading and writing.
        start: Where the end begins.
        new: What is to stand there.
        old: What stands there; it is put back if ``new`` does not fit.

    Raises:
        OSError: If ``new`` could not be written.
    """
    try:
        _write_all(file, start, new)
    except OSError:
        _write_all(file, start, old)
        raise


def append_lines(path: str | os.PathLike[str], lines: Sequence[str]) -> None:
    """Append lines and wait until they are durable; all of them or none, after whole lines only."""
    Path(path).touch()
    with open(path, "r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        is_torn = file.read(1) not in (b"", b"\n")  # by a crash, or by a version before this one
        content = "".join([*(["\n"] if is_torn else []), *(f"{line}\n" for line in lines)])
        overwrite(file, end, content.encode())
        os.fsync(file.fileno())


def _write_all(file: FileIO, start: int, content: bytes) -> None:
    file.seek(start)
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    file.truncate()
