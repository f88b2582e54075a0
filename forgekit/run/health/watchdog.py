"""A thread that watches the main thread of its rank and speaks for it.

When the main thread stands still, or when another rank raises an alarm, it writes down where that
is and tells the others, also for a rank that will never run its own code again.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from forgekit.run.durable_files import write_atomic
from forgekit.run.health.rendezvous import HangError, Meeting, name_ranks

__all__ = ["Watch"]

TICK_S = 0.05
"""Between two looks at the main thread; each takes some microseconds."""
POLL_S = 1.0
"""Between two looks for an alarm of another rank."""
GRACE_S = 2.5
"""Until every rank that can still speak has answered an alarm."""
STUCK = 0.75
"""Of the time-out without a step, then a rank says where it is: before the collectives give up."""

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_RECIPES = _PACKAGE + "recipes" + os.sep
_LIBRARIES = (_PACKAGE, _TORCH, str(Path(os.__file__).parent) + os.sep)
_WAITING_FILES = (
    "distributed_c10d.py",
    "_functional_collectives.py",
    "_fsdp_collectives.py",
    "_fsdp_param_group.py",
    _PACKAGE + os.path.join("parallel", "pipeline", "stages.py"),
    _PACKAGE + os.path.join("run", "health", "rendezvous.py"),
)
_LOST = re.compile(r"gloo|NCCL|[Tt]imed out|[Tt]imeout|Connection (closed|reset)|pair closure")
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")

T = TypeVar("T")

_log = logging.getLogger("forgekit")


class Watch:
    """A thread that watches the main thread of its rank and speaks for it."""

    def __init__(self, folder: Path, meeting: Meeting, timeout_s: float) -> None:
        self._folder, self._meeting, self._rank = folder, meeting, meeting.rank
        # A connection of its own: waiting on the other one blocks whoever shares it.
        self._store = meeting.store.clone()
        self._main = threading.get_ident()
        self._step: int | None = None
        self._timeout_s = timeout_s
        self._since = time.monotonic()
        self._looks = self._waits = self._alarms = 0
        self._number = self._store.add(f"health/count/{self._rank}", 1)
        self._spoke_at = self._dumped_at = 0.0
        self._text = ""
        self._over = threading.Event()
        self._say("runs", "has not said where it is")
        self._alarms = self._store.add("alarms", 0)
        self._thread = threading.Thread(target=self._run, name="forgekit health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it has nothing to do that takes long."""
        self._over.set()
        self._thread.join(timeout=GRACE_S)

    def beat(self, step: int, timeout_s: float) -> None:
        """Take note that the main thread has ended a step."""
        self._step, self._timeout_s, self._since = step, timeout_s, time.monotonic()

    def own_share(self) -> tuple[float, int]:
        """Share of the looks since the last call at which the main thread did not wait."""
        looks, waits = self._looks, self._waits
        self._looks = self._waits = 0
        return (1 - waits / looks if looks else 1.0), looks

    def last_words(self, error: BaseException | None) -> None:
        """Tell the others why this rank ends; raise a better error where others are the reason."""
        self.stop()
        if error is None:  # early, for those who find themselves alone
            self._say("failed", f"left the loop {self._where}", is_final=True)
            return
        is_lost = _is_lost(error)
        if isinstance(error, HangError) or is_lost:
            self._alarm()
            self._say("waits", "waited for others", is_final=True)
        else:
            self._say("failed", f"failed: {type(error).__name__}: {error}", is_final=True)
        if self._dumped_at != self._since:  # else the stacks are there, from before the error
            self._dump()
        if is_lost:
            raise HangError(self._story(error)) from error

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(TICK_S):
            self._looks += 1
            self._waits += _is_waiting(sys._current_frames().get(self._main))
            now = time.monotonic()
            if self._since != self._spoke_at and now - self._since > STUCK * self._timeout_s:
                self._spoke_at = self._since
                self._alarm()
                self._say_where()
                _log.warning("rank %d %s; see %s", self._rank, self._text, self._folder)
            if now - looked > POLL_S:
                looked = now
                self._answer()

    def _alarm(self) -> None:
        """Make every rank say where it is."""
        self._alarms = self._ask(lambda: self._store.add("alarms", 1)) or self._alarms

    def _answer(self) -> None:
        """Say where this rank is if another one has raised an alarm."""
        alarms = self._ask(lambda: self._store.add("alarms", 0)) or 0
        if alarms > self._alarms:
            self._alarms = alarms
            self._say_where()

    def _say_where(self) -> None:
        frame = sys._current_frames().get(self._main)
        seconds = time.monotonic() - self._since
        is_waiting = _is_waiting(frame)
        verb = "waits for others at" if is_waiting else "is at"
        text = f"{verb} {_line(frame)}, {seconds:.0f} s {self._where}"
        self._say("waits" if is_waiting else "runs", text)
        self._dump()

    def _say(self, what: str, text: str, *, is_final: bool = False) -> None:
        self._text = text
        word = {"what": what, "text": text, "alarm": self._alarms, "is_final": is_final}
        self._ask(lambda: self._store.set(f"said/{self._rank}", json.dumps(word)))

    def _dump(self) -> None:
        self._dumped_at = self._since
        tag = self._ask(lambda: self._meeting.on(self._store).read(f"barrier/last/{self._rank}"))
        _dump(self._folder, self._rank, {"step": self._step, "barrier": tag, "state": self._text})

    def _story(self, error: BaseException) -> str:
        """Say where all ranks were: one rank asks for it and tells the others."""
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        story = self._ask(self._shared_story) or "they cannot be asked, the store is gone"
        return (
            f"{self._where} a collective lost other ranks: {story}. Stacks and the last "
            f"collectives of each rank are in {self._folder}. What it said: {reason}"
        )

    def _shared_story(self) -> str:
        key = f"health/{self._number}/story"  # of this watch, should there be another one later
        teller = self._store.compare_set(f"{key}/teller", "", str(self._rank)).decode()
        if teller == str(self._rank):
            time.sleep(GRACE_S)
            meeting = self._meeting.on(self._store)
            words = {rank: meeting.read(f"said/{rank}") for rank in meeting.members}
            self._store.set(key, _tell(words, self._alarms))
        self._store.wait([key], timedelta(seconds=2 * GRACE_S))
        return self._store.get(key).decode()

    @property
    def _where(self) -> str:
        return "before the first step" if self._step is None else f"after step {self._step}"

    def _ask(self, function: Callable[[], T]) -> T | None:
        """Use the store; None if it is gone, for this thread has nobody to raise to."""
        try:
            return function()
        except RuntimeError as error:
            _log.debug("the store of rank %d does not answer: %s", self._rank, error)
            return None


