"""A thread on each rank that reports where its main thread is when no step ends.

It writes into the store, where the ranks that wait for this one read it, even if the main thread
never runs Python code again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import attrs
import torch

from forgekit.environment import PACKAGE, RECIPES
from forgekit.run.rendezvous import HangError, RankStore, is_lost

POLL_S = 1.0
"""Interval of checks."""
GRACE_S = 2.5
"""How long to wait for ranks that fail at the same time to write why."""
STUCK = 0.75
"""Fraction of the time-out after which a rank without a step reports where it is."""

_LIBRARIES = (PACKAGE, str(Path(torch.__file__).parent), str(Path(os.__file__).parent), "<")

_log = logging.getLogger("forgekit")


class Watchdog:
    """A thread that watches the main thread of its rank.

    Args:
        folder: For the Python stacks of the ranks.
        ranks: The ranks that train together.
        timeout_s: Seconds that a step may take; ``beat`` gives others.
    """

    def __init__(self, folder: Path, ranks: RankStore, timeout_s: float) -> None:
        self._folder = folder
        # A connection of its own: a wait on a shared one blocks all its users.
        self._ranks = attrs.evolve(ranks, store=ranks.store.clone())
        self._main = threading.get_ident()
        self._where = "before the first step"
        self._timeout_s, self._since = timeout_s, time.monotonic()
        self._stacks = 0.0  # since when the written stacks are valid
        self._over = threading.Event()
        self._ranks.write("has written nothing: it is gone, or was not late")
        self._thread = threading.Thread(target=self._run, name="forgekit health", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._thread.join(timeout=GRACE_S)

    def beat(self, step: int, timeout_s: float) -> None:
        """Record the end of a step."""
        self._where, self._timeout_s = f"after step {step}", timeout_s
        self._since = time.monotonic()

    def end(self, error: BaseException | None) -> None:
        """Report why this rank ends; after a failed collective, report where all ranks are.

        Raises:
            HangError: In place of the error of a collective.
        """
        self.stop()
        if error is None:
            with suppress(RuntimeError):  # the store may be gone
                self._ranks.write(f"left the loop {self._where}")
            return
        self._write(textwrap.shorten(f"failed: {type(error).__name__}: {error}", 200))
        if is_lost(error) and not isinstance(error, HangError):
            time.sleep(GRACE_S)
            try:
                lines = self._ranks.describe(self._ranks.members)
            except RuntimeError:  # the store ended with its process
                return
            raise HangError(
                f"the ranks lost each other {self._where}: {lines}. Stacks of each rank are in "
                f"{self._folder}."
            ) from error

    def _run(self) -> None:
        while not self._over.wait(min(POLL_S, self._timeout_s / 8)):
            since = self._since
            if self._stacks != since and time.monotonic() - since > STUCK * self._timeout_s:
                line = _line(sys._current_frames().get(self._main))
                self._write(f"is at {line}, {self._where}")
                _log.warning("rank %d is at %s, %s", self._ranks.rank, line, self._where)

    def _write(self, line: str) -> None:
        """Write a line and, once per step, the stacks; never raises."""
        try:
            if self._stacks != self._since:  # stacks from before the error say more
                self._stacks = self._since
                self._folder.mkdir(parents=True, exist_ok=True)
                with (self._folder / f"rank_{self._ranks.rank}.txt").open("w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            self._ranks.write(line)
        except (OSError, RuntimeError) as error:
            _log.warning("rank %d cannot say that it %s: %s", self._ranks.rank, line, error)


def _line(frame: FrameType | None) -> str:
    """Return the innermost line of user code (recipes included), else the innermost line."""
    at = frame
    while at is not None and _is_library(at.f_code.co_filename):
        at = at.f_back
    at = at or frame
    if at is None:
        return "its end"
    return f"{Path(at.f_code.co_filename).name}:{at.f_lineno} in {at.f_code.co_name}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and not file.startswith(RECIPES)
