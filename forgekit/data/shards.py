"""The binary files of a token file: a header that says what follows, then numbers.

The header is what lets a reader refuse a truncated or foreign file with the sizes it found, instead
of training on whatever the bytes happen to mean.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["OFFSET", "OFFSETS_NAME", "VERSION", "ShardWriter", "map_numbers", "shard_name"]

VERSION = 1
OFFSETS_NAME = "offsets.bin"
OFFSET = np.dtype("<i8")
HEADER = struct.Struct("<8sIIQ8x")
"""Magic, version, bytes per number, count of numbers, room to grow: 32 bytes."""

MAGIC = b"FORGETOK"


class ShardWriter:
    """Appends documents to numbered shards and closes with the table of offsets."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.offsets = [0]
        self.counts: list[int] = []
        self._folder = folder
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close_shard()
        if kind is None:
            self._write_offsets()

    def append(self, ids: NDArray[Any]) -> None:
        """Add one document, over as many shards as it takes."""
        self._hash.update(ids.tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))
        while len(ids):
            file = self._shard_with_room()
            piece = ids[: self._shard_tokens - self.counts[-1]]
            file.write(piece.tobytes())
            self.counts[-1] += len(piece)
            ids = ids[len(piece) :]

    def fingerprint(self, vocab_size: int, eos_id: int) -> str:
        """Hash what was written, however it is cut into shards."""
        whole = self._hash.copy()
        whole.update(np.asarray(self.offsets, dtype=OFFSET).tobytes())
        whole.update(f"{self._dtype.name} {vocab_size} {eos_id}".encode())
        return whole.hexdigest()

    def _shard_with_room(self) -> BinaryIO:
        if self._file is None or self.counts[-1] == self._shard_tokens:
            self._close_shard()
            self._file = (self._folder / shard_name(len(self.counts))).open("wb")
            self._file.write(bytes(HEADER.size))
            self.counts.append(0)
        return self._file

    def _close_shard(self) -> None:
        if self._file is not None:
            self._file.seek(0)
            self._file.write(_header(self._dtype, self.counts[-1]))
            self._file.close()
            self._file = None

    def _write_offsets(self) -> None:
        offsets = np.asarray(self.offsets, dtype=OFFSET)
        (self._folder / OFFSETS_NAME).write_bytes(
            _header(offsets.dtype, len(offsets)) + offsets.tobytes()
        )


def shard_name(number: int) -> str:
    """Name a shard's file."""
    return f"shard_{number:05d}.bin"


def _header(dtype: np.dtype[Any], count: int) -> bytes:
    return HEADER.pack(MAGIC, VERSION, dtype.itemsize, count)


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
