"""A thread of each rank that watches its main thread and reports where it is.

When no step ends for too long, or when another rank raises an alarm, it writes down where the main
thread is and tells the others, even if the main thread never runs Python code again.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from forgekit.environment import PACKAGE, RECIPES
from forgekit.files import write_atomic
from forgekit.run.health.rendezvous import HangError, Meeting, name_ranks

POLL_S = 1.0
"""Between two looks at the clock and for an alarm of another rank."""
GRACE_S = 2.5
"""Until every rank that can still speak has answered an alarm."""
STUCK = 0.75
"""Of the time-out without a step, then a rank says where it is: before the collectives give up."""

_LIBRARIES = (PACKAGE, str(Path(torch.__file__).parent), str(Path(os.__file__).parent), "<")
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")

T = TypeVar("T")

_log = logging.getLogger("forgekit")


class Watchdog:
    """A thread that watches the main thread of its rank and reports where it is.

    Each rank keeps one word in the store, ``said/<rank>``: its ``text``, the ``alarm`` that it
    answers, whether it ``ended`` (1 for the first rank that did; 0 while it runs), and whether a
    failed collective may be the reason (``is_lost``).
    """

    def __init__(self, folder: Path, meeting: Meeting, timeout_s: float) -> None:
        self._folder, self._rank = folder, meeting.rank
        # A connection of its own: waiting on the other one blocks whoever shares it.
        self._meeting = attrs.evolve(meeting, store=meeting.store.clone())
        self._store = self._meeting.store
        self._main = threading.get_ident()
        self._step: int | None = None
        self._timeout_s = timeout_s
        self._since = time.monotonic()
        self._alarms = 0
        self._number = self._store.add(f"health/count/{self._rank}", 1)
        self._spoke_at = self._dumped_at = 0.0
        self._text = ""
        self._over = threading.Event()
        self._say("has not said where it is")
        self._alarms = self._store.add("alarms", 0)
        self._thread = threading.Thread(target=self._run, name="forgekit health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._thread.join(timeout=GRACE_S)

    def beat(self, step: int, timeout_s: float) -> None:
        """Record that the main thread has ended a step."""
        self._step, self._timeout_s, self._since = step, timeout_s, time.monotonic()

    def report_end(self, error: BaseException | None) -> None:
        """Tell the others why this rank ends; raise a better error where others are the reason."""
        self.stop()
        ended = self._ask(lambda: self._store.add(f"health/{self._number}/ended", 1)) or 1
        if error is None:  # early, for those who find themselves alone
            self._say(f"left the loop {self._where}", ended=ended)
            return
        # What gloo raises for a lost connection has no class of its own. Errors of other classes
        # are never the other ranks' fault.
        is_lost = type(error) is RuntimeError or isinstance(error, dist.DistError)
        late = time.monotonic() - self._since >= self._timeout_s
        text = textwrap.shorten(f"failed: {type(error).__name__}: {error}", 200)
        if is_lost or isinstance(error, HangError):
            self._alarm()
        self._say(text, ended=ended, is_lost=is_lost or isinstance(error, HangError))
        if self._dumped_at != self._since:  # else the stacks are there, from before the error
            _dump_stacks(self._folder, self._rank)
            self._dump()
        story = self._ask(self._shared_story) if is_lost else None
        if story and (late or story["silent"] or story["first"] != text):
            raise HangError(
                f"the ranks lost each other {self._where}: {story['text']}. Stacks and the last "
                f"collectives of each rank are in {self._folder}."
            ) from error

    def _run(self) -> None:
        while not self._over.wait(min(POLL_S, self._timeout_s / 8)):
            stuck = time.monotonic() - self._since > STUCK * self._timeout_s
            if stuck and self._since != self._spoke_at:
                self._spoke_at = self._since
                _dump_stacks(self._folder, self._rank)  # first: the main thread may go on
                self._alarm()
                self._say_where()
                _log.warning("rank %d %s; see %s", self._rank, self._text, self._folder)
            alarms = self._ask(lambda: self._store.add("alarms", 0)) or 0
            if alarms > self._alarms:  # of another rank
                self._alarms = alarms
                _dump_stacks(self._folder, self._rank)
                self._say_where()

    def _alarm(self) -> None:
        """Make every rank say where it is."""
        self._alarms = self._ask(lambda: self._store.add("alarms", 1)) or self._alarms

    def _say_where(self) -> None:
        self._say(f"is at {_line(sys._current_frames().get(self._main))}, {self._where}")
        self._dump()

    def _say(self, text: str, *, ended: int = 0, is_lost: bool = False) -> None:
        self._text = text
        word = {"text": text, "alarm": self._alarms, "ended": ended, "is_lost": is_lost}
        self._ask(lambda: self._store.set(f"said/{self._rank}", json.dumps(word)))

    def _dump(self) -> None:
        self._dumped_at = self._since
        tag = self._ask(lambda: self._meeting.read(f"barrier/last/{self._rank}"))
        _dump(self._folder, self._rank, {"step": self._step, "barrier": tag, "state": self._text})

    def _shared_story(self) -> dict[str, Any]:
        """Say where all ranks are: one of them asks the others, and all read its answer."""
        # Each rank asking each other one would be a million messages on a thousand ranks.
        key = f"health/{self._number}/story"
        teller = self._store.compare_set(f"{key}/teller", "", str(self._rank)).decode()
        if teller == str(self._rank):
            time.sleep(GRACE_S)
            words = {rank: self._meeting.read(f"said/{rank}") for rank in self._meeting.members}
            self._store.set(key, json.dumps(_tell(words, self._alarms)))
        self._store.wait([key], timedelta(seconds=2 * GRACE_S))
        return json.loads(self._store.get(key))

    @property
    def _where(self) -> str:
        return "before the first step" if self._step is None else f"after step {self._step}"

    def _ask(self, function: Callable[[], T]) -> T | None:
        """Use the store; None if it is gone: neither a thread nor an end can raise for it."""
        try:
            return function()
        except RuntimeError as error:
            _log.debug("the store of rank %d does not answer: %s", self._rank, error)
            return None


def _tell(words: Mapping[int, Mapping[str, Any] | None], alarms: int) -> dict[str, Any]:
    """Say in one line where the ranks were, those that may be the reason first.

    First come ranks that failed by themselves, in their order; then those that still run, few at
    one line before many at another; then the silent; last those that a collective failed on.
    """
    ended = sorted(
        (word for word in words.values() if word and word["ended"]), key=itemgetter("ended")
    )
    groups: dict[tuple[int, int, str], list[int]] = {}
    for rank, word in words.items():
        key = 2, 0, "is silent: gone, or not running Python"
        if word and word["ended"]:
            is_first = word is ended[0]
            key = 0, word["ended"], word["text"]
            if word["is_lost"]:
                key = 3, int(not is_first), word["text"] if is_first else "failed after that"
        elif word and word["alarm"] >= alarms:
            key = 1, 0, word["text"]
        groups.setdefault(key, []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (item[0][:2], len(item[1])))
    return {
        "text": "; ".join(_told(ranks, text) for (*_, text), ranks in ordered),
        "silent": any(kind == 2 for kind, *_ in groups),
        "first": ended[0]["text"] if ended else None,
    }


def _told(ranks: Sequence[int], text: str) -> str:
    verb, _, rest = text.partition(" ")
    return f"{name_ranks(ranks)} {'are' if verb == 'is' and len(ranks) > 1 else verb} {rest}"


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
    return file.startswith(RECIPES) or not file.startswith(_LIBRARIES)


def _dump(folder: Path, rank: int, fields: Mapping[str, Any]) -> None:
    """Write what this process last did with others; never raise."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "time": now, **fields}
    try:
        content = json.dumps(about | {"collectives": _collectives()}, indent=1)
        write_atomic(folder / f"rank_{rank}.json", f"{content}\n".encode())
    except Exception as error:
        _log.warning("rank %d cannot write down where it is: %s", rank, error)


def _dump_stacks(folder: Path, rank: int) -> None:
    """Write the stacks of this process; never raise."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank_{rank}.txt").open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except Exception as error:
        _log.warning("rank %d cannot write down its stacks: %s", rank, error)


def _collectives() -> Any:
    """What torch's flight recorder has; None where torch was built without one."""
    module = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    dump = next((getattr(module, name) for name in _DUMPS if hasattr(module, name)), None)
    return None if dump is None else json.loads(dump())
