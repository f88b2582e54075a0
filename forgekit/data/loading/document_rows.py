"""Streamed documents as micro-batches, each with the position of the next one.

Tokens fill rows in their order; a document continues in the next row. Rows overlap by one token, so
every token that follows another one of its document is a target once. The position between two
micro-batches is a small value, a cursor: the source's position before the document that the next
row begins in, and how many tokens of this document are used::

    documents   1 2 3 $ | 4 5 6 7 8 9 $          ($ closes a document)
    row 0       1 2 3 $ 4 5 (6)                   seq_len 6: inputs, and the last label
    row 1       6 7 8 9 $                         cursor: position of the second document, inside 2
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from forgekit.data.batches.batch import shift_labels
from forgekit.data.documents import Documents, Record, check_ids
from forgekit.data.samples import PADDING, apply_transforms
from forgekit.data.tokenizer import encode_texts
from forgekit.terminal import printable

BROKEN_NAMED = 10
"""Broken documents that are named in the log; the others are counted."""

log = logging.getLogger("forgekit")


@attrs.frozen
class Cursor:
    """The position of a reader between two micro-batches.

    Attributes:
        position: The source's, before the document that the next row begins in.
        inside: Tokens of that document before the next row.
        epoch: How often the source was read to its end.
        rows: Rows with targets so far.
        broken: Documents left out so far because they could not be read.
    """

    position: Any = None
    inside: int = 0
    epoch: int = 0
    rows: int = 0
    broken: int = 0


@attrs.frozen(kw_only=True)
class DocumentRows:
    """How documents become micro-batches; reads them from any cursor."""

    documents: Documents
    tokenizer: Any
    eos_id: int
    seq_len: int
    batch_size: int
    epochs: int | None
    transforms: Sequence[Callable[[TensorDict], TensorDict]]

    def read(self, cursor: Cursor, part: int, parts: int) -> Iterator[tuple[TensorDict, Cursor]]:
        """Yield micro-batches, each with the cursor after it, as one reader of several."""
        rows, count = self._rows(cursor, part, parts), cursor.rows
        while batch := list(itertools.islice(rows, self.batch_size)):
            count += len(batch)
            _, after = batch[-1]
            yield self._batch([pieces for pieces, _ in batch]), attrs.evolve(after, rows=count)

    def padding(self) -> TensorDict:
        """Make a micro-batch that holds no document."""
        return self._batch([])

    def _batch(self, rows: list[list[NDArray[Any]]]) -> TensorDict:
        """Build a micro-batch of ``[b s]`` tensors; each row is a list of pieces of documents."""
        shape = (self.batch_size, self.seq_len + 1)
        ids = np.full(shape, self.eos_id, dtype=np.int64)
        doc_ids = np.full(shape, PADDING, dtype=np.int64)
        position_ids = np.zeros(shape, dtype=np.int64)
        for row, pieces in enumerate(rows):
            start = 0
            for number, piece in enumerate(pieces):
                stop = start + len(piece)
                ids[row, start:stop] = piece
                doc_ids[row, start:stop] = number
                position_ids[row, start:stop] = np.arange(len(piece))
                start = stop
        arrays = {"input_ids": ids, "doc_ids": doc_ids, "position_ids": position_ids}
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        batch = shift_labels(TensorDict(tensors, batch_size=[self.batch_size]))
        return apply_transforms(batch, self.transforms)

    def _rows(
        self, cursor: Cursor, part: int, parts: int
    ) -> Iterator[tuple[list[NDArray[Any]], Cursor]]:
        """Yield the pieces of each row, ``seq_len + 1`` tokens in all, and the cursor after it."""
        pieces, left, start = [], self.seq_len + 1, cursor.inside
        before = cursor
        for ids, before in self._documents(cursor, part, parts):
            while len(ids) - start > 1:  # a closing token has no target, so it begins no row
                pieces.append(ids[start : start + left])
                left -= len(pieces[-1])
                start += len(pieces[-1])
                if not left:
                    start -= 1  # the next row begins with the last token of this one
                    yield pieces, attrs.evolve(before, inside=start)
                    pieces, left = [], self.seq_len + 1
            start = 0
        if pieces:  # the data end inside a row
            yield pieces, Cursor(epoch=before.epoch + 1, broken=before.broken)

    def _documents(
        self, cursor: Cursor, part: int, parts: int
    ) -> Iterator[tuple[NDArray[Any], Cursor]]:
        """Yield documents with their closing token, and the cursor before each."""
        before = attrs.evolve(cursor, inside=0)
        while self.epochs is None or before.epoch < self.epochs:
            is_empty = before.position is None
            records = self.documents.read(before.position, part=part, parts=parts)
            contents = self._contents(records, before)
            if self.tokenizer is not None:
                contents = encode_texts(self.tokenizer, contents)
            for after, ids in contents:
                if len(ids):
                    is_empty = False
                    yield np.append(ids, ids.dtype.type(self.eos_id)), before
                before = after
            if is_empty:
                raise ValueError(
                    f"reader {part} of {parts} found no document ({before.broken} are broken). "
                    "Stream at least as many documents as there are readers."
                )
            before = Cursor(epoch=before.epoch + 1, broken=before.broken)

    def _contents(self, records: Iterable[Record], cursor: Cursor) -> Iterator[tuple[Cursor, Any]]:
        """Yield the cursor after each document and its content; a broken one counts as empty."""
        broken = cursor.broken
        for record in records:
            content: Any = record.content
            if record.problem is not None:
                broken += 1
                content = () if self.tokenizer is None else ""
                if broken <= BROKEN_NAMED:
                    log.warning("left out: %s", printable(record.problem))
            is_text = isinstance(content, str)
            if is_text == (self.tokenizer is None):
                has, needs = ("text", "a tokenizer") if is_text else ("token ids", "no tokenizer")
                raise TypeError(
                    f"these documents are {has}, so the stream needs {needs}; pass it so."
                )
            ids = content if is_text else check_ids(record.name, content)
            yield Cursor(record.after, epoch=cursor.epoch, broken=broken), ids
