"""A run directory behind a URL: a local folder that is mirrored while the run trains.

Whatever writes into a run directory goes on writing local files. A thread uploads what has changed;
just before a checkpoint counts, and at the end, all of it is uploaded. Objects cannot be appended
to, so ``metrics.jsonl`` is kept in parts of about a megabyte, named by the step of their first row
and by where in the file it begins: ``metrics/000000000100-52311.jsonl``. Only the last part is
written anew. Where a part is full, the next begins with its last row, to which an evaluation may
still add. A run that goes on fetches the part of its step, and at its end, for the report, the
rest; until then the local file has a hole there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from forgekit.checkpoints.directory import only_warns
from forgekit.remote.urls import (
    Location,
    Url,
    entries_below,
    fs_of,
    local_folder,
    names_below,
    retried,
)
from forgekit.run.lease import Lease, held, repeated
from forgekit.run.status import lock_run

EVERY_S = 10.0
"""Time between two uploads of changed files."""
PART_BYTES = 1 << 20
LARGE_BYTES = 8 << 20
"""Larger files are uploaded with checkpoints and at the end only."""
METRICS = "metrics.jsonl"
_PART = re.compile(r"(\d{12})-(\d+)\.jsonl")


class _Part(NamedTuple):
    """An uploaded object with a range of the rows of metrics.

    Attributes:
        first: The step of the first row.
        begins: Where that row begins in ``metrics.jsonl``.
    """

    first: int
    begins: int

    @property
    def name(self) -> str:
        return f"metrics/{self.first:012d}-{self.begins}.jsonl"


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
        self._parts = _parts_of(self._fs, self._root)
        self._missing = len(self._parts)  # the first parts' rows are not here
        self._rows = b""  # the last part as uploaded
        self._sent = {name: _version(path) for name, path in self._files()}

    def flush(self, *, all_files: bool = True) -> None:
        """Upload changes, rows of metrics first.

        Args:
            all_files: Large ones too.

        Raises:
            RunLockedError: If another process has taken the lease over.
            UrlError: If the store refuses or does not answer.
        """
        with self._lock:
            self._flush_rows()
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

    def go_to(self, step: int) -> None:
        """Follow a rollback to a step: delete later parts, fetch the part with its row.

        The log, which removes the rows after the step from the file, is opened afterwards.
        """
        with self._lock, _opened(self._folder) as file:
            while self._parts and self._parts[-1].first > step:  # from the end: the rest is whole
                gone = self._parts.pop()
                file.truncate(min(gone.begins, file.seek(0, os.SEEK_END)))
                with suppress(FileNotFoundError):
                    self._retried(self._fs.rm_file, gone.name)
            self._missing = min(self._missing, len(self._parts))
            if 0 < self._missing == len(self._parts):
                self._missing -= 1
                _fetch_rows(self._fs, self._root, self._parts[-1:], file)
            self._rows = b""

    def complete(self) -> None:
        """Fetch the rows that the local file lacks, for a report."""
        with self._lock, _opened(self._folder) as file:
            absent, here = self._parts[: self._missing], self._parts[self._missing :]
            _fetch_rows(self._fs, self._root, absent, file, here[0].begins if here else None)
            self._missing = 0

    def _flush_rows(self) -> None:
        path = self._folder / METRICS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._parts[-1].begins if self._parts else 0)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        if not content or content == self._rows:
            return
        if not self._parts:
            self._parts.append(_Part(_step(content.split(b"\n", 1)[0]), 0))
        self._put(self._parts[-1].name, content)
        self._rows = content
        if len(content) >= PART_BYTES:
            last = content.rfind(b"\n", 0, -1) + 1
            self._parts.append(_Part(_step(content[last:]), self._parts[-1].begins + last))

    def _files(self) -> Iterator[tuple[str, Path]]:
        for path in self._folder.rglob("[!.]*"):  # a leading dot: half-written
            inside = str(path.relative_to(self._folder))
            if path.is_file() and inside != METRICS:
                yield inside, path

    def _put(self, name: str, content: bytes) -> None:
        self._retried(lambda path: self._fs.pipe_file(path, content), name)

    def _retried(self, action: Callable[[str], Any], name: str) -> None:
        # While the store was out of reach another writer may have taken the lease.
        path = f"{self._root}/{name}"
        retried(lambda: action(path), f"{self.url}/{name}", before=self.lease.check)


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
        fs, root = fs_of(run)
        _fetch_files(fs, root, copy)
        if parts := _parts_of(fs, root):
            with _opened(copy) as file:
                _fetch_rows(fs, root, parts, file)
        yield copy


def _fetch_files(fs: Any, root: str, folder: Path) -> None:
    for entry in entries_below(fs, root):
        name = entry["name"].rpartition("/")[2]
        if entry["type"] == "file" and not name.startswith("."):
            (folder / name).write_bytes(_read(fs, entry["name"]))


def _parts_of(fs: Any, root: str) -> list[_Part]:
    matches = (_PART.fullmatch(name) for name in names_below(fs, f"{root}/metrics"))
    return sorted(_Part(int(match[1]), int(match[2])) for match in matches if match)


def _opened(folder: Path) -> BinaryIO:
    (path := folder / METRICS).touch()
    return path.open("r+b")


def _fetch_rows(
    fs: Any, root: str, parts: Sequence[_Part], file: BinaryIO, end: int | None = None
) -> None:
    """Write each part at its offset, up to the next part's, the last one up to ``end``."""
    for part in reversed(parts):
        rows = _read(fs, f"{root}/{part.name}")
        before = b"\n"[: part.begins]  # newline of the line before, for backward readers
        file.seek(part.begins - len(before))
        file.write(before + (rows if end is None else rows[: end - part.begins]))
        end = part.begins


def _read(fs: Any, path: str) -> bytes:
    return retried(lambda: fs.cat_file(path), fs.unstrip_protocol(path))


def _step(line: bytes) -> int:
    return json.loads(line)["step"]


def _version(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
