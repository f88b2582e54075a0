"""A run directory behind a URL: a local folder that is mirrored while the run trains.

Whatever writes into a run directory goes on writing local files. A thread uploads those that have
changed; just before a checkpoint counts, and at the end, all of them are uploaded, so that the
bucket has all rows of metrics that the checkpoint counts. A run that goes on fetches the files.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from forgekit.checkpoints.directory import only_warns
from forgekit.remote.urls import (
    Location,
    Url,
    entries_below,
    fs_of,
    local_folder,
    retried,
)
from forgekit.run.lease import Lease, held, repeated
from forgekit.run.status import lock_run

EVERY_S = 10.0
"""Time between two uploads of changed files."""
LARGE_BYTES = 8 << 20
"""Larger files are uploaded with checkpoints and at the end only."""


class Mirror:
    """Uploads a folder's changes; made by ``held_run``.

    Attributes:
        url: The run directory.
        lease: Of this process; no file is uploaded without it.
    """

    def __init__(self, url: Url, folder: Path, lease: Lease) -> None:
        self.url, self.lease, self._folder = url, lease, folder
        self._fs, self._root = fs_of(url)
        self._lock = threading.RLock()
        for path in folder.iterdir():  # leftovers of a run that died here; the bucket counts
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in (".lock", ".lease"):
                path.unlink(missing_ok=True)
        _fetch_files(self._fs, self._root, folder)
        self._sent = {name: _version(path) for name, path in self._files()}

    def flush(self, *, all_files: bool = True) -> None:
        """Upload what has changed.

        Args:
            all_files: Large ones too.

        Raises:
            RunLockedError: If another process has taken the lease over.
            UrlError: If the store refuses or does not answer.
        """
        with self._lock:
            for name, path in self._files():
                with suppress(FileNotFoundError):  # deleted meanwhile
                    version = _version(path)
                    if self._sent.get(name) == version:
                        continue
                    if all_files or version[1] <= LARGE_BYTES:
                        self._put(name, path.read_bytes())
                        self._sent[name] = version

    def settle(self) -> None:
        """Upload all changes, and check that this process still holds the lease."""
        self.flush()
        self.lease.check(now=True)

    def _files(self) -> Iterator[tuple[str, Path]]:
        for path in self._folder.rglob("[!.]*"):  # a leading dot: half-written
            if path.is_file():
                yield str(path.relative_to(self._folder)), path

    def _put(self, name: str, content: bytes) -> None:
        put = partial(self._fs.pipe_file, f"{self._root}/{name}", content)
        # While the store was out of reach another writer may have taken the lease.
        retried(put, f"{self.url}/{name}", before=self.lease.check)


def working_folder(url: Url) -> Path:
    """Return the local folder for a run directory behind a URL."""
    return local_folder() / "runs" / f"{url.name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


@contextmanager
def held_run(folder: Path, url: Url | None, patience_s: float = 0.0) -> Iterator[Mirror | None]:
    """Hold a run directory, as ``lock_run``; behind a URL also take its lease and mirror it.

    Args:
        folder: The run directory, or where this machine works on it: that is emptied, gets what the
            run needs to go on, and is uploaded as a whole at the end.
        url: Where it is, if it is behind a URL.
        patience_s: Seconds to wait for another writer to end.

    Raises:
        RunLockedError: If another process writes there.
        UrlError: If the bucket is not there, permits nothing, or does not answer; at the end, too.
    """
    with ExitStack() as stack:
        stack.enter_context(lock_run(folder, name=url, patience_s=patience_s))
        if url is None:
            yield None
            return
        mirror = Mirror(url, folder, stack.enter_context(held(url, folder, patience_s=patience_s)))
        try:
            with repeated(partial(mirror.flush, all_files=False), EVERY_S, url):
                yield mirror
        except BaseException:
            with only_warns(f"{folder} has what is not in {url}"):
                mirror.flush()
            raise
        mirror.flush()


@contextmanager
def local_copy(run: Location) -> Iterator[Path]:
    """Yield a local run directory: the given one, or a copy of a URL's without checkpoints."""
    if isinstance(run, Path):
        yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        (copy := Path(folder) / run.name).mkdir()
        _fetch_files(*fs_of(run), copy)
        yield copy


def _fetch_files(fs: Any, root: str, folder: Path) -> None:
    for entry in entries_below(fs, root):
        path, name = entry["name"], entry["name"].rpartition("/")[2]
        if entry["type"] == "file" and not name.startswith("."):
            content = retried(partial(fs.cat_file, path), fs.unstrip_protocol(path))
            (folder / name).write_bytes(content)


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
