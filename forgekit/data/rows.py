"""Rows for training, windows over a token file or packed documents, by one builder."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict

from forgekit.checks import check_integers
from forgekit.data.batch import FILL, IGNORED, PADDING, TEACHER, apply_transforms, collate
from forgekit.data.documents import check_ids, tokens_of
from forgekit.data.packing import Bins, pack
from forgekit.data.token_files import TokenFile, open_tokens
from forgekit.hashing import digest, state_facts, tokenizer_of

Ints = NDArray[np.int64]
Transform: TypeAlias = Callable[[TensorDict], TensorDict]

Piece: TypeAlias = "tuple[NDArray[Any], NDArray[Any]]"
"""Tokens of a piece of a document, with a teacher's rows where there are any, and their labels, the
next tokens: one less at its end."""

AT_ONCE = 2**20
"""Pieces checked at once, which bounds memory."""


def fill_rows(
    rows: Sequence[Iterable[Piece]], seq_len: int, padding: int, align: int = 1
) -> TensorDict:
    """Build the rows of a micro-batch from pieces of documents.

    Args:
        rows: The pieces of each row.
        seq_len: Positions in a row.
        padding: The token id on padding.
        align: Pieces are padded to multiples of it.

    Returns:
        ``[b s]`` int64 tensors ``input_ids``; ``labels``, -100 where there is none; ``doc_ids``,
        the number of the piece within its row, -1 on padding; and ``position_ids``; with a
        teacher's rows also these, ``[b s k]``, with ids of -100 on padding.
    """
    shape = len(rows), seq_len
    ids, labels = np.full(shape, padding, np.int64), np.full(shape, IGNORED)
    doc_ids, position_ids = np.full(shape, PADDING), np.zeros(shape, np.int64)
    columns = {"input_ids": ids, "labels": labels, "doc_ids": doc_ids, "position_ids": position_ids}
    for row, pieces in enumerate(rows):
        at = 0
        for number, (tokens, following) in enumerate(pieces):
            here = slice(at, at + len(tokens))
            ids[row, here] = tokens_of(tokens)
            for key in TEACHER if tokens.dtype.names else ():
                full = (*shape, tokens[key].shape[1]), FILL.get(key, 0), tokens[key].dtype
                columns[key] = columns[key] if key in columns else np.full(*full)
                columns[key][row, here] = tokens[key]
            labels[row, at : at + len(following)] = following
            doc_ids[row, here] = number
            position_ids[row, here] = np.arange(len(tokens))
            at += -(-len(tokens) // align) * align
    tensors = {key: torch.from_numpy(column) for key, column in columns.items()}
    return TensorDict(tensors, batch_size=[len(rows)])


def token_dataset(
    path: str | os.PathLike[str] | TokenFile, seq_len: int = 1024, *, doc_ids: bool = False
) -> RowDataset:
    """Divide a token file into windows of ``seq_len`` targets that overlap by one token.

    So every token but the very first is a target exactly once. The first token of a document is the
    target of the token that closes the document before. The last window may be short; it is padded
    with the closing token and labels of -100.

    Args:
        path: What ``write_tokens`` wrote, or what ``open_tokens`` returned.
        seq_len: Positions in a row.
        doc_ids: Add ``doc_ids``, the number of the document within its row (-1 on padding), and
            ``position_ids``, which restart where a document starts and at the start of the row.

    Returns:
        A map-style dataset: ``[i]`` is a TensorDict of ``[s]`` int64 tensors ``input_ids`` and
        ``labels``; ``labels[t]`` is the token after ``input_ids[t]``. Of a file with a teacher's
        rows (``write_tokens``) also ``teacher_ids`` int32 and ``teacher_log_probs``, ``[s k]``.

    Raises:
        ValueError: If ``seq_len`` is not positive.

    Examples:
        >>> import tempfile
        >>> from forgekit.data.token_files import write_tokens
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = write_tokens(f"{folder}/a", [[1, 2], [3]], vocab_size=4, eos_id=0)
        ...     rows = token_dataset(file, seq_len=3)
        ...     [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows]
        [([1, 2, 0], [2, 0, 3]), ([3, 0, 0], [0, -100, -100])]
    """
    check_integers(seq_len=(seq_len, 1))
    file = path if isinstance(path, TokenFile) else open_tokens(path)
    return RowDataset(file, seq_len, doc_ids=doc_ids)


def packed_dataset(
    documents: str | os.PathLike[str] | TokenFile | Sequence[ArrayLike],
    bins: Bins,
    *,
    transforms: Sequence[Transform] = (),
) -> RowDataset:
    """Make one row of each bin.

    Labels are made inside documents: the label of a token is the next one of its document, even if
    a split put that into another row. So every token is an input once, and every token but the
    first of its document is a target once; the last token of a document, and padding, have the
    label -100.

    Args:
        documents: A token file, its path, or 1-D arrays (or lists, or CPU tensors) of token ids.
        bins: What ``pack`` or ``cached_bins`` made of their lengths. The rows have its capacity.
        transforms: Functions of a row, a TensorDict of ``[s]`` tensors, that return one; applied
            in order. Without any, whole micro-batches are built at once, which is faster.

    Returns:
        A map-style dataset: ``[i]`` is a TensorDict of ``[s]`` int64 tensors ``input_ids``,
        ``labels``, ``doc_ids``, the number of the piece within its row (-1 on padding), and
        ``position_ids``, which restart at 0 with each piece, also with the later pieces of a split
        document: the tokens before are not in the row, so attention cannot reach them.

    Raises:
        ValueError: If the bins were made for other documents.

    Examples:
        >>> documents = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35]]
        >>> rows = packed_dataset(documents, pack([3, 2, 5], capacity=4))
        >>> for row in rows:
        ...     print(*(row[key].tolist() for key in ("input_ids", "labels", "doc_ids")))
        [31, 32, 33, 34] [32, 33, 34, 35] [0, 0, 0, 0]
        [11, 12, 13, 35] [12, 13, -100, -100] [0, 0, 0, 1]
        [21, 22, 0, 0] [22, -100, -100, -100] [0, 0, -1, -1]
    """
    if isinstance(documents, str | os.PathLike):
        documents = open_tokens(documents)
    tokens = documents if isinstance(documents, TokenFile) else InMemory.of(documents)
    _check_bins(bins, tokens.offsets)
    return RowDataset(tokens, bins.capacity, bins, transforms=tuple(transforms))


@attrs.frozen(eq=False)
class InMemory:
    """Documents in memory, with the interface of a token file.

    Attributes:
        ids: ``[tokens]`` of all documents.
        offsets: ``[documents + 1]``: where each document starts, and the end of the last.
        labels: ``[tokens]``: the token itself, or -100 where it is not a target.
        vocab_size: Every id is below it.
        eos_id: The id on padding.
    """

    ids: NDArray[Any] = attrs.field(repr=False)
    offsets: Ints = attrs.field(repr=False)
    labels: NDArray[Any] = attrs.field(repr=False)
    vocab_size: int
    eos_id: int = 0

    path = bytes_per_token = None

    @classmethod
    def of(cls, documents: Sequence[ArrayLike]) -> InMemory:
        """Join arrays, lists or CPU tensors of token ids."""
        arrays = [check_ids(f"document {number}", ids) for number, ids in enumerate(documents)]
        ids = np.concatenate([np.zeros(0, np.int64), *arrays]).astype(np.int64)
        return cls(ids, np.cumsum([0, *map(len, arrays)]), ids, 1 + int(ids.max(initial=0)))

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens and labels."""
        return digest(self.offsets, self.ids, self.labels)


