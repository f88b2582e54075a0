"""Rows of packed documents: what the bins say, read from a token file or from arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict

from forgekit.data.corpus.token_files import TokenFile, open_tokens
from forgekit.data.fingerprint import state_facts, tokenizer_of
from forgekit.data.packing.bins import Bins, rooms_of
from forgekit.data.packing.pack import pack
from forgekit.data.packing.pieces import ArrayDocuments, FileDocuments, Pieces
from forgekit.data.samples import IGNORED, PADDING, apply_transforms, collate

__all__ = ["PackedDataset", "Transform", "packed_dataset"]

Ints = NDArray[np.int64]
Transform: TypeAlias = Callable[[TensorDict], TensorDict]

_AT_ONCE = 2**20
"""Pieces that are checked at once, so that a large corpus needs no memory for it."""


def packed_dataset(
    documents: str | os.PathLike[str] | TokenFile | Sequence[ArrayLike],
    bins: Bins,
    *,
    transforms: Sequence[Transform] = (),
) -> PackedDataset:
    """Make a row of each bin.

    Labels are made inside documents: the label of a token is the one that follows it in its
    document, also where that lies in another row because the document was split. So every token is
    an input once, and every token but the first of its document is a target once; the last token
    of a document, and padding, have the label -100.

    Args:
        documents: A token file, its path, or 1-D arrays (or lists, or CPU tensors) of token ids.
        bins: What ``pack`` or ``cached_bins`` made of their lengths. The rows have its capacity.
        transforms: Functions of a row, a TensorDict of ``[s]`` tensors, that return one; applied
            in order. Without any, whole micro-batches are built at once, which is faster.

    Returns:
        A map-style dataset: ``[i]`` is a TensorDict of ``[s]`` int64 tensors ``input_ids``,
        ``labels``, ``doc_ids``, the number of the piece within its row (-1 on padding), and
        ``position_ids``, which restart at 0 with each piece, the later pieces of a split document
        included: what came before is not in the row to attend to.

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
    is_file = isinstance(documents, TokenFile)
    source = FileDocuments.of(documents) if is_file else ArrayDocuments(documents)
    _check_bins(bins, source)
    return PackedDataset(source, bins, tuple(transforms))


