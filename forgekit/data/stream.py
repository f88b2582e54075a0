"""Documents as a stream of micro-batches, without token files: for data that is never on this disk.

A stream replaces the loader in a recipe. It cannot be divided among other ranks, so its
position belongs to its rank, and another number of ranks cannot resume it. Data that fits on a disk
is better prepared: token files shuffle, pack, and resume on any number of ranks.

Tokens fill rows in their order; a document continues in the next row. Every token that follows
another one of its document is a target once. The position between two micro-batches is a small
value, a cursor: the source's position before the document that the next row begins in, and how many
tokens of this document are used::

    documents   1 2 3 $ | 4 5 6 7 8 9 $          ($ closes a document)
    row 0       1 2 3 $ 4 5 (6)                   seq_len 6: inputs, and the last label
    row 1       6 7 8 9 $                         cursor: position of the second document, inside 2
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict
from torch.utils.data import get_worker_info

from forgekit.checks import check_integers, check_rank
from forgekit.data.batch import apply_transforms
from forgekit.data.documents import (
    BROKEN_NAMED,
    Documents,
    Record,
    as_documents,
    check_ids,
)
from forgekit.data.groups import count_micro_batches
from forgekit.data.read_ahead import Reader, compute_ahead
from forgekit.data.rows import Piece, fill_rows
from forgekit.data.tokenizer import (
    END_OF_TEXT,
    beginning_ids,
    encode_texts,
    end_of_text,
    load_tokenizer,
    token_id,
)
from forgekit.terminal import printable

log = logging.getLogger("forgekit")


def stream_documents(
    documents: Documents | Iterable[Any],
    seq_len: int = 1024,
    batch_size: int = 8,
    *,
    tokenizer: Any = None,
    eos_id: int | None = None,
    rank: int = 0,
    world: int = 1,
    epochs: int | None = None,
    workers: Literal[0, 1] = 0,
    transforms: Sequence[Callable[[TensorDict], TensorDict]] = (),
) -> DocumentStream:
    """Stream documents as one data-parallel rank's micro-batches, in their own order.

    Rows hold the tokens of successive documents, each closed by ``eos_id``; a document continues in
    the next row. ``doc_ids`` and ``position_ids`` separate documents, and no label crosses from one
    into the next. Every token that follows another one of its document is a target once per epoch.

    Pass the stream to ``forgekit.groups`` like a loader. Keep it in a field of the state, and
    checkpoints save its position, one per rank::

        @attrs.frozen(kw_only=True, slots=True, eq=False)
        class State(fk.TrainState):
            stream: fk.data.DocumentStream = attrs.field(repr=False)

    Args:
        documents: What ``text_documents``, ``huggingface_documents`` or
            ``random_documents`` returns, or a list of texts or arrays.
        seq_len: Positions in a row.
        batch_size: Rows per rank and micro-batch.
        tokenizer: Encodes texts: what ``load_tokenizer`` returns, or the path that it takes. None
            for token ids.
        eos_id: The id that closes a document; by default that of ``eos_token`` in the settings
            beside a tokenizer given by its path, else of ``<|endoftext|>``.
        rank: This data-parallel rank. The ranks share the documents, and so do the workers of
            torch's ``DataLoader``; none is read twice.
        world: Number of data-parallel ranks.
        epochs: None never ends. A number ends after that many, with padding in the last rows; ranks
            then end after different steps, see ``DataEnd``.
        workers: 1 reads ahead in a thread. The batches are the same.
        transforms: Functions of a micro-batch that return one, applied in this order.

    Returns:
        A stream, to be used in ``for``; it has ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: If ``documents`` can be read only once.
        ValueError: If a number is out of range, or the tokenizer has no token to close documents.

    Examples:
        >>> stream = stream_documents([[1, 2, 3], [4, 5]], 4, 1, eos_id=0, epochs=1)
        >>> for batch in stream:
        ...     print(batch["input_ids"].tolist(), batch["labels"].tolist())
        [[1, 2, 3, 0]] [[2, 3, 0, -100]]
        [[4, 5, 0, 0]] [[5, 0, -100, -100]]
    """
    check_rank(rank, world)
    check_integers(seq_len=(seq_len, 1), batch_size=(batch_size, 1), workers=(workers, 0, 1))
    check_integers(epochs=(1 if epochs is None else epochs, 1))
    is_path = isinstance(tokenizer, str | os.PathLike)
    end = end_of_text(tokenizer) if is_path and eos_id is None else END_OF_TEXT
    tokenizer = load_tokenizer(tokenizer) if is_path else tokenizer
    eos_id = token_id(tokenizer, end) if eos_id is None else eos_id
    rows = DocumentRows(
        as_documents(documents), tokenizer, eos_id, seq_len, batch_size, epochs, tuple(transforms)
    )
    return DocumentStream(rows, rank, world, workers)


class DocumentStream:
    """One rank's micro-batches from documents; ``stream_documents`` makes one.

    It has one position: a second ``for`` continues where the first one stopped. Close it, or use it
    in ``with``, to stop its thread early.

    Attributes:
        world: Number of data-parallel ranks that share the documents.
        cursor: Its position, with counts of what this rank has read.
        fingerprint: Identifies the documents, as their source does.
    """

    def __init__(self, rows: DocumentRows, rank: int, world: int, workers: int) -> None:
        self.world = world
        self.fingerprint = rows.documents.fingerprint  # looks at every file, so only once
        if begin := [] if rows.tokenizer is None else beginning_ids(rows.tokenizer):
            self.fingerprint += f" each begins with {begin}"  # which a position counts
        self._rows = rows
        self._rank = rank
        self._workers = workers
        self.cursor = Cursor()
        self._reader = Reader()
        self._next: tuple[TensorDict, Cursor] | None = None  # read, and not yet handed out

    @property
    def wait_seconds(self) -> float:
        """How long the consumer has waited, over all micro-batches."""
        return self._reader.wait_seconds

    @property
    def is_endless(self) -> bool:
        """Whether it repeats its epochs without end."""
        return self._rows.epochs is None

    def micro_batches(self, global_batch_size: int) -> int:
        """Count the micro-batches per optimizer step; see ``Loader.micro_batches``."""
        return count_micro_batches(global_batch_size, self._rows.batch_size, self.world)

    def padding(self) -> TensorDict:
        """Make a micro-batch without a document, for a rank that has none."""
        return self._rows.batch([])

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last micro-batch, in JSON values."""
        part, parts = self._part()
        facts = {"fingerprint": self.fingerprint, "reader": part, "readers": parts}
        return {**facts, **attrs.asdict(self.cursor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, exactly.

        Raises:
            ValueError: If it is the position of another reader, of another number of readers, or
                in other documents.
        """
        now = self.state_dict()
        if state["fingerprint"] != now["fingerprint"]:
            raise ValueError("the position is in other documents; stream those, or start again.")
        if any(state[name] != now[name] for name in ("reader", "readers")):
            raise ValueError(
                f"the position belongs to reader {state['reader']} of {state['readers']}, but this "
                f"is reader {now['reader']} of {now['readers']}. Resume on the same number of "
                "ranks and workers, or prepare token files, which resume on any number."
            )
        self.close()
        self.cursor = Cursor(**{name: state[name] for name in attrs.asdict(self.cursor)})

    def has_next(self) -> bool:
        """Whether a micro-batch follows; the position stays before it."""
        with contextlib.suppress(StopIteration):
            self._next = self._next or self._reader.take(self._open)
        return self._next is not None

    def __iter__(self) -> Iterator[TensorDict]:
        while self.has_next():
            assert self._next is not None
            (batch, self.cursor), self._next = self._next, None
            yield batch

    def __enter__(self) -> DocumentStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread. Iterating again continues from the same position."""
        self._reader.close()
        self._next = None

    def _open(self) -> Generator[Any]:
        batches = self._rows.read(self.cursor, *self._part())
        return compute_ahead(lambda batch: batch, batches, workers=self._workers)

    def _part(self) -> tuple[int, int]:
        """Number this reader among all: ranks, and workers of torch's DataLoader on each."""
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self._rank * workers + worker, self.world * workers


@attrs.frozen
class Cursor:
    """The position of a reader between two micro-batches.

    Attributes:
        position: The source's, before the document that the next row begins in.
        inside: Tokens of that document before the next row.
        epoch: How often the source was read to its end.
        broken: Documents left out so far because they could not be read.
    """

    position: Any = None
    inside: int = 0
    epoch: int = 0
    broken: int = 0


@attrs.frozen
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
        rows = self._rows(cursor, part, parts)
        while batch := list(itertools.islice(rows, self.batch_size)):
            _, after = batch[-1]
            yield self.batch([pieces for pieces, _ in batch]), after

    def batch(self, rows: list[list[Piece]]) -> TensorDict:
        """Build a micro-batch; rows that the data do not fill are padding."""
        missing: list[list[Piece]] = [[]] * (self.batch_size - len(rows))
        batch = fill_rows([*rows, *missing], self.seq_len, self.eos_id)
        return apply_transforms(batch, self.transforms)

    def _rows(self, cursor: Cursor, part: int, parts: int) -> Iterator[tuple[list[Piece], Cursor]]:
        """Yield the pieces of each row, ``seq_len`` tokens in all, and the cursor after it."""
        pieces: list[Piece] = []
        left, start = self.seq_len, cursor.inside
        before = cursor
        for ids, before in self._documents(cursor, part, parts):
            if not left:  # the row ended with its last document; now the cursor behind it is known
                yield pieces, before
                pieces, left = [], self.seq_len
            while len(ids) - start > 1:  # a closing token has no target, so it begins no row
                tokens, labels = ids[start : start + left], ids[start + 1 : start + left + 1]
                pieces.append((tokens, labels))
                left -= len(tokens)
                start += len(tokens)
                if not left and len(ids) - start > 0:
                    yield pieces, attrs.evolve(before, inside=start)
                    pieces, left = [], self.seq_len
            start = 0
        if pieces:  # the data end inside a row, or with it
            yield pieces, Cursor(epoch=before.epoch + 1, broken=before.broken)

    def _documents(
        self, cursor: Cursor, part: int, parts: int
    ) -> Iterator[tuple[NDArray[Any], Cursor]]:
        """Yield documents with their closing token, and the cursor before each."""
        before = attrs.evolve(cursor, inside=0)
        while self.epochs is None or before.epoch < self.epochs:
            is_empty = before.position is None
            records = self.documents.read(before.position, part=part, parts=parts)
            for record, ids in self._encoded(records):
                if len(ids):
                    is_empty = False
                    yield np.append(ids, ids.dtype.type(self.eos_id)), before
                broken = before.broken
                if record.problem is not None:
                    broken += 1
                    if broken <= BROKEN_NAMED:
                        log.warning("left out: %s", printable(record.problem))
                before = Cursor(record.after, epoch=before.epoch, broken=broken)
            if is_empty:
                raise ValueError(
                    f"reader {part} of {parts} has no document ({before.broken} are broken); "
                    "each reader needs at least one."
                )
            before = Cursor(epoch=before.epoch + 1, broken=before.broken)

    def _encoded(self, records: Iterable[Record]) -> Iterator[tuple[Record, NDArray[Any]]]:
        """Yield records and their token ids; a broken one has none."""
        nothing: Any = () if self.tokenizer is None else ""
        pairs: Any = ((each, nothing if each.problem else each.content) for each in records)
        if self.tokenizer is None:
            return ((record, check_ids(record.name, ids)) for record, ids in pairs)
        return encode_texts(self.tokenizer, pairs)
