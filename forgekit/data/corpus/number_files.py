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
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

VERSION = 1

# bytes 0-7 magic | 8-11 version | 12-15 bytes per number | 16-23 count | 24-31 zero, room to grow
HEADER = struct.Struct("<8sIIQ8x")

MAGIC = b"FORGETOK"
CHUNK_BYTES = 4 << 20


def append_numbers(file: Path, dtype: np.dtype[Any], count: int) -> BinaryIO:
    """Open a file to write numbers behind the first ``count``; what followed them is deleted.

    A new file begins with ``count`` zeros. The header is zero until ``write_header``, so a reader
    refuses a file whose writer was killed.
    """
    opened = file.open("ab", buffering=2**20)
    opened.truncate(HEADER.size + dtype.itemsize * count)
    return opened


def has_numbers(file: Path, dtype: np.dtype[Any], count: int) -> bool:
    """Whether a file that is still being written holds that many numbers."""
    return file.is_file() and file.stat().st_size >= HEADER.size + dtype.itemsize * count


def write_header(file: Path, dtype: np.dtype[Any], count: int) -> None:
    """Complete a file whose numbers are all written."""
    with file.open("r+b") as opened:
        opened.write(HEADER.pack(MAGIC, VERSION, dtype.itemsize, count))


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
        found = HEADER.unpack(opened.read(HEADER.size))
    wanted = (MAGIC, VERSION, dtype.itemsize, count)
    if found != wanted:
        raise ValueError(
            f"{file} begins with {found} (magic, version, bytes per number, numbers); expected "
            f"{wanted}. It is foreign or damaged: write the token file again."
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
