"""Clean stops: signals, time budgets and other reasons as one decision of all ranks.

A run must not be stopped by one rank alone: the others would wait for it in the next collective.
So a signal only sets a flag, the flag becomes a vote inside the step's one collective, and every
rank hears the same sum. Reading that sum at once would make the host wait for the device in each
step; ``StopSignal.requested`` therefore reads the sum of two steps ago, which has long arrived.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from torch import Tensor

from forgekit.run.rendezvous import is_lost
from forgekit.tensors import HostCopy

LAG = 2
"""Steps between receiving votes and reading them; the device has finished the older step."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LOOK_S = 0.25
"""After a signal: interval of checks whether the main thread waits for data."""
DATA_PACKAGE = "forgekit.data."
ASK_S = 1.0
"""Interval of calls of ``also``."""

_log = logging.getLogger("forgekit")


class StoppedError(BaseException):
    """A run was asked to stop and cannot reach the end of its step; not to be caught."""


class StopSignal:
    """Turn signals, a time budget, a stop file or own reasons into a decision of all ranks.

    Handlers are installed at once, so that ``make_step(..., stop=StopSignal())`` is complete;
    ``with`` (or ``close``) puts the previous ones back. Give each rank its own: a signal that
    reaches one of them stops all, after the same step. A second Ctrl-C interrupts at once. From the
    first signal on it uses SIGALRM and its timer.

    Args:
        signals: What to listen to; empty for none. By default SIGTERM, SIGUSR1, SIGINT and SIGHUP,
            which comes from a terminal that was closed and stays ignored under nohup; none in a
            thread, as Ray runs a training function in.
        budget_s: Ask to stop this many seconds after construction.
        file: Ask to stop once this path exists.
        also: Asked about once a second whether to stop, such as for a cloud's notice of preemption:
            a text says why, True is enough, anything false goes on. It is asked in a thread, so
            that no step waits for it; if it raises, a warning says so, once, and the run goes on
            and asks again. One rank that knows is enough. A function in which ranks
            wait for each other, such as Ray's ``get_preemption_info``, is given to all of them.
        patience_s: Seconds that data may take at a time after a signal: a loader that is stuck
            never reaches the next vote. The run then ends with its last
            checkpoint, on all ranks, because the others cannot finish the step either. torchrun
            kills after 30.

    Raises:
        ValueError: If there are signals to listen to and this is not the main thread.

    Examples:
        >>> import torch
        >>> stop = StopSignal(signals=())
        >>> stop.request("enough")
        >>> for _ in range(3):  # a step votes, reduces the votes over the ranks, and hears the sum
        ...     stop.receive(torch.tensor(stop.vote()))
        >>> stop.requested, stop.reason
        (True, 'enough')
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] | None = None,
        *,
        budget_s: float | None = None,
        file: str | os.PathLike[str] | None = None,
        also: Callable[[], object] | None = None,
        patience_s: float = 20.0,
    ) -> None:
        self._started = time.monotonic()
        self._budget_s = budget_s
        self._file = None if file is None else Path(file)
        # Workers of a torchrun that was killed must not live on.
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._reason: str | None = None
        self._interrupted = False
        self._agreed = False
        self._heard: deque[HostCopy] = deque(maxlen=LAG + 1)
        self._patience_s = patience_s
        self._signalled: float | None = None  # time of the first signal
        self._waiting: float | None = None  # since when every check has found a wait for data
        if signals is None:  # Python allows handlers in the main thread only
            is_main = threading.current_thread() is threading.main_thread()
            signals = STOP_SIGNALS if is_main else ()
        self._previous: dict[int, Any] = {
            number: signal.signal(number, self._on_signal)
            for number in signals
            if not is_ignored(number)
        }
        self._closed, self._has_warned = threading.Event(), False
        if also is not None:
            # A daemon: a call that never returns must not keep the process alive.
            threading.Thread(target=self._ask, args=(also,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
        is_late = self._signalled and time.monotonic() - self._signalled >= self._patience_s
        if is_late and is_lost(error):
            raise StoppedError(f"{self._reason}, and another rank has given up") from error

    def close(self) -> None:
        """Restore the previous signal handlers, where ours are still installed."""
        self._closed.set()
        if signal.SIGALRM in self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0)
            put_back({signal.SIGALRM: self._previous.pop(signal.SIGALRM)}, self._look_at_data)
        put_back(self._previous, self._on_signal)
        self._previous = {}

    def request(self, reason: str) -> None:
        """Vote for a stop from the next step on; the first reason is kept."""
        self._reason = self._reason or reason

    def vote(self) -> float:
        """Return this process's vote, 1.0 to stop, else 0.0; called before the reduction.

        Looks at the clock, the stop file and the parent process only while there is no reason yet.
        """
        if signal.SIGALRM in self._previous:  # a step has its data, so patience begins anew
            self._set_alarm()
        if self._reason is None:
            self._reason = self._look()
        return 0.0 if self._reason is None else 1.0

    def receive(self, votes: Tensor) -> None:
        """Take the votes of all ranks, without waiting for them.

        Args:
            votes: ``[]``, the sum over all ranks, on the device.
        """
        self._heard.append(HostCopy(votes))

    @property
    def requested(self) -> bool:
        """Whether all ranks stop here, by the votes of two steps ago, so that the host never waits.

        Read it between steps, at the same step on every rank. Once True, it stays True.
        """
        if not self._agreed and len(self._heard) > LAG:
            self._agreed = float(self._heard[0].read()) > 0
        return self._agreed

    def state_dict(self) -> dict[str, Any]:
        """Return the received votes, for a joining replica group."""
        return {"agreed": self._agreed, "heard": [each.read() for each in self._heard]}

    def load_state_dict(self, heard: Mapping[str, Any]) -> None:
        """Load the votes that another group received; this process's own vote stays."""
        self._agreed = heard["agreed"]
        self._heard = deque(map(HostCopy, heard["heard"]), maxlen=LAG + 1)

    @property
    def reason(self) -> str | None:
        """Reason of this process's vote; "another rank" if only others voted, else None."""
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

    def _ask(self, also: Callable[[], object]) -> None:
        """Call ``also`` until it returns a reason; the body of a thread."""
        name = getattr(also, "__name__", "also")
        while self._reason is None and not self._closed.is_set():
            try:
                if answer := also():  # the truth value of an array raises, for one
                    self.request(answer if isinstance(answer, str) else name)
            except BaseException as error:  # a SystemExit would end the thread silently
                self._warn(f"raised {type(error).__name__}: {error}")
            self._closed.wait(ASK_S)

    def _warn(self, problem: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("StopSignal(also=...) %s; the run goes on, and it is asked again", problem)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.request(signal.Signals(number).name)
        if self._signalled is None:
            self._signalled = time.monotonic()
            # Only a signal handler can interrupt the main thread's wait for data.
            self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._look_at_data)
            self._set_alarm()
            atexit.register(self.close)  # then Python lets an alarm end the process

    def _set_alarm(self) -> None:
        """Schedule the next check of the main thread."""
        self._waiting = None
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)

    def _look_at_data(self, _number: int, frame: FrameType | None) -> None:
        """Raise if the main thread has waited for data at every check since patience began."""
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith(DATA_PACKAGE):
                self._waiting = self._waiting or time.monotonic()
                if time.monotonic() - self._waiting < self._patience_s:
                    return
                self.close()
                raise StoppedError(f"{self._reason} while waiting for data")
            frame = frame.f_back
        self._waiting = None  # a long step may read in between


def is_ignored(number: signal.Signals) -> bool:
    """Whether a signal was ignored from outside, as nohup does."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def put_back(previous: Mapping[Any, Any], ours: Callable[..., None]) -> None:
    """Restore former signal handlers where ours are still installed."""
    for number, handler in previous.items():
        if signal.getsignal(number) == ours:
            signal.signal(number, handler or signal.SIG_DFL)
