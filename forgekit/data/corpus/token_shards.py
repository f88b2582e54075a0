"""Documents as binary shards of bounded size, with a table that says where each document starts.

A writer holds one document in memory, and can go on where a killed one stopped.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgekit.data.corpus.number_files import NumberWriter, check_again, content_of

__all__ = ["OFFSET", "OFFSETS_NAME", "ShardWriter", "shard_name"]

OFFSETS_NAME = "offsets.bin"
OFFSET = np.dtype("<i8")


class ShardWriter:
    """Appends documents to numbered shards, and their places to the table of offsets.

    Attributes:
        documents: Documents so far.
        tokens: Tokens so far.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype[Any],
        shard_tokens: int,
        position: dict[str, Any] | None = None,
    ) -> None:
        self.documents = 0
        self.tokens = 0
        self._folder = folder
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._hash = hashlib.sha256()
        self._ended: list[tuple[int, int]] = []  # count and checksum of each full shard
        self._shard: NumberWriter | None = None
        if position is None:
            self._offsets = NumberWriter(folder / OFFSETS_NAME, OFFSET)
            self._offsets.append(np.zeros(1, OFFSET).tobytes())
        else:
            self._go_on(position)

    def append(self, ids: NDArray[Any]) -> None:
        """Add one document, over as many shards as it takes."""
        content = memoryview(ids.tobytes())
        self._hash.update(content)
        self.documents += 1
        self.tokens += len(ids)
        self._offsets.append(np.asarray([self.tokens], dtype=OFFSET).tobytes())
        while content:
            shard = self._shard_with_room()
            fits = (self._shard_tokens - shard.count) * self._dtype.itemsize
            shard.append(content[:fits])
            content = content[fits:]

    def position(self) -> dict[str, Any]:
        """Return where the writer stands, in JSON values; another one may go on from there."""
        shards = [*self._ended]
        if self._shard is not None:
            self._shard.flush()
            shards.append((self._shard.count, self._shard.checksum))
        self._offsets.flush()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "shards": [list(shard) for shard in shards],
            "offsets": self._offsets.checksum,
        }

    def close(self) -> None:
        """Close the files, whether they are complete or not."""
        if self._shard is not None:
            self._end_shard(self._shard)
        self._offsets.close()

    def summary(self, vocab_size: int, eos_id: int) -> dict[str, Any]:
        """Describe what was written, after ``close``: counts, checksums and fingerprint.

        The fingerprint is of tokens, documents and sizes, however they are cut into shards.
        """
        for piece in content_of(self._folder / OFFSETS_NAME, OFFSET, self.documents + 1):
            self._hash.update(piece)
        self._hash.update(f"{self._dtype.name} {vocab_size} {eos_id}".encode())
        checksums = {shard_name(i): f"{crc:08x}" for i, (_, crc) in enumerate(self._ended)}
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "shards": [count for count, _ in self._ended],
            "checksums": checksums | {OFFSETS_NAME: f"{self._offsets.checksum:08x}"},
            "fingerprint": self._hash.hexdigest(),
        }

    def _go_on(self, position: dict[str, Any]) -> None:
        """Take up a position, after checking every byte that was written up to there."""
        for number, (count, checksum) in enumerate(position["shards"]):
            file = self._folder / shard_name(number)
            check_again(file, self._dtype, count, checksum, self._hash.update)
        count = position["documents"] + 1
        offsets = self._folder / OFFSETS_NAME
        check_again(offsets, OFFSET, count, position["offsets"], lambda _: None)
        self.documents, self.tokens = position["documents"], position["tokens"]
        self._offsets = NumberWriter(offsets, OFFSET, count=count, checksum=position["offsets"])
        self._ended = [(count, checksum) for count, checksum in position["shards"]]
        if self._ended:
            count, checksum = self._ended.pop()
            file = self._folder / shard_name(len(self._ended))
            self._shard = NumberWriter(file, self._dtype, count=count, checksum=checksum)

    def _shard_with_room(self) -> NumberWriter:
        if self._shard is not None and self._shard.count == self._shard_tokens:
            self._end_shard(self._shard)
        if self._shard is None:
            file = self._folder / shard_name(len(self._ended))
            self._shard = NumberWriter(file, self._dtype)
        return self._shard

    def _end_shard(self, shard: NumberWriter) -> None:
        shard.close()
        self._ended.append((shard.count, shard.checksum))
        self._shard = None


def shard_name(number: int) -> str:
    """Name a shard's file."""
    return f"shard_{number:05d}.bin"
