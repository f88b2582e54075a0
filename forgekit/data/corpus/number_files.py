"""One binary file of numbers: a 32-byte header, then the numbers, little-endian.

The header lets a reader refuse a truncated or foreign file and name the sizes that it found,
instead of training on whatever the bytes happen to mean. A checksum, kept in the index, finds bytes
that have changed since.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["VERSION", "DamagedError", "NumberWriter", "check_resumed", "checksum_of", "map_numbers"]

VERSION = 1

# bytes 0-7 magic | 8-11 version | 12-15 bytes per number | 16-23 count | 24-31 zero, room to grow
HEADER = struct.Struct("<8sIIQ8x")

MAGIC = b"FORGETOK"
CHUNK_BYTES = 4 << 20


class DamagedError(ValueError):
    """A half-written token file differs from what its writer recorded."""


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
        # The header stays zero until close(): a reader refuses a file whose writer was killed.
        if not count:
            self._file.write(bytes(HEADER.size))
        self._file.truncate(HEADER.size + count * dtype.itemsize)
        self._file.seek(0, 2)

    def append(self, numbers: bytes | memoryview) -> None:
        """Add numbers, given as their bytes."""
        self._file.write(numbers)
        self.count += len(numbers) // self._dtype.itemsize
        self.checksum = zlib.crc32(numbers, self.checksum)

    def flush(self) -> None:
        """Pass the appended numbers to the system, so that they survive a kill of the process."""
        self._file.flush()

    def close(self) -> None:
        """Write the header."""
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, VERSION, self._dtype.itemsize, self.count))
        self._file.close()


def map_numbers(file: Path, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    """Map a file of ``count`` numbers into memory, after checking its size and header."""
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing, but index.json names it. Write the file again."
        )
    expected, size = HEADER.size + dtype.itemsize * count, file.stat().st_size
    if size != expected:
        raise ValueError(
            f"{file} is {size:,} bytes; expected {HEADER.size} + {dtype.itemsize} * {count:,} = "
            f"{expected:,}. It is truncated or foreign: write the token file again."
        )
    with file.open("rb") as opened:
        magic, *found = HEADER.unpack(opened.read(HEADER.size))
    if magic != MAGIC:
        raise ValueError(
            f"{file} starts with {magic!r}, not {MAGIC!r}: it is a foreign file. "
            "Write the token file again."
        )
    if found != [VERSION, dtype.itemsize, count]:
        raise ValueError(
            "{} says version {}, {} bytes per number, {} numbers; ".format(file, *found)
            + f"index.json says {VERSION}, {dtype.itemsize}, {count}. Write the token file again."
        )
    numbers = np.memmap(file, dtype=dtype, mode="r", offset=HEADER.size, shape=(count,))
    return numbers.view(np.ndarray)


def checksum_of(
    file: Path, dtype: np.dtype[Any], count: int, use: Callable[[bytes], None] | None = None
) -> int:
    """Compute the CRC-32 of the first ``count`` numbers, passing their bytes to ``use``.

    Reads the file a few megabytes at a time: through a memory map a disk error kills the process.
    """
    left, checksum = count * dtype.itemsize, 0
    with file.open("rb") as opened:
        opened.seek(HEADER.size)
        while left and (piece := opened.read(min(left, CHUNK_BYTES))):
            left -= len(piece)
            checksum = zlib.crc32(piece, checksum)
            if use is not None:
                use(piece)
    return checksum


def check_resumed(
    file: Path,
    dtype: np.dtype[Any],
    count: int,
    checksum: int,
    use: Callable[[bytes], None] | None = None,
) -> None:
    """Raise ``DamagedError`` unless a killed writer's file holds what its position recorded."""
    try:
        found = checksum_of(file, dtype, count, use)
    except OSError as error:
        raise DamagedError(f"{file} cannot be read: {error.strerror}") from error
    if found != checksum:
        raise DamagedError(f"{file} differs from what its writer recorded")
