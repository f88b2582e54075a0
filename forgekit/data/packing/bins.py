"""Which documents, or pieces of documents, make up each packed row: a value, and its files.

The bins of a large corpus do not fit into the memory of every rank, so they can be mapped from a
directory of four numpy arrays and an index::

    PATH/index.json      capacity, alignment, fingerprint, and the writer's own entries
    PATH/offsets.npy     documents.npy, starts.npy, lengths.npy
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.index_files import INDEX, read_index_file, write_index_file

MAGIC = "forgekit-bins"
VERSION = 1
ARRAYS = ("offsets", "documents", "starts", "lengths")
NUMBERS = ("capacity", "align", "dropped")


def _int64(values: ArrayLike) -> NDArray[np.int64]:
    return np.ascontiguousarray(values, dtype=np.int64)


def _fullest(bins: Bins) -> int:
    padded = pad_lengths(bins.lengths, bins.align)
    return int(np.add.reduceat(padded, bins.offsets[:-1]).max()) if len(bins) else 0


@attrs.frozen(eq=False)
class Bins:
    """Documents, or pieces of them, packed into bins; ``pack`` makes it.

    Bin ``i`` holds the pieces ``offsets[i]`` to ``offsets[i + 1]``, one after the other, each
    padded to a multiple of ``align``. Bins from elsewhere need only the four arrays.

    Attributes:
        offsets: ``[bins + 1]`` int64; every bin holds a piece.
        documents: ``[pieces]`` int64 number of the document.
        starts: ``[pieces]`` int64 token of the document that the piece starts with.
        lengths: ``[pieces]`` int64 tokens of the piece.
        align: Pieces are padded to multiples of it.
        capacity: Positions in a bin; by default as many as the fullest takes.
        dropped: Documents that were left out because they are longer than a bin.
        path: The directory that the arrays are mapped from; None if they are in memory.

    Raises:
        ValueError: If the arrays do not match each other.

    Examples:
        >>> bins = Bins([0, 2, 3], documents=[0, 2, 1], starts=[0, 0, 0], lengths=[5, 2, 6])
        >>> len(bins), bins.capacity, bins.tokens, round(bins.fill, 2)
        (2, 7, 13, 0.93)
    """

    offsets: NDArray[np.int64] = attrs.field(converter=_int64, repr=False)
    documents: NDArray[np.int64] = attrs.field(converter=_int64, repr=False)
    starts: NDArray[np.int64] = attrs.field(converter=_int64, repr=False)
    lengths: NDArray[np.int64] = attrs.field(converter=_int64, repr=False)
    align: int = attrs.field(default=1, kw_only=True)
    capacity: int = attrs.field(default=attrs.Factory(_fullest, takes_self=True), kw_only=True)
    dropped: int = attrs.field(default=0, kw_only=True)
    path: Path | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        pieces = {name: getattr(self, name).shape for name in ARRAYS[1:]}
        if len(set(pieces.values())) > 1 or self.documents.ndim != 1:
            sizes = ", ".join(f"{name} {shape}" for name, shape in pieces.items())
            raise ValueError(f"bins have {sizes}; all three must be [pieces], one number a piece.")
        ends = self.offsets[[0, -1]].tolist() if len(self.offsets) else []
        if ends != [0, len(self.documents)]:
            raise ValueError(
                f"the offsets of bins go from {ends[:1]} to {ends[1:]}; they must go from 0 to the "
                f"number of pieces, {len(self.documents)}."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.path is not None:  # pickle would copy all that a memory map holds
            return open_bins, (self.path,)
        return super().__reduce_ex__(protocol)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Tokens in all bins."""
        return int(self.lengths.sum())

    @property
    def fill(self) -> float:
        """Share of positions that hold tokens, 0 to 1; the rest is padding."""
        return self.tokens / max(1, len(self) * self.capacity)

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the bins: equal strings mean equal pieces in each. Reads all arrays, once."""
        digest = hashlib.sha256(f"{self.capacity} {self.align} {self.dropped}".encode())
        for name in ARRAYS:
            array: NDArray[np.int64] = getattr(self, name)
            digest.update(f" {name} {len(array)} ".encode())
            digest.update(array.astype("<i8", copy=False).data)
        return digest.hexdigest()


def pad_lengths(lengths: NDArray[np.int64], align: int) -> NDArray[np.int64]:
    """Round lengths up to multiples of ``align``: the positions that pieces take in a bin.

    Examples:
        >>> pad_lengths(np.array([1, 4, 5]), align=4)
        array([4, 4, 8])
    """
    return lengths if align == 1 else -(-lengths // align) * align


def save_bins(bins: Bins, folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write bins into an existing directory.

    Args:
        bins: The bins.
        folder: The directory.
        metadata: More entries for the index, JSON values.
    """
    for name in ARRAYS:
        np.save(folder / f"{name}.npy", getattr(bins, name))
    numbers = {name: int(getattr(bins, name)) for name in NUMBERS}
    entries = {"fingerprint": bins.fingerprint, **numbers, **metadata}
    write_index_file(folder, MAGIC, VERSION, entries)


def open_bins(path: str | os.PathLike[str], **metadata: Any) -> Bins:
    """Map bins into memory, after comparing every byte with the index.

    Args:
        path: The directory that ``save_bins`` filled.
        **metadata: Entries that the index must have.

    Returns:
        The bins; pieces are read from disk on use.

    Raises:
        FileNotFoundError: If there is no index.
        ValueError: If a file is missing, damaged, of another version, or of something else.
    """
    folder = Path(path)
    wanted = {"magic": MAGIC, "version": VERSION, **metadata}
    kinds = {"fingerprint": str, **dict.fromkeys(NUMBERS, int)}
    index = read_index_file(folder / INDEX, wanted, kinds, "Pack again")
    arrays = [_map_array(folder / f"{name}.npy") for name in ARRAYS]
    bins = Bins(*arrays, **{name: index[name] for name in NUMBERS}, path=folder)
    if bins.fingerprint != index["fingerprint"]:
        raise ValueError(
            f"{folder} holds bins of fingerprint {bins.fingerprint[:12]}; its {INDEX} says "
            f"{index['fingerprint'][:12]}. A file is damaged: pack again."
        )
    return bins


def bins_files() -> set[str]:
    """Name the files of bins: a directory that holds nothing else may be replaced."""
    return {INDEX, *(f"{name}.npy" for name in ARRAYS)}


def _map_array(file: Path) -> NDArray[np.int64]:
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header can raise anything
        raise ValueError(f"{file} is missing or damaged ({error}). Pack again.") from None
    if array.dtype != np.dtype("<i8") or array.ndim != 1:
        raise ValueError(f"{file} holds {array.dtype} {array.shape}, not int64 [n]. Pack again.")
    return array.view(np.ndarray)