@attrs.frozen(eq=False)
class RowDataset:
    """Rows of documents, made by ``token_dataset``, ``packed_dataset`` or ``chat_dataset``.

    Attributes:
        documents: A token file, or documents in memory.
        seq_len: Positions in a row.
        bins: The pieces of each row; None for windows over the tokens.
        doc_ids: Whether rows carry ``doc_ids`` and ``position_ids``.
        transforms: Applied to each row, in order.
        counts: What became of the lines that conversations were read from.
        rest: Rows of held-out documents in memory.
        window: Length of the windows that are cut into rows; 0: that of the rows.
    """

    documents: TokenFile | InMemory
    seq_len: int
    bins: Bins | None = None
    doc_ids: bool = True
    transforms: tuple[Transform, ...] = ()
    counts: Any = None
    rest: RowDataset | None = attrs.field(default=None, repr=False)
    window: int = 0

    @property
    def file(self) -> TokenFile | None:
        """The token file; None if the documents are in memory."""
        return self.documents if isinstance(self.documents, TokenFile) else None

    @property
    def vocab_size(self) -> int:
        """Upper bound of the ids; for arrays in memory the highest id plus one."""
        return self.documents.vocab_size

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, from the metadata's ``text_bytes``; None if it has none."""
        return self.documents.bytes_per_token

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the rows: equal strings mean the same row at each index.

        It covers the tokens, the bins, and the names of the transforms with the plain arguments
        of partial ones, but not what the transforms do.
        """
        facts: dict[str, Any] = {"doc_ids": self.doc_ids}
        if self.bins is not None:
            names = [_name(transform) for transform in self.transforms]
            facts = {"packing": self.bins.fingerprint, "transforms": names}
        tokenizer = tokenizer_of(self.documents.path)
        files = self.documents.fingerprint
        return state_facts(files=files, tokenizer=tokenizer, seq_len=self.seq_len, **facts)

    def fingerprint_at(self, _samples: int) -> str:
        """Fingerprint of the rows, which is the same for the first samples; as of a mixture."""
        return self.fingerprint

    def held_out(self) -> RowDataset | None:
        """Open the held-out documents that ``forgekit prepare`` wrote beside the training ones.

        Returns:
            Their rows, of the same length, packed by best fit if these are packed; None if there
            are none.
        """
        file = None if self.file is None else self.file.held_out()
        if file is None:
            return self.rest
        bins = None
        if self.bins is not None:
            bins = pack(np.diff(file.offsets), self.seq_len, align=self.bins.align)
        return attrs.evolve(self, documents=file, bins=bins)

    def __len__(self) -> int:
        if self.bins is not None:
            return len(self.bins)
        window = self.window or self.seq_len
        return -(-(int(self.documents.offsets[-1]) - 1) // window) * (window // self.seq_len)

    def __getitem__(self, row: int) -> TensorDict:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> TensorDict:
        """Build the batch of these rows, ``batch_size=[b]``."""
        spans = [self._spans(int(row)) for row in rows]
        if isinstance(self.documents, TokenFile):
            self.documents.prefetch(itertools.chain.from_iterable(spans))
        pieces = [[self._read(*span) for span in of_row] for of_row in spans]
        align = 1 if self.bins is None else self.bins.align
        batch = fill_rows(pieces, self.seq_len, self.documents.eos_id, align)
        if not self.doc_ids:
            batch = batch.exclude("doc_ids", "position_ids")
        if self.transforms:
            batch = collate([apply_transforms(row, self.transforms) for row in batch])
        return batch

    def _spans(self, row: int) -> list[list[int]]:
        """Return the pieces of a row as (first token, stop, stop of its labels)."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} must lie in range({len(self)}).")
        offsets = self.documents.offsets
        if self.bins is None:
            last = int(offsets[-1]) - 1  # labels are the next tokens
            start, stop = (min(at * self.seq_len, last) for at in (row, row + 1))
            inner = offsets[slice(*np.searchsorted(offsets, [start + 1, stop]))].tolist()
            ends = [*inner, stop] if self.doc_ids else [stop]
            return [[a, b, b + 1] for a, b in itertools.pairwise([start, *ends])]
        # The label of a piece's last token is the document's next one; at its end there is none.
        here = slice(*self.bins.offsets[row : row + 2].tolist())
        documents = self.bins.documents[here]
        starts = offsets[documents] + self.bins.starts[here]
        stops = starts + self.bins.lengths[here]
        ends = np.minimum(stops + 1, offsets[documents + 1])
        return np.stack([starts, stops, ends], 1).tolist()

    def _read(self, start: int, stop: int, end: int) -> Piece:
        """Read the tokens ``start`` to ``stop`` and their labels, which end before ``end``."""
        if isinstance(self.documents, TokenFile):
            tokens = self.documents.read(start, end)
            return tokens[: stop - start], tokens_of(tokens)[1:]
        return self.documents.ids[start:stop], self.documents.labels[start + 1 : end]


