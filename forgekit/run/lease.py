"""A lease that grants one process the writing of a run directory behind a URL.

An object ``.lease`` names the writer, who renews it. No clock is compared with another machine's:
who finds a lease watches by its own clock whether it changes. If it does, the writer lives and the
start is refused; if it has not for a whole period, the lease is taken over. Each change is made on
the condition that the object is still the one that was read, so of two that try one succeeds.
(S3 has such conditional writes. Elsewhere it is read back after each write.)

A writer that was paused or cut off for longer than the period may have lost its lease without
knowing. So it renews it just before each write that counts, and stops if it cannot.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forgekit.files import is_locked
from forgekit.remote.urls import PRECONDITION, Url, code_of, fs_of, retried
from forgekit.run.status import RunLockedError, in_use
from forgekit.terminal import tell

PERIOD_S = 30.0
"""A lease not renewed for so long may be taken over; renewals are three times as frequent."""

log = logging.getLogger("forgekit")


class Lease:
    """The lease of a run directory; ``held`` takes, renews and releases it."""

    def __init__(self, url: Url, period_s: float) -> None:
        self.url, self._period = url, period_s
        self._fs, root = fs_of(url)
        self._path = f"{root}/.lease"
        self.owner = uuid.uuid4().hex
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._name = f"pid {os.getpid()} on host {socket.gethostname()} since {now}"
        self._beat, self._renewed = 0, 0.0
        self._there, self._version = b"", None  # as last read, empty if there is none
        self._lost: str | None = None
        self._lock = threading.Lock()  # threads of saves and of the mirror renew it too

    def take(self, previous: str | None = None, *, patience_s: float = 0.0) -> None:
        """Take the lease, waiting for the expiry of an existing one.

        Args:
            previous: Owner that is known to have died.
            patience_s: Seconds to wait for a writer that lives to end.

        Raises:
            RunLockedError: If its writer lives, or another start was faster.
            UrlError: If the bucket is not there, or cannot be reached.
        """
        self._read()
        if self._there and (previous is None or previous.encode() not in self._there):
            tell(f"{self.url}: waiting up to {self._period:.0f} s for {self._holder} to end")
            began = changed = time.monotonic()
            while (there := self._there) and time.monotonic() - changed < self._period:
                time.sleep(self._period / 30)
                self._read()
                if self._there not in (b"", there):
                    changed = time.monotonic()
                    if changed - began > patience_s:
                        raise in_use(self.url, self._holder)
        if not self._swap():
            raise in_use(self.url, self._holder)

    def check(self, *, now: bool = False) -> None:
        """Renew the lease if it is time, or at once before an action that only its holder may take.

        Raises:
            RunLockedError: If another process has taken it over.
            UrlError: If the store cannot be asked.
        """
        with self._lock:
            silent_s = time.monotonic() - self._renewed
            is_due = self._lost is None and (now or silent_s >= self._period / 3)
            if is_due and not self._swap():
                self._lost = (
                    f"{self.url} was taken over by {self._holder or 'nobody'}: this process has "
                    f"not renewed its lease for {silent_s:.0f} s, because it was paused or cut "
                    "off. It stops; everything that it saved before is intact."
                )
            self.check_known()

    def check_known(self) -> None:
        """Raise ``RunLockedError`` if the lease is known to be lost, without a request."""
        if self._lost is not None:
            raise RunLockedError(self._lost)

    def release(self) -> None:
        """Delete the lease if it is still ours, so that the next start need not wait."""
        with suppress(OSError):  # not worth waiting for a store that is down
            if self._lost is None and self._swap(patience_s=0.0):
                self._fs.rm_file(self._path)

    @property
    def _holder(self) -> str:
        return self._there.decode(errors="replace").partition("\n")[0]

    def _swap(self, patience_s: float | None = None) -> bool:
        """Replace the lease as last read by ours; False if it has changed since."""
        self._beat += 1
        content = f"{self._name}\n{self.owner} {self._beat}\n".encode()
        before, version = self._there, self._version

        def put() -> None:
            if not hasattr(self._fs, "call_s3"):
                self._read()
                if self._there == before:
                    self._fs.pipe_file(self._path, content)
                return
            bucket, key, _ = self._fs.split_path(self._path)
            condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
            self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=content, **condition)

        try:
            retried(put, f"{self.url}/.lease", patience_s=patience_s)
        except OSError as error:
            if code_of(error) not in PRECONDITION:
                raise
        self._read()  # always: a write may succeed although its answer is lost
        if is_done := self._there == content:
            self._renewed = time.monotonic()
        return is_done

    def _read(self) -> None:
        def read() -> tuple[bytes, Any]:
            # The version before the content: if it is older, the next conditional write fails.
            version = self._fs.info(self._path).get("ETag")
            return self._fs.cat_file(self._path), version

        try:
            self._there, self._version = retried(read, f"{self.url}/.lease")
        except FileNotFoundError:
            self._there, self._version = b"", None


@contextmanager
def held(
    url: Url, folder: Path, *, period_s: float | None = None, patience_s: float = 0.0
) -> Iterator[Lease]:
    """Hold the lease of a run directory, renewed by a thread.

    A crash on this machine is known at once: the folder, which the caller has locked, notes the
    owner of its last lease.

    Args:
        url: The run directory.
        folder: Where this machine works on it.
        period_s: See ``PERIOD_S``, which it is by default.
        patience_s: Seconds to wait for a writer that lives to end.
    """
    period_s = PERIOD_S if period_s is None else period_s
    lease, note = Lease(url, period_s), folder / ".lease"
    has_died = note.exists() and is_locked(folder / ".lock")
    lease.take(note.read_text() if has_died else None, patience_s=patience_s)
    note.write_text(lease.owner)
    try:
        with repeated(lease.check, period_s / 3, f"{url}/.lease"):
            yield lease
    finally:
        lease.release()


@contextmanager
def repeated(action: Callable[[], None], every_s: float, name: str) -> Iterator[None]:
    """Repeat an action in a thread until the block ends or the lease is lost.

    Args:
        action: The action; its errors are logged.
        every_s: Seconds between two times.
        name: What it is about.
    """
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            try:
                action()
            except RunLockedError as error:  # the run stops at the next step
                log.error("%s", error)
                return
            except Exception as error:
                log.warning("%s is behind: %s", name, error)

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
