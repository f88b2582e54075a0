"""Pieces of documents, read out of a token file or arrays into the rows where they belong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.corpus.token_files import TokenFile
from forgekit.data.samples import IGNORED

__all__ = ["ArrayDocuments", "FileDocuments", "Pieces"]

Ints = NDArray[np.int64]


@attrs.frozen(eq=False)
class Pieces:
    """Where the pieces of a batch come from and go to; all ``[pieces]`` int64, in row order.

    Attributes:
        documents: Number of the document.
        starts: Token of the document that the piece starts with.
        lengths: Tokens of the piece.
        numbers: Number of the piece within its row.
        places: Where the piece goes in the batch, all rows laid end to end.
    """

    documents: Ints
    starts: Ints
    lengths: Ints
    numbers: Ints
    places: Ints


@attrs.frozen(eq=False)
class FileDocuments:
    """The documents of a token file, each with the id that closes it.

    Attributes:
        file: The token file.
        shard_starts: The number of each shard's first token, and the number of tokens.
    """

    file: TokenFile
    shard_starts: Ints = attrs.field(repr=False)

    @classmethod
    def of(cls, file: TokenFile) -> FileDocuments:
        """Read the documents of an open token file."""
        return cls(file, np.array([*file.starts, file.tokens], dtype=np.int64))

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.file.vocab_size

    @property
    def eos_id(self) -> int:
        """The id that closes each document."""
        return self.file.eos_id

    @property
    def fingerprint(self) -> str:
        """Names the tokens."""
        return self.file.fingerprint

    def __len__(self) -> int:
        return self.file.documents

    def sizes(self, documents: Ints) -> Ints:
        """Count the tokens of some documents."""
        return self.file.offsets[documents + 1] - self.file.offsets[documents]

    def read(self, out: Ints, pieces: Pieces) -> Ints:
        """Copy pieces into ``out``; returns the label of the last token of each."""
        firsts = self.file.offsets[pieces.documents] + pieces.starts
        ends = firsts + pieces.lengths
        numbers = np.searchsorted(self.shard_starts, firsts, side="right") - 1
        within = firsts - self.shard_starts[numbers]
        # Plain slices, for which a batch of short pieces waits half as long as for read_into.
        shards = self.file.shards
        columns = (numbers, within, within + pieces.lengths, pieces.places)
        each = zip(*(column.tolist() for column in columns), strict=True)
        for number, start, stop, place in each:
            ids = shards[number][start:stop]
            out[place : place + len(ids)] = ids
        for piece in np.flatnonzero(ends > self.shard_starts[numbers + 1]).tolist():
            place, length = pieces.places[piece], pieces.lengths[piece]
            self.file.read_into(out[place : place + length], int(firsts[piece]))
        labels = np.full(len(firsts), IGNORED, dtype=np.int64)
        goes_on = np.flatnonzero(ends < self.file.offsets[pieces.documents + 1])
        for piece, end in zip(goes_on.tolist(), ends[goes_on].tolist(), strict=True):
            self.file.read_into(labels[piece : piece + 1], end)
        return labels


class ArrayDocuments:
    """Documents in memory.

    Args:
        arrays: 1-D arrays (or lists, or CPU tensors) of token ids.

    Raises:
        ValueError: If one is something else.
    """

    eos_id = 0

    def __init__(self, arrays: Sequence[ArrayLike]) -> None:
        self._arrays = [_checked(ids, number) for number, ids in enumerate(arrays)]
        self._sizes = np.array([len(ids) for ids in self._arrays], dtype=np.int64)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return 1 + max((int(ids.max()) for ids in self._arrays if len(ids)), default=0)

    @property
    def fingerprint(self) -> str:
        """Names the tokens."""
        digest = hashlib.sha256(self._sizes.tobytes())
        for ids in self._arrays:
            digest.update(ids.astype(np.int64).tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._arrays)

    def sizes(self, documents: Ints) -> Ints:
        """Count the tokens of some documents."""
        return self._sizes[documents]

    def read(self, out: Ints, pieces: Pieces) -> Ints:
        """Copy pieces into ``out``; returns the label of the last token of each."""
        labels = np.full(len(pieces.documents), IGNORED, dtype=np.int64)
        columns = (pieces.documents, pieces.starts, pieces.lengths, pieces.places)
        each = zip(*(column.tolist() for column in columns), strict=True)
        for piece, (document, start, length, place) in enumerate(each):
            ids, end = self._arrays[document], start + length
            out[place : place + length] = ids[start:end]
            if end < len(ids):
                labels[piece] = ids[end]
        return labels


def _checked(document: ArrayLike, number: int) -> NDArray[Any]:
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"document {number} is {ids.dtype} of shape {ids.shape}; a document is a 1-D array of "
            "integers. Encode text with a tokenizer first."
        )
    if ids.size and (ids.min() < 0 or ids.max() >= 2**32):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise ValueError(
            f"document {number} holds token id {wrong}; ids must be 0 to 2**32 - 1, and a loss is "
            "masked in labels, not here."
        )
    return ids
