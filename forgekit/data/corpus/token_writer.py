"""Writes a token file document by document; a later writer can continue after a kill."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from forgekit.data.corpus.number_files import (
    append_numbers,
    checksum_of,
    has_numbers,
    write_header,
)
from forgekit.data.corpus.token_index import write_index
from forgekit.data.documents.protocol import check_ids
from forgekit.inputs import check_integers

OFFSETS_NAME = "offsets.bin"
OFFSET = np.dtype("<i8")


class DamagedError(ValueError):
    """A half-written token file holds less than its writer recorded."""


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
        position: The other writer's position: its numbers of documents and of tokens.

    Raises:
        ValueError: If a size or id is out of range.
        DamagedError: If the files hold less than the position says.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_id: int,
        shard_tokens: int,
        position: Sequence[int] | None = None,
    ) -> None:
        check_integers(vocab_size=(vocab_size, 1, 2**32), shard_tokens=(shard_tokens, 1))
        check_integers(eos_id=(eos_id, 0, vocab_size - 1))
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._vocab_size, self._eos_id, self._shard_tokens = vocab_size, eos_id, shard_tokens
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self._documents, self._tokens = position or (0, 0)
        for file in self._files() if position else ():
            if not has_numbers(*file):
                raise DamagedError(f"{file[0]} is shorter than its writer recorded")
        # The first document starts at 0, with which a new file of offsets begins.
        self._offsets = append_numbers(folder / OFFSETS_NAME, OFFSET, self._documents + 1)
        self._shards: list[BinaryIO] = []  # the last one is open
        if self._tokens % shard_tokens:
            self._next_shard()

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (*self._shards[-1:], self._offsets):
            file.close()

    def append(self, document: ArrayLike) -> None:
        """Add a document and the id that closes it, over as many shards as it takes."""
        ids = check_ids(f"document {self._documents}", document, self._vocab_size)
        closed = np.empty(len(ids) + 1, self._dtype)
        closed[:-1], closed[-1] = ids, self._eos_id
        while len(closed):
            used = self._tokens % self._shard_tokens
            if not used:
                self._next_shard()
            room = self._shard_tokens - used
            piece, closed = closed[:room], closed[room:]
            self._shards[-1].write(piece.tobytes())
            self._tokens += len(piece)
        self._documents += 1
        self._offsets.write(np.array([self._tokens], OFFSET).tobytes())

    def position(self) -> tuple[int, int]:
        """Return the position; everything up to it survives a kill and a power cut."""
        for file in (*self._shards[-1:], self._offsets):
            _sync(file)
        return self._documents, self._tokens

    def finish(self, metadata: Mapping[str, Any]) -> None:
        """Write the index, once the files are closed: only now is the folder a token file."""
        if not self._documents:
            raise ValueError("there are no documents; a token file needs at least one.")
        # Over the tokens alone, so that the fingerprint does not depend on the size of shards.
        digest, checksums = hashlib.sha256(), {}
        for file, dtype, count in self._files():
            write_header(file, dtype, count)
            checksums[file.name] = f"{checksum_of(file, dtype, count, digest.update):08x}"
        digest.update(f"{self._dtype.name} {self._vocab_size} {self._eos_id}".encode())
        entries = {
            "dtype": self._dtype.name,
            "vocab_size": self._vocab_size,
            "eos_id": self._eos_id,
            "tokens": self._tokens,
            "documents": self._documents,
            "shards": [count for _, _, count in self._files()[:-1]],
            "checksums": checksums,
            "fingerprint": digest.hexdigest(),
            "metadata": dict(metadata),
        }
        write_index(self._folder, entries)

    def _files(self) -> list[tuple[Path, np.dtype[Any], int]]:
        full, rest = divmod(self._tokens, self._shard_tokens)
        shards = [self._shard_tokens] * full + ([rest] if rest else [])
        return files_of(self._folder, self._dtype, shards, self._documents)

    def _next_shard(self) -> None:
        """Open the shard of the next token, behind the tokens that it has."""
        for shard in self._shards[-1:]:
            _sync(shard)
            shard.close()
        number, used = divmod(self._tokens, self._shard_tokens)
        self._shards.append(append_numbers(self._folder / _shard_name(number), self._dtype, used))


def files_of(
    folder: Path, dtype: np.dtype[Any], shards: Sequence[int], documents: int
) -> list[tuple[Path, np.dtype[Any], int]]:
    """List the file, dtype and count of each shard and, last, of the offsets.

    Args:
        folder: The folder of the token file.
        dtype: Of the tokens.
        shards: The tokens of each shard.
        documents: Number of documents.
    """
    files = [(folder / _shard_name(number), dtype, count) for number, count in enumerate(shards)]
    return [*files, (folder / OFFSETS_NAME, OFFSET, documents + 1)]


def _shard_name(number: int) -> str:
    return f"shard_{number:05d}.bin"


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
