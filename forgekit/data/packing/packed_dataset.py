"""Rows of packed documents, read from a token file or from arrays as the bins say."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict

from forgekit.data.corpus.token_files import TokenFile, open_tokens
from forgekit.data.fingerprint import state_facts, tokenizer_of
from forgekit.data.packing.bins import Bins, pad_lengths
from forgekit.data.packing.pack import pack
from forgekit.data.packing.pieces import PieceReader, Pieces
from forgekit.data.samples import IGNORED, PADDING, apply_transforms, collate

Ints = NDArray[np.int64]
Transform: TypeAlias = Callable[[TensorDict], TensorDict]

PAD_POSITIONS = "forgekit.data.transforms.pad_positions"
PAD_PLACES = "forgekit.data.transforms.pad_places"
"""Its earlier name."""

_AT_ONCE = 2**20
"""Bins that are checked at once, to bound the memory of the check."""


def packed_dataset(
    documents: str | os.PathLike[str] | TokenFile | Sequence[ArrayLike],
    bins: Bins,
    *,
    transforms: Sequence[Transform] = (),
) -> PackedDataset:
    """Make a row of each bin.

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
    reader = PieceReader.of(documents)
    _check_bins(bins, reader)
    return PackedDataset(reader, bins, tuple(transforms))


