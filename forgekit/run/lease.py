"""One writer of a run directory behind a URL: a lease that a crashed one loses.

An object ``.lease`` names the writer, who renews it. No clock is compared with another machine's:
who finds a lease watches by its own clock whether it changes. If it does, the writer lives and the
start is refused; if it has not for a whole period, the lease is taken over. Each change is made on
the condition that the object is still the one that was read, so of two that try one succeeds.
(S3 has such conditional writes. Elsewhere it is read back after each write.)

A writer that was paused or cut off for longer than the period may have lost its lease without
knowing. So it renews it just before each write that counts, and stops if it cannot.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forgekit.files import is_locked
from forgekit.remote.urls import PRECONDITION, Url, UrlError, code_of, fs_of, retried
from forgekit.run.status import RunLockedError
from forgekit.terminal import tell

PERIOD_S = 30.0
"""After so long without renewal a lease may be taken over; it is renewed three times as often."""

log = logging.getLogger("forgekit")


class Lease:
    """The lease of one run directory; ``held`` takes it, renews it and gives it back."""

    def __init__(self, url: Url, period_s: float) -> None:
        self.url, self._period = url, period_s
        self._fs, root = fs_of(url)
        self._path = f"{root}/.lease"
        self.owner = uuid.uuid4().hex
        self._writer = {
            "owner": self.owner,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._beat, self._renewed = 0, 0.0
        self._current: tuple[bytes, str | None] | None = None
        self._lost: str | None = None
        self._lock = threading.Lock()  # the threads of a save and of the mirror renew it, too

    def take(self, previous: str | None = None, *, patience_s: float = 0.0) -> None:
        """Take the lease, after watching one that is there.

        Args:
            previous: Owner that is known to have died.
            patience_s: Seconds to wait for a writer that lives to end.

        Raises:
            RunLockedError: If its writer lives, or another start was faster.
            UrlError: If the bucket is not there, or cannot be reached.
        """
        self._current = there = self._read()
        if there is not None and _facts(there[0]).get("owner") != previous:
            tell(f"{self.url}: waiting up to {self._period:.0f} s for {_named(there[0])} to end")
            began = changed = time.monotonic()
            while self._current is not None and time.monotonic() - changed < self._period:
                time.sleep(self._period / 30)
                self._current = self._read()
                if self._current is not None and self._current[0] != there[0]:
                    there, changed = self._current, time.monotonic()
                    if changed - began > patience_s:
                        raise self._refusal(there[0])
        if not self._swap():
            raise self._refusal(b"" if self._current is None else self._current[0])

    def check(self, *, now: bool = False) -> None:
        """Renew the lease if that is due, or now, just before what only its holder may do.

        Raises:
            RunLockedError: If another process has taken it over.
            UrlError: If the store cannot be asked.
        """
        with self._lock:
            if not now and time.monotonic() - self._renewed < self._period / 3:
                return self.check_known()
            if self._lost is None and not self._swap():
                by = "nobody" if self._current is None else _named(self._current[0])
                self._lost = (
                    f"{self.url} was taken over by {by}: this process has not renewed its lease "
                    f"for {time.monotonic() - self._renewed:.0f} s, as one that is paused or cut "
                    "off. It stops; what it has saved before is there."
                )
            return self.check_known()

    def check_known(self) -> None:
        """Raise ``RunLockedError`` if the lease is known to be lost; asks nobody."""
        if self._lost is not None:
            raise RunLockedError(self._lost)

    def release(self) -> None:
        """Delete the lease, so that the next start need not wait; if it is still this one's."""
        with suppress(OSError):  # of a store that is down it is not worth waiting
            if self._lost is None and self._swap(patience_s=0.0):
                self._fs.rm_file(self._path)

    def _refusal(self, content: bytes) -> RunLockedError:
        return RunLockedError(
            f"{self.url} is in use by {_named(content)}. Wait until that run has ended, stop it, "
            "or choose another run directory."
        )

    def _swap(self, patience_s: float | None = None) -> bool:
        """Replace the lease that was read last by one's own; False if it is another one now."""
        self._beat += 1
        content = json.dumps(self._writer | {"beat": self._beat}).encode()
        before = self._current

        def put() -> None:
            if not hasattr(self._fs, "call_s3"):
                if self._read() == before:
                    self._fs.pipe_file(self._path, content)
                return
            bucket, key, _ = self._fs.split_path(self._path)
            condition = {"IfNoneMatch": "*"} if before is None else {"IfMatch": before[1]}
            self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)

        try:
            retried(put, f"{self.url}/.lease", patience_s=patience_s)
        except OSError as error:
            if code_of(error) not in PRECONDITION:
                raise
        # Read in any case: of a write that succeeded the answer may have been lost.
        self._current = self._read()
        if is_done := self._current is not None and self._current[0] == content:
            self._renewed = time.monotonic()
        return is_done

    def _read(self) -> tuple[bytes, str | None] | None:
        """Read the lease and its version; None if there is none."""

        def read() -> tuple[bytes, str | None]:
            # The version first: one that is older than the content fails the next condition.
            version = self._fs.info(self._path).get("ETag")
            return self._fs.cat_file(self._path), version

        try:
            return retried(read, f"{self.url}/.lease")
        except FileNotFoundError:
            return None


@contextmanager
def held(
    url: Url, folder: Path, *, period_s: float | None = None, patience_s: float = 0.0
) -> Iterator[Lease]:
    """Hold the lease of a run directory, which a thread renews.

    A crash on this machine is known at once: the folder, which the caller has locked, notes the
    owner of its last lease.

    Args:
        url: The run directory.
        folder: Where this machine works on it.
        period_s: See ``PERIOD_S``, which it is by default.
        patience_s: Seconds to wait for a writer that lives to end.
    """
    period_s = PERIOD_S if period_s is None else period_s
    lease, note, over = Lease(url, period_s), folder / ".lease", threading.Event()
    has_died = note.exists() and is_locked(folder / ".lock")
    lease.take(note.read_text() if has_died else None, patience_s=patience_s)
    note.write_text(lease.owner)

    def renew() -> None:
        while not over.wait(period_s / 3):
            try:
                lease.check()
            except RunLockedError as error:
                log.error("%s", error)
                return
            except UrlError as error:
                log.warning("%s", error)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        over.set()
        thread.join()
        lease.release()


def _facts(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):  # half of it: not every store replaces an object at once
        return json.loads(content)
    return {}


def _named(content: bytes) -> str:
    facts = _facts(content)
    if not facts:
        return "another process"
    return f"pid {facts.get('pid')} on host {facts.get('host')} since {facts.get('since')}"
