"""Blocks of arrays behind a URL: fetched by range, verified, and cached on the local disk.

A row is a few kilobytes at a random position, and a request takes as long as half a megabyte. So
whole blocks are fetched, those of a micro-batch at once, and kept until the folder is full; then
those used longest ago go (the caches of fsspec that outlive a process have no bound). A block's
file is named by its checksum and appears whole, so the ranks of a machine share the folder, and
what a crash or a disk has damaged is fetched again.
"""

from __future__ import annotations

import hashlib
import os
import threading
import uuid
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

import attrs
import numpy as np
from numpy.typing import NDArray

from forgekit.remote.urls import Url, local_folder, retried

BLOCK_BYTES = 2**19

CACHE_GIB = "8"
"""Default limit of the cache's size, which ``FORGEKIT_CACHE_GIB`` overrides."""

READ_PATIENCE_S = 90.0
"""How long data may be unreachable; less than the other ranks' time-out of ``Health`` (120 s)."""

NPY_HEADER_BYTES = 128
"""Header size of a 1-D array; numpy leaves room for the length to grow."""


def checksums_of(values: NDArray[Any], block_bytes: int = BLOCK_BYTES) -> list[str]:
    """Hash each block of an array's bytes: 128 bits of SHA-256, in hexadecimal digits."""
    content = values.view(np.uint8).data
    starts = range(0, len(content), block_bytes)
    return [_checksum(content[start : start + block_bytes]) for start in starts]


def _checksum(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


class BlockCache:
    """A folder of blocks named by checksum, shared by processes and threads.

    The folder is looked at once for each 64th of the limit that a process writes, and then filled
    to seven eighths at most: eight processes that write as fast as they can stay below the limit.

    Attributes:
        folder: ``blocks`` in ``forgekit.remote.urls.local_folder()``.
        limit: Most bytes: ``FORGEKIT_CACHE_GIB``. A single block may be larger.
    """

    def __init__(self) -> None:
        self.folder = local_folder() / "blocks"
        self.limit = int(float(os.environ.get("FORGEKIT_CACHE_GIB", CACHE_GIB)) * 2**30)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._checked: set[str] = set()
        self._written = self.limit  # bytes kept since the last scan; none yet

    def opened(self, checksum: str) -> BinaryIO | None:
        """Open a block; None if it is missing or, checked at first use, damaged."""
        try:
            block = (self.folder / checksum).open("rb")
        except FileNotFoundError:
            return None
        if checksum not in self._checked and _checksum(block.read()) != checksum:
            block.close()
            (self.folder / checksum).unlink(missing_ok=True)
            return None
        self._checked.add(checksum)
        os.utime(block.fileno())  # marks its last use
        return block

    def keep(self, checksum: str, content: bytes) -> None:
        """Write a block, after making room for it."""
        self._make_room(len(content))
        new = self.folder / f".{uuid.uuid4().hex}"
        new.write_bytes(content)
        with suppress(FileNotFoundError):  # evicted by another process
            new.rename(self.folder / checksum)

    def _make_room(self, size: int) -> None:
        with self._lock:
            self._written += size
            if self._written <= self.limit // 64:
                return
            self._written, total, files = 0, size, []
            for file in self.folder.iterdir():
                with suppress(FileNotFoundError):
                    status = file.stat()
                    files.append((status.st_mtime_ns, status.st_size, file))
                    total += status.st_size
            for _, freed, file in sorted(files):
                if total <= self.limit - self.limit // 8:
                    break
                file.unlink(missing_ok=True)
                total -= freed


@attrs.frozen(eq=False)
class RemoteArray:
    """The array of an ``.npy`` file behind a URL; slices are read from its blocks.

    Attributes:
        url: The file.
        fs: The file system of fsspec for it; not valid in a fork of this process.
        root: The URL as this file system takes it.
        dtype: Of its numbers.
        length: Number of them.
        checksums: Of its blocks.
        block_bytes: Bytes of a block; the last may be shorter.
        cache: Where blocks are kept.
    """

    url: Url
    fs: Any
    root: str
    dtype: np.dtype[Any]
    length: int
    checksums: list[str]
    block_bytes: int
    cache: BlockCache

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, here: slice) -> NDArray[Any]:
        first, last = self._bytes(here)
        pieces = []
        for number in self.blocks(here):
            begins = number * self.block_bytes
            with self.opened(number) as block:
                block.seek(max(first - begins, 0))
                pieces.append(block.read(min(last - begins, self.block_bytes) - block.tell()))
        return np.frombuffer(b"".join(pieces), self.dtype)

    def blocks(self, here: slice) -> range:
        """Return the numbers of the blocks that hold a slice."""
        first, last = self._bytes(here)
        return range(first // self.block_bytes, -(-last // self.block_bytes))

    def opened(self, number: int) -> BinaryIO:
        """Open a block, as a file that stays readable when the block is evicted."""
        while (block := self.cache.opened(self.checksums[number])) is None:
            fetch_blocks([(self, number)])
        return block

    def span(self, number: int) -> tuple[int, int]:
        """Return the bytes of the file that are a block."""
        begins, ends = number * self.block_bytes, self.length * self.dtype.itemsize
        ends = min(begins + self.block_bytes, ends)
        return NPY_HEADER_BYTES + begins, NPY_HEADER_BYTES + ends

    def _bytes(self, here: slice) -> tuple[int, int]:
        start, stop, _ = here.indices(self.length)
        return start * self.dtype.itemsize, stop * self.dtype.itemsize


Block = tuple[RemoteArray, int]
"""A block: the array and the number."""


def fetch_blocks(blocks: Iterable[Block]) -> None:
    """Fetch the uncached ones of blocks of files in one folder, concurrently.

    Raises:
        ValueError: If a block differs from its checksum, also when it is fetched again.
        UrlError: If the store has not answered in ``READ_PATIENCE_S``.
    """
    wrong = list(dict.fromkeys(blocks))
    for _ in range(2):  # a torn download succeeds the second time
        if not wrong:
            return
        wrong = retried(partial(_fetch, wrong), wrong[0][0].url, patience_s=READ_PATIENCE_S)
    if wrong:
        array, number = wrong[0]
        raise ValueError(
            f"{array.url} differs from its checksum in block {number}: it was replaced or is "
            "damaged. Resume to read it as it is now, or write it again."
        )


def _fetch(blocks: list[Block]) -> list[Block]:
    """Fetch uncached blocks; keep valid ones, return invalid ones."""
    missing = [(a, n) for a, n in blocks if not (a.cache.folder / a.checksums[n]).exists()]
    if not missing:
        return []
    spans = [(array.root, *array.span(number)) for array, number in missing]
    roots, starts, ends = map(list, zip(*spans, strict=True))
    contents = missing[0][0].fs.cat_ranges(roots, starts, ends, on_error="return")
    wrong = []
    for (array, number), content in zip(missing, contents, strict=True):
        if isinstance(content, bytes) and _checksum(content) == array.checksums[number]:
            array.cache.keep(array.checksums[number], content)
        else:
            wrong.append((array, number))
    if errors := [content for content in contents if isinstance(content, Exception)]:
        raise errors[0]
    return wrong
