"""Pieces of documents, copied from a token file or from arrays to their positions in a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.corpus.token_files import TokenFile
from forgekit.data.documents.protocol import check_ids
from forgekit.data.samples import IGNORED

Ints = NDArray[np.int64]


@attrs.frozen(eq=False)
class Pieces:
    """The pieces of a batch; all ``[pieces]`` int64, in row order.

    Attributes:
        documents: Number of the document.
        starts: The document's token that the piece starts with.
        lengths: Tokens of the piece.
        numbers: Number of the piece within its row.
        positions: Where the piece starts in the batch, its rows laid end to end.
    """

    documents: Ints
    starts: Ints
    lengths: Ints
    numbers: Ints
    positions: Ints


@attrs.frozen(eq=False)
class PieceReader:
    """Reads pieces of documents, which are in a token file or in memory.

    A document in memory is a shard of its own, so both are read alike.

    Attributes:
        file: The token file; None if the documents are in memory.
        offsets: ``[documents + 1]`` number of each document's first token.
        shards: Arrays of tokens.
        shard_starts: ``[shards + 1]`` number of each shard's first token.
    """

    file: TokenFile | None
    offsets: Ints = attrs.field(repr=False)
    shards: Sequence[NDArray[Any]] = attrs.field(repr=False)
    shard_starts: Ints = attrs.field(repr=False)

    @classmethod
    def of(cls, documents: TokenFile | Sequence[ArrayLike]) -> PieceReader:
        """Read an open token file, or 1-D arrays (or lists, or CPU tensors) of token ids.

        Raises:
            ValueError: If a document is something else.
        """
        if isinstance(documents, TokenFile):
            starts = np.array([*documents.starts, documents.tokens], dtype=np.int64)
            return cls(documents, documents.offsets, documents.shards, starts)
        arrays = [check_ids(f"document {number}", ids) for number, ids in enumerate(documents)]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(None, offsets, arrays, offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceReader.of, (self.file or self.shards,)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the tokens."""
        if self.file is not None:
            return self.file.fingerprint
        digest = hashlib.sha256(np.diff(self.offsets).tobytes())
        for ids in self.shards:
            digest.update(ids.astype(np.int64).tobytes())
        return digest.hexdigest()

    def read(self, out: Ints, pieces: Pieces) -> Ints:
        """Copy pieces into ``out``; returns the label of the last token of each."""
        firsts = self.offsets[pieces.documents] + pieces.starts
        ends = firsts + pieces.lengths
        numbers = self._shards_of(firsts)
        within = firsts - self.shard_starts[numbers]
        # Python integers and plain slices: half the time of read_into for a batch of short pieces.
        columns = (numbers, within, within + pieces.lengths, pieces.positions)
        each = zip(*(column.tolist() for column in columns), strict=True)
        for number, start, stop, position in each:
            ids = self.shards[number][start:stop]
            out[position : position + len(ids)] = ids
        if self.file is not None:  # pieces that continue in the next shard are copied again, whole
            for piece in np.flatnonzero(ends > self.shard_starts[numbers + 1]).tolist():
                position, length = pieces.positions[piece], pieces.lengths[piece]
                self.file.read_into(out[position : position + length], int(firsts[piece]))
        # The last token's label is the document's next token, in another row; at its end none.
        labels = np.full(len(firsts), IGNORED, dtype=np.int64)
        for piece in np.flatnonzero(ends < self.offsets[pieces.documents + 1]).tolist():
            number = self._shards_of(ends[piece])
            labels[piece] = self.shards[number][ends[piece] - self.shard_starts[number]]
        return labels

    def _shards_of(self, tokens: Any) -> Any:
        return np.searchsorted(self.shard_starts, tokens, side="right") - 1
