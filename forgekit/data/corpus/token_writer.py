"""Writes a token file document by document; a later writer can continue after a kill."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forgekit.data.corpus.number_files import NumberWriter, check_resumed, checksum_of
from forgekit.data.corpus.token_index import write_index
from forgekit.data.documents.protocol import check_ids
from forgekit.inputs import LARGEST, check_integers

__all__ = ["OFFSET", "OFFSETS_NAME", "TokenWriter", "check_sizes", "shard_name"]

OFFSETS_NAME = "offsets.bin"
OFFSET = np.dtype("<i8")


class TokenWriter:
    """Fills a folder with a token file, document by document; ``write_tokens`` in steps.

    ``position()`` between two documents is a value. A new writer that is given this position
    continues there, whatever was appended after it, and the files are those of one undisturbed
    writer. One document is in memory at a time.

    Args:
        folder: An empty folder, or one that another writer was filling.
        vocab_size: As for ``write_tokens``.
        eos_id: As for ``write_tokens``.
        shard_tokens: As for ``write_tokens``.
        position: The other writer's position.

    Raises:
        DamagedError: If the files differ from what the position recorded.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_id: int,
        shard_tokens: int,
        position: dict[str, Any] | None = None,
    ) -> None:
        check_sizes(vocab_size, eos_id, shard_tokens)
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._vocab_size, self._eos_id, self._shard_tokens = vocab_size, eos_id, shard_tokens
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        # Over the tokens alone, so that the fingerprint does not depend on the size of shards.
        self._hash = hashlib.sha256()
        self._shards: list[NumberWriter] = []  # the last one is open
        self._documents = self._tokens = 0
        if position is None:
            self._offsets = NumberWriter(folder / OFFSETS_NAME, OFFSET)
            self._offsets.append(np.zeros(1, OFFSET).tobytes())
        else:
            self._offsets = self._resume(**position)

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in (*self._shards[-1:], self._offsets):
            writer.close()

    def append(self, document: ArrayLike) -> None:
        """Add a document and the id that closes it, over as many shards as it takes."""
        ids = check_ids(f"document {self._documents}", document, self._vocab_size)
        closed = np.empty(len(ids) + 1, self._dtype)
        closed[:-1], closed[-1] = ids, self._eos_id
        content = memoryview(closed.tobytes())
        self._hash.update(content)
        self._documents += 1
        self._tokens += len(closed)
        self._offsets.append(np.array([self._tokens], OFFSET).tobytes())
        while content:
            if not self._shards or self._shards[-1].count == self._shard_tokens:
                self._next_shard()
            shard = self._shards[-1]
            room = (self._shard_tokens - shard.count) * self._dtype.itemsize
            shard.append(content[:room])
            content = content[room:]

    def position(self) -> dict[str, Any]:
        """Return the position in JSON values; everything up to it survives a kill."""
        for writer in (*self._shards[-1:], self._offsets):
            writer.flush()
        return {
            "documents": self._documents,
            "tokens": self._tokens,
            "shards": [[shard.count, shard.checksum] for shard in self._shards],
            "offsets": self._offsets.checksum,
        }

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Write the index, once the files are closed: only now is the folder a token file."""
        if not self._documents:
            raise ValueError("there are no documents; a token file needs at least one.")
        offsets = self._folder / OFFSETS_NAME
        checksum_of(offsets, OFFSET, self._documents + 1, self._hash.update)
        self._hash.update(f"{self._dtype.name} {self._vocab_size} {self._eos_id}".encode())
        files = [(shard_name(i), shard) for i, shard in enumerate(self._shards)]
        files.append((OFFSETS_NAME, self._offsets))
        entries = {
            "dtype": self._dtype.name,
            "vocab_size": self._vocab_size,
            "eos_id": self._eos_id,
            "tokens": self._tokens,
            "documents": self._documents,
            "shards": [shard.count for shard in self._shards],
            "checksums": {name: f"{file.checksum:08x}" for name, file in files},
            "fingerprint": self._hash.hexdigest(),
            "metadata": dict(metadata),
        }
        write_index(self._folder, entries)

    def _resume(
        self, documents: int, tokens: int, shards: list[list[int]], offsets: int
    ) -> NumberWriter:
        """Continue from a position, after checking every byte that was written up to it."""
        for number, (count, checksum) in enumerate(shards):
            file = self._folder / shard_name(number)
            check_resumed(file, self._dtype, count, checksum, self._hash.update)
        table = self._folder / OFFSETS_NAME
        check_resumed(table, OFFSET, documents + 1, offsets)
        self._documents, self._tokens = documents, tokens
        for count, checksum in shards:
            self._next_shard(count, checksum)
        return NumberWriter(table, OFFSET, count=documents + 1, checksum=offsets)

    def _next_shard(self, count: int = 0, checksum: int = 0) -> None:
        if self._shards:
            self._shards[-1].close()
        file = self._folder / shard_name(len(self._shards))
        self._shards.append(NumberWriter(file, self._dtype, count=count, checksum=checksum))


def shard_name(number: int) -> str:
    """Name a shard's file."""
    return f"shard_{number:05d}.bin"


def check_sizes(vocab_size: int, eos_id: int, shard_tokens: int) -> None:
    """Refuse sizes that no token file has."""
    check_integers(
        vocab_size=(vocab_size, 1, 2**32),
        eos_id=(eos_id, -LARGEST),
        shard_tokens=(shard_tokens, 1),
    )
    if not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_id {eos_id} must be 0 to vocab_size - 1 = {vocab_size - 1}.")
