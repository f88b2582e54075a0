"""One binary file of numbers: a header that says what follows, then the numbers.

The header is what lets a reader refuse a truncated or foreign file with the sizes it found, instead
of training on whatever the bytes happen to mean; a checksum, kept elsewhere, finds what has changed
since.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "VERSION",
    "DamagedError",
    "NumberWriter",
    "check_again",
    "check_numbers",
    "content_of",
    "map_numbers",
]

VERSION = 1
HEADER = struct.Struct("<8sIIQ8x")
"""Magic, version, bytes per number, count of numbers, room to grow: 32 bytes."""

MAGIC = b"FORGETOK"
CHUNK_BYTES = 4 << 20


class DamagedError(ValueError):
    """A half-written token file is not what its writer left."""


class NumberWriter:
    """Appends numbers to one file and keeps their checksum.

    Attributes:
        count: Numbers so far.
        checksum: CRC-32 of their bytes.
    """

    def __init__(self, file: Path, dtype: np.dtype[Any], *, count: int = 0, checksum: int = 0):
        self.count = count
        self.checksum = checksum
        self._dtype = dtype
        self._file = file.open("r+b" if count else "wb", buffering=2**20)
        if not count:
            self._file.write(bytes(HEADER.size))
        self._file.truncate(HEADER.size + count * dtype.itemsize)
        self._file.seek(0, 2)

    def append(self, numbers: bytes | memoryview) -> None:
        """Add numbers, as the bytes that stand for them."""
        self._file.write(numbers)
        self.count += len(numbers) // self._dtype.itemsize
        self.checksum = zlib.crc32(numbers, self.checksum)

    def flush(self) -> None:
        """Hand over to the system what was appended, so that a kill does not lose it."""
        self._file.flush()

    def close(self) -> None:
        """Write the header."""
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, VERSION, self._dtype.itemsize, self.count))
        self._file.close()


def map_numbers(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map a file of ``count`` numbers into memory, after checking that it is one."""
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing, but index.json names it. Write the file again."
        )
    _check_size(file, dtype, count)
    _check_header(file, dtype, count)
    return np.memmap(file, dtype=dtype, mode="r", offset=HEADER.size, shape=(count,)).view(
        np.ndarray
    )


def check_numbers(file: Path, dtype: np.dtype[Any], count: int, checksum: str) -> None:
    """Read a whole file and compare it with its checksum in the index."""
    found = 0
    for piece in content_of(file, dtype, count):
        found = zlib.crc32(piece, found)
    if f"{found:08x}" != checksum:
        raise ValueError(
            f"{file} has crc32 {found:08x}; index.json says {checksum}. Its content has changed "
            "since it was written: write the token file again, or restore the file."
        )


def content_of(file: Path, dtype: np.dtype[Any], count: int) -> Iterator[bytes]:
    """Read the bytes of ``count`` numbers, a few at a time."""
    left = count * dtype.itemsize
    with file.open("rb") as opened:
        opened.seek(HEADER.size)
        while left and (piece := opened.read(min(left, CHUNK_BYTES))):
            left -= len(piece)
            yield piece


def check_again(
    file: Path, dtype: np.dtype[Any], count: int, checksum: int, use: Callable[[bytes], None]
) -> None:
    """Compare what a killed writer left with where it stood, handing the bytes to ``use``."""
    found = read = 0
    try:
        for piece in content_of(file, dtype, count):
            use(piece)
            read += len(piece)
            found = zlib.crc32(piece, found)
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error.strerror}") from error
    if (read, found) != (count * dtype.itemsize, checksum):
        raise DamagedError(f"{file} is not as it was left")


def _check_header(file: Path, dtype: np.dtype[Any], count: int) -> None:
    with file.open("rb") as opened:
        magic, version, itemsize, found = HEADER.unpack(opened.read(HEADER.size))
    if magic != MAGIC:
        raise ValueError(
            f"{file} starts with {magic!r}, not {MAGIC!r}: it is a foreign file. "
            "Write the token file again."
        )
    if (version, itemsize, found) != (VERSION, dtype.itemsize, count):
        raise ValueError(
            f"{file} says version {version}, {itemsize} bytes per number, {found} numbers; "
            f"index.json says {VERSION}, {dtype.itemsize}, {count}. Write the token file again."
        )


def _check_size(file: Path, dtype: np.dtype[Any], count: int) -> None:
    expected, found = HEADER.size + dtype.itemsize * count, file.stat().st_size
    if found != expected:
        raise ValueError(
            f"{file} is {found:,} bytes; expected {HEADER.size} + {dtype.itemsize} * {count:,} = "
            f"{expected:,}. It is truncated or foreign: write the token file again."
        )
