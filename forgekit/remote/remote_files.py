"""Open local and remote files for reading decompressed bytes."""

from __future__ import annotations

import importlib
import io
import os
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, BinaryIO, TypeAlias

import attrs

from forgekit.remote.urls import Url, fs_of, retried

COMPRESSED = MappingProxyType({".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"})
"""Python's module for each suffix."""

FETCHED_BYTES = 2**23
"""Bytes per request of a remote file."""


@attrs.frozen
class RemoteFile:
    """A file behind a URL, with the methods of a path that are used here.

    Attributes:
        url: The URL.
        size: Bytes.
        stamp: Changes with the content: the store's ETag or a time.
    """

    url: Url
    size: int
    stamp: str

    suffix = property(lambda self: PurePosixPath(self.url).suffix)
    stem = property(lambda self: PurePosixPath(self.url).stem)

    def __str__(self) -> str:
        return self.url

    def resolve(self) -> RemoteFile:
        """Return itself: URLs are unique."""
        return self

    def stat(self) -> Any:
        """Return the size and a substitute of the modification time."""
        return SimpleNamespace(st_size=self.size, st_mtime_ns=self.stamp)

    def open(self) -> BinaryIO:
        """Open the file; reads are retried."""
        return io.BufferedReader(_PatientFile(self.url), FETCHED_BYTES)


File: TypeAlias = Path | RemoteFile


class _PatientFile(io.RawIOBase):
    """A file of fsspec that retries failed reads."""

    def __init__(self, url: Url) -> None:
        fs, root = fs_of(url)
        self._url, self._file = url, retried(lambda: fs.open(root, "rb", cache_type="none"), url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        # fsspec advances only after a successful read, so a retry reads the same bytes.
        content = retried(lambda: self._file.read(len(buffer)), self._url)
        buffer[: len(content)] = content
        return len(content)


def opened(file: File) -> BinaryIO:
    """Open a file for reading decompressed bytes."""
    compressed: Any = file if isinstance(file, Path) else file.open()
    if module := COMPRESSED.get(file.suffix.lower()):
        return importlib.import_module(module).open(compressed)
    return file.open("rb", buffering=2**20) if isinstance(file, Path) else compressed