@attrs.frozen(eq=False)
class PackedDataset:
    """Rows of packed documents; ``packed_dataset`` makes one.

    Attributes:
        documents: Reads pieces of documents.
        bins: The pieces of each row.
        transforms: Functions that each row goes through.
    """

    documents: FileDocuments | ArrayDocuments
    bins: Bins
    transforms: tuple[Transform, ...] = ()

    @property
    def seq_len(self) -> int:
        """Places in a row."""
        return self.bins.capacity

    @property
    def file(self) -> TokenFile | None:
        """The token file; None if the documents are arrays."""
        return getattr(self.documents, "file", None)

    @property
    def vocab_size(self) -> int:
        """Every id is below it."""
        return self.documents.vocab_size

    @property
    def eos_id(self) -> int:
        """The id that padding holds: what closes each document of a token file, else 0."""
        return self.documents.eos_id

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per token, from the metadata's ``text_bytes``; None if it has none."""
        if self.file is None or "text_bytes" not in self.file.metadata:
            return None
        return self.file.metadata["text_bytes"] / self.file.tokens

    @property
    def fingerprint(self) -> str:
        """Names the rows: the same string means the same row at each index.

        It covers the tokens, the bins, and the names of the transforms with the plain arguments
        of partial ones, but not what they do.
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
        """Open the held-out documents that ``forgekit prepare`` put beside these, if it did.

        Returns:
            Their rows, packed by best fit with this capacity and alignment; None if the token file
            has no ``heldout`` folder, or the documents are arrays.
        """
        if self.file is None or not (self.file.path / "heldout").is_dir():
            return None
        file = open_tokens(self.file.path / "heldout")
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
        for row in rows:
            if not 0 <= row < len(self.bins):
                raise IndexError(
                    f"row {row} must lie in range({len(self)}) of the packed documents."
                )
        at = np.asarray(rows, dtype=np.int64)
        first = self.bins.offsets[at]
        counts = self.bins.offsets[at + 1] - first
        before = np.cumsum(counts) - counts
        number = np.arange(counts.sum()) - np.repeat(before, counts)
        pieces = np.repeat(first, counts) + number
        lengths = self.bins.lengths[pieces]
        rooms = rooms_of(lengths, self.bins.align)
        taken = np.cumsum(rooms) - rooms
        shift = np.arange(len(rows)) * self.seq_len - taken[before]
        return Pieces(
            self.bins.documents[pieces],
            self.bins.starts[pieces],
            lengths,
            number,
            taken + np.repeat(shift, counts),
        )

    def _columns(self, at: Pieces, shape: tuple[int, int]) -> dict[str, Ints]:
        places = shape[0] * shape[1]
        tokens = np.full(places, self.eos_id, dtype=np.int64)
        following = self.documents.read(tokens, at)
        # Each piece and the padding behind it, by turns.
        runs = np.empty((len(at.places), 2), dtype=np.int64)
        runs[:, 0] = at.lengths
        runs[:, 1] = np.append(at.places, places)[1:] - at.places - at.lengths
        ids, begins = np.full_like(runs, PADDING), np.empty_like(runs)
        ids[:, 0] = at.numbers
        begins[:, 0] = at.places
        begins[:, 1] = at.places + at.lengths
        doc_ids = np.repeat(ids.ravel(), runs.ravel())
        position_ids = _count(places) - np.repeat(begins.ravel(), runs.ravel())
        labels = np.empty_like(tokens)
        labels[:-1] = tokens[1:]
        labels[begins[:, 1] - 1] = following
        if runs[:, 1].any():
            is_padding = doc_ids == PADDING
            np.copyto(labels, IGNORED, where=is_padding)
            np.copyto(position_ids, 0, where=is_padding)
        return {
            "input_ids": tokens,
            "labels": labels,
            "doc_ids": doc_ids,
            "position_ids": position_ids,
        }


@cache
def _count(places: int) -> Ints:
    return np.arange(places)


def _name(transform: Transform) -> str:
    """Name a function by where it is defined, a partial one by its plain arguments too."""
    if isinstance(transform, partial):
        given = [*enumerate(transform.args), *sorted(transform.keywords.items())]
        plain = [(key, value) for key, value in given if isinstance(value, str | int | float)]
        return f"{_name(transform.func)} {plain}"
    named = transform if hasattr(transform, "__qualname__") else type(transform)
    # As before there were rooms: fingerprints of saved runs hold these names.
    module = named.__module__.replace("forgekit.data.batches.", "forgekit.data.")
    return f"{module}.{named.__qualname__}"


def _check_bins(bins: Bins, documents: FileDocuments | ArrayDocuments) -> None:
    """Read all bins once, some at a time, before training finds out about a wrong one."""
    for first in range(0, len(bins), _AT_ONCE):
        offsets = bins.offsets[first : first + _AT_ONCE + 1]
        if (np.diff(offsets) < 1).any():
            raise ValueError(f"bin {first + int(np.diff(offsets).argmin())} holds no piece.")
        here = slice(int(offsets[0]), int(offsets[-1]))
        starts, lengths = bins.starts[here], bins.lengths[here]
        _check_pieces(bins.documents[here], starts, starts + lengths, documents)
        rooms = rooms_of(lengths, bins.align)
        taken = np.add.reduceat(rooms, offsets[:-1] - offsets[0])
        if (taken > bins.capacity).any():
            worst = int(taken.argmax())
            raise ValueError(
                f"bin {first + worst} takes {taken[worst]} places with rooms of multiples of "
                f"{bins.align}; the capacity is {bins.capacity}."
            )


def _check_pieces(
    numbers: Ints, starts: Ints, ends: Ints, documents: FileDocuments | ArrayDocuments
) -> None:
    if numbers.min() < 0 or numbers.max() >= len(documents):
        wrong = numbers.min() if numbers.min() < 0 else numbers.max()
        raise ValueError(
            f"the bins name document {wrong}; there are {len(documents)} documents. "
            "The bins were made for others: pack these."
        )
    sizes = documents.sizes(numbers)
    wrong = (starts < 0) | (ends <= starts) | (ends > sizes)
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(
            f"the bins name tokens {starts[at]}:{ends[at]} of document {numbers[at]}, which has "
            f"{sizes[at]}. The bins were made for other documents: pack these."
        )
