"""Streamed documents as micro-batches; each comes with the position of the next one.

Tokens fill rows in their order; a document continues in the next row. Rows overlap by one token, so
every token that follows another one of its document is a target once. The position between two
micro-batches is a small value, a cursor: the source's position before the document that the next
row begins in, and how many tokens of this document are used::

    documents   1 2 3 $ | 4 5 6 7 8 9 $          ($ closes a document)
    row 0       1 2 3 $ 4 5 (6)                   seq_len 6: inputs, and the last label
    row 1       6 7 8 9 $                         cursor: position of the second document, inside 2
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from forgekit.data.batches.batch import shift_labels
from forgekit.data.corpus.encode import encode_texts
from forgekit.data.documents.protocol import Documents, Record, check_ids
from forgekit.data.samples import PADDING, apply_transforms
from forgekit.terminal import printable

__all__ = ["Cursor", "DocumentRows"]

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


@attrs.frozen
class _Document:
    """A document's tokens, with the closing one, and the position before it."""

    ids: NDArray[Any]
    position: Any
    epoch: int
    broken: int


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
        ahead = _Ahead(self._documents(cursor, part, parts), cursor)
        while True:
            rows = []
            while len(rows) < self.batch_size and ahead.fill(self.seq_len + 1):
                rows.append(ahead.take(self.seq_len))
            if not rows:
                return
            cursor = attrs.evolve(ahead.cursor(), rows=cursor.rows + len(rows))
            yield self._batch(rows), cursor

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

    def _documents(self, cursor: Cursor, part: int, parts: int) -> Iterator[_Document]:
        """Read documents from a cursor, epoch after epoch."""
        position, epoch, broken = cursor.position, cursor.epoch, cursor.broken

        def intact(records: Iterable[Record]) -> Iterator[tuple[tuple[Any, int], Any]]:
            """Yield the position after a document, the broken ones up to it, and its content."""
            nonlocal broken
            for record in records:
                if record.problem is not None:
                    broken += 1
                    if broken <= BROKEN_NAMED:
                        log.warning("left out: %s", printable(record.problem))
                    continue
                content: Any = record.content
                if not isinstance(content, str):
                    content = check_ids(record.name, content)
                yield (record.after, broken), content

        while self.epochs is None or epoch < self.epochs:
            found, is_whole = 0, position is None
            contents = intact(self.documents.read(position, part=part, parts=parts))
            # Encoding reads ahead, so `broken` may count more than what comes before `ids`.
            for (after, broken_before), ids in self._encode(contents):
                if len(ids):
                    found += 1
                    closed = np.append(ids, ids.dtype.type(self.eos_id))
                    yield _Document(closed, position, epoch, broken_before)
                position = after
            if is_whole and not found:
                raise ValueError(
                    f"reader {part} of {parts} found no document ({broken} are broken). "
                    "Stream at least as many documents as there are readers."
                )
            position, epoch = None, epoch + 1

    def _encode(
        self, contents: Iterator[tuple[tuple[Any, int], Any]]
    ) -> Iterator[tuple[tuple[Any, int], NDArray[Any]]]:
        first = next(contents, None)
        if first is None:
            return iter(())
        is_text = isinstance(first[1], str)
        if is_text == (self.tokenizer is None):
            has, needs = ("text", "a tokenizer") if is_text else ("token ids", "no tokenizer")
            raise TypeError(f"these documents are {has}, so the stream needs {needs}; pass it so.")
        contents = chain([first], contents)
        return encode_texts(self.tokenizer, contents) if is_text else contents


class _Ahead:
    """The documents that were read and not used up, and the position in the first of them."""

    def __init__(self, documents: Iterator[_Document], cursor: Cursor) -> None:
        self._documents = documents
        self._pending: deque[_Document] = deque()
        self._start = cursor.inside
        self._tokens = -cursor.inside
        self._end = cursor

    def fill(self, tokens: int) -> bool:
        """Read until there are this many tokens, or no more; False if no target is left."""
        while self._tokens < tokens and (document := next(self._documents, None)) is not None:
            self._pending.append(document)
            self._tokens += len(document.ids)
            self._end = Cursor(epoch=document.epoch + 1, broken=document.broken)
        return self._tokens >= 2

    def take(self, seq_len: int) -> list[NDArray[Any]]:
        """Take the ``seq_len + 1`` tokens of a row; the next row begins with the last one."""
        pieces, left, start = [], seq_len + 1, self._start
        for document in self._pending:
            pieces.append(document.ids[start : start + left])
            left, start = left - len(pieces[-1]), 0
            if not left:
                break
        self._pass(seq_len if not left else seq_len + 1 - left)
        if self._pending and len(self._pending[0].ids) - self._start == 1:
            self._pass(1)  # a closing token has no target, so it begins no row
        return pieces

    def cursor(self) -> Cursor:
        """Return the position at which the next row begins."""
        if not self.fill(1):
            return self._end
        first = self._pending[0]
        return Cursor(first.position, self._start, first.epoch, broken=first.broken)

    def _pass(self, tokens: int) -> None:
        self._tokens -= tokens
        while tokens:
            rest = len(self._pending[0].ids) - self._start
            if tokens < rest:
                self._start += tokens
                return
            self._pending.popleft()
            self._start, tokens = 0, tokens - rest