def _is_lost(error: BaseException) -> bool:
    """Whether a collective failed because of another rank."""
    if isinstance(error, HangError) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread waits for other ranks or for its device, by the innermost line it is at.

    It errs towards work: an unknown kind of waiting makes all ranks look equally busy.
    """
    if frame is None:
        return False
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file.endswith(_WAITING_FILES):
        return True
    return file.startswith((_TORCH, _PACKAGE)) and ("wait" in name or "synchronize" in name)


def _line(frame: FrameType | None) -> str:
    """The innermost line that is the user's own, else the innermost."""
    at = frame
    while at is not None and not _is_own(at.f_code.co_filename):
        at = at.f_back
    at = at or frame
    if at is None:
        return "its end"
    return f"{Path(at.f_code.co_filename).name}:{at.f_lineno} in {at.f_code.co_name}"


def _is_own(file: str) -> bool:
    return file.startswith(_RECIPES) or not file.startswith((*_LIBRARIES, "<"))


def _tell(words: Mapping[int, Mapping[str, Any] | None], alarms: int) -> str:
    """Say in one line where the ranks were, those that may be the reason first."""
    silent = "did not answer: its process is gone, or stands still outside Python"
    told = {
        rank: (word["what"], word["text"])
        if word and (word["is_final"] or word["alarm"] >= alarms)
        else ("silent", silent)
        for rank, word in words.items()
    }
    parts = [
        f"rank {rank} {text}"
        for kind in ("failed", "runs", "silent")
        for rank, (what, text) in told.items()
        if what == kind
    ]
    waiting = [rank for rank, (what, _) in told.items() if what == "waits"]
    return "; ".join([*parts, *([f"{name_ranks(waiting)} waited for others"] if waiting else [])])


def _dump(folder: Path, rank: int, fields: Mapping[str, Any]) -> None:
    """Write the stacks of this process and what it last did with others; never raise."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time": now, **fields}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank_{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        content = json.dumps(about | {"collectives": _collectives()}, indent=1)
        write_atomic(folder / f"rank_{rank}.json", f"{content}\n".encode())
    except Exception as error:
        _log.warning("rank %d cannot write down where it is: %s", rank, error)


def _collectives() -> Any:
    """What torch's flight recorder has; None where torch was built without one."""
    module = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    dump = next((getattr(module, name) for name in _DUMPS if hasattr(module, name)), None)
    return None if dump is None else json.loads(dump())