def check_vocabulary(dataset: Any, vocab_size: int) -> None:
    """Raise if a model's vocabulary is too small for a dataset.

    Args:
        dataset: Has a ``vocab_size``, or as a mixture several ``datasets`` that do.
        vocab_size: The model's number of token ids.

    Raises:
        ValueError: If the dataset may hold larger ids: an embedding would fail on the first one.
    """
    for part in getattr(dataset, "datasets", (dataset,)):
        if vocab_size < part.vocab_size:
            where = getattr(getattr(part, "file", None), "path", "its documents")
            raise ValueError(
                f"vocab_size {vocab_size} of the model is below the {part.vocab_size} of {where}; "
                f"set model.vocab_size={part.vocab_size} or more."
            )


def _name(transform: Transform) -> str:
    """Name a function with its module and, if it is partial, its plain arguments."""
    if isinstance(transform, partial):
        given = [*enumerate(transform.args), *sorted(transform.keywords.items())]
        plain = [(key, value) for key, value in given if isinstance(value, str | int | float)]
        return f"{_name(transform.func)} {plain}"
    named = transform if hasattr(transform, "__qualname__") else type(transform)
    return f"{named.__module__}.{named.__qualname__}"


def _check_bins(bins: Bins, offsets: Ints) -> None:
    """Check all bins against the documents: bins of others would train on wrong tokens."""
    tokens = np.diff(offsets)
    for first in range(0, len(bins.documents), AT_ONCE):
        here = slice(first, first + AT_ONCE)
        documents, starts, lengths = bins.documents[here], bins.starts[here], bins.lengths[here]
        fits = (documents >= 0) & (documents < len(tokens)) & (starts >= 0) & (lengths > 0)
        fits[fits] = (starts + lengths)[fits] <= tokens[documents[fits]]
        if not fits.all():
            wrong = int(fits.argmin())
            raise ValueError(
                f"the bins refer to {lengths[wrong]} tokens from token {starts[wrong]} of document "
                f"{documents[wrong]}, which these documents do not have; pack them again."
            )