@attrs.frozen(eq=False)
class PackedDataset:
    """Rows of packed documents; ``packed_dataset`` makes one.

    Attributes:
        documents: Reads pieces of documents.
        bins: The pieces of each row.
        transforms: Applied to each row, in order.
    """

    documents: PieceReader
    bins: Bins
    transforms: tuple[Transform, ...] = ()

    @property
    def seq_len(self) -> int:
        """Positions in a row."""
        return self.bins.capacity

    @property
    def file(self) -> TokenFile | None:
        """The token file; None if the documents are arrays."""
        return self.documents.file

    @property
    def vocab_size(self) -> int:
        """Every id is below it; of documents in memory one more than the highest id."""
        if self.file is not None:
            return self.file.vocab_size
        return 1 + max((int(ids.max()) for ids in self.documents.shards if len(ids)), default=0)

    @property
    def eos_id(self) -> int:
        """The id on padding: the one that closes each document of a token file, else 0."""
        return 0 if self.file is None else self.file.eos_id

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, from the metadata's ``text_bytes``; None if it has none."""
        return None if self.file is None else self.file.bytes_per_token

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the rows: equal strings mean the same row at each index.

        It covers the tokens, the bins, and the names of the transforms with the plain arguments
        of partial ones, but not what the transforms do.
        """
        names = [_name(transform) for transform in self.transforms]
        facts = f"{self.documents.fingerprint} packed {self.bins.fingerprint} {names}"
        return state_facts(
            hashlib.sha256(facts.encode()).hexdigest(),
            files=self.documents.fingerprint,
            tokenizer=None if self.file is None else tokenizer_of(self.file.path),
            seq_len=self.seq_len,
            packing=self.bins.fingerprint,
            transforms=names,
        )

    def held_out(self) -> PackedDataset | None:
        """Open the held-out documents that ``forgekit prepare`` wrote beside these.

        Returns:
            Their rows, packed by best fit with this capacity and alignment; None if the token file
            has no ``heldout`` folder, or the documents are arrays.
        """
        file = None if self.file is None else self.file.held_out()
        if file is None:
            return None
        bins = pack(np.diff(file.offsets), self.seq_len, align=self.bins.align)
        return packed_dataset(file, bins, transforms=self.transforms)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, row: int) -> TensorDict:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> TensorDict:
        """Build the batch of these rows in one go, ``batch_size=[b]``."""
        shape = (len(rows), self.seq_len)
        columns = self._columns(self._layout(rows), shape)
        tensors = {key: torch.from_numpy(column.reshape(shape)) for key, column in columns.items()}
        batch = TensorDict(tensors, batch_size=[len(rows)])
        if not self.transforms:
            return batch
        return collate([apply_transforms(row, self.transforms) for row in batch])

    def _layout(self, rows: Sequence[int]) -> Pieces:
        """Find the pieces of some rows, and their positions in the batch."""
        for row in rows:
            if not 0 <= row < len(self):
                raise IndexError(
                    f"row {row} must lie in range({len(self)}) of the packed documents."
                )
        at = np.asarray(rows, dtype=np.int64)
        first = self.bins.offsets[at]
        counts = self.bins.offsets[at + 1] - first
        before = np.cumsum(counts) - counts  # [rows] pieces of earlier rows in the batch
        numbers = np.arange(counts.sum()) - np.repeat(before, counts)
        pieces = np.repeat(first, counts) + numbers
        lengths = self.bins.lengths[pieces]
        padded = pad_lengths(lengths, self.bins.align)
        # Laid end to end pieces would start at `taken`; each row then moves to its own start.
        taken = np.cumsum(padded) - padded
        shift = np.arange(len(rows)) * self.seq_len - taken[before]
        positions = taken + np.repeat(shift, counts)
        documents, starts = self.bins.documents[pieces], self.bins.starts[pieces]
        return Pieces(documents, starts, lengths, numbers, positions)

    def _columns(self, pieces: Pieces, shape: tuple[int, int]) -> dict[str, Ints]:
        """Build the columns of a batch, rows laid end to end: all are ``[b * s]``."""
        size = shape[0] * shape[1]
        tokens = np.full(size, self.eos_id, dtype=np.int64)
        last_labels = self.documents.read(tokens, pieces)
        # [2 * pieces]: each piece and the padding behind it, alternating; a run may be empty.
        ends = pieces.positions + pieces.lengths
        starts = np.empty(2 * len(ends) + 1, dtype=np.int64)
        starts[:-1:2], starts[1::2], starts[-1] = pieces.positions, ends, size
        runs = starts[1:] - starts[:-1]
        ids = np.full(2 * len(ends), PADDING)
        ids[::2] = pieces.numbers
        doc_ids = np.repeat(ids, runs)
        position_ids = np.arange(size)
        position_ids -= np.repeat(starts[:-1], runs)  # in place: page faults cost more than this
        labels = np.empty_like(tokens)
        labels[:-1] = tokens[1:]
        labels[ends - 1] = last_labels
        if runs[1::2].any():
            is_padding = doc_ids == PADDING
            np.copyto(labels, IGNORED, where=is_padding)
            np.copyto(position_ids, 0, where=is_padding)
        return {
            "input_ids": tokens,
            "labels": labels,
            "doc_ids": doc_ids,
            "position_ids": position_ids,
        }


def _name(transform: Transform) -> str:
    """Name a function by its module and, if it is partial, by its plain arguments too.

    Fingerprints of saved runs hold these names, so renamed functions keep their earlier ones.
    """
    if isinstance(transform, partial):
        given = [*enumerate(transform.args), *sorted(transform.keywords.items())]
        plain = [(key, value) for key, value in given if isinstance(value, str | int | float)]
        name = _name(transform.func)
        if name == PAD_PLACES:
            plain = [("places" if key == "positions" else key, value) for key, value in plain]
        return f"{name} {plain}"
    named = transform if hasattr(transform, "__qualname__") else type(transform)
    name = f"{named.__module__}.{named.__qualname__}"
    name = name.replace("forgekit.data.batches.", "forgekit.data.")
    return PAD_PLACES if name == PAD_POSITIONS else name


def _check_bins(bins: Bins, documents: PieceReader) -> None:
    """Read all bins once, some at a time: a wrong one is found before training."""
    for first in range(0, len(bins), _AT_ONCE):
        offsets = bins.offsets[first : first + _AT_ONCE + 1]
        if (np.diff(offsets) < 1).any():
            raise ValueError(f"bin {first + int(np.diff(offsets).argmin())} holds no piece.")
        pieces = slice(int(offsets[0]), int(offsets[-1]))
        starts, lengths = bins.starts[pieces], bins.lengths[pieces]
        _check_pieces(bins.documents[pieces], starts, starts + lengths, documents.offsets)
        taken = np.add.reduceat(pad_lengths(lengths, bins.align), offsets[:-1] - offsets[0])
        if (taken > bins.capacity).any():
            worst = int(taken.argmax())
            raise ValueError(
                f"bin {first + worst} takes {taken[worst]} positions with pieces padded to "
                f"multiples of {bins.align}; the capacity is {bins.capacity}."
            )


def _check_pieces(numbers: Ints, starts: Ints, ends: Ints, offsets: Ints) -> None:
    documents = len(offsets) - 1
    if numbers.min() < 0 or numbers.max() >= documents:
        wrong = numbers.min() if numbers.min() < 0 else numbers.max()
        raise ValueError(
            f"the bins name document {wrong}; there are {documents} documents. "
            "The bins were made for others: pack these."
        )
    lengths = offsets[numbers + 1] - offsets[numbers]
    if (wrong := (starts < 0) | (ends <= starts) | (ends > lengths)).any():
        at = int(wrong.argmax())
        raise ValueError(
            f"the bins name tokens {starts[at]}:{ends[at]} of document {numbers[at]}, which has "
            f"{lengths[at]}. The bins were made for other documents: pack these."
        )
