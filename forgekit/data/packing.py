"""Pack documents into bins of one capacity; pure functions of the lengths.

Padding rows to the longest document wastes most of a batch; packed rows hold several documents,
separated by masks. Finding the fewest bins is NP-hard, but documents are many and most are short:
then best fit from the longest to the shortest comes within one bin of the lower bound. It works on
one *length* at a time. Documents of equal length are interchangeable, so there are never more
decisions than lengths, however many documents there are.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from array import array
from functools import cached_property
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.checks import check_choice, check_integers, nearest_multiples, path_of
from forgekit.data.token_files import TokenFile
from forgekit.files import sync
from forgekit.hashing import digest, tokenizer_of

Ints = NDArray[np.int64]
PackingMethod = Literal["best_fit", "sequential"]
LongDocuments = Literal["split", "error"]

PACKING = 2
"""Incremented when ``pack`` makes other bins of the same arguments."""

ARRAYS = ("offsets", "documents", "starts", "lengths")


def _int64(values: ArrayLike) -> NDArray[np.int64]:
    return np.ascontiguousarray(values, dtype=np.int64)


def _fullest(bins: Bins) -> int:
    padded = pad_lengths(bins.lengths, bins.align)
    return int(np.add.reduceat(padded, bins.offsets[:-1]).max()) if len(bins) else 0


@attrs.frozen(eq=False)
class Bins:
    """Documents, or pieces of them, packed into bins; made by ``pack``.

    Bin ``i`` holds the pieces ``offsets[i]`` to ``offsets[i + 1]``, one after the other, each
    padded to a multiple of ``align``. Bins from elsewhere need only the four arrays.

    Attributes:
        offsets: ``[bins + 1]`` int64; every bin holds a piece.
        documents: ``[pieces]`` int64 number of the document.
        starts: ``[pieces]`` int64 token of the document that the piece starts with.
        lengths: ``[pieces]`` int64 tokens of the piece.
        align: Pieces are padded to multiples of it.
        capacity: Positions in a bin; by default those of the fullest bin.
        path: The file that the arrays are mapped from; None if they are in memory.

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
    path: Path | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        pieces = self.offsets[-1:].tolist()
        shapes = [list(getattr(self, name).shape) for name in ARRAYS[1:]]
        if self.offsets[:1].tolist() != [0] or shapes != [pieces] * 3:
            raise ValueError(
                f"offsets of bins must go from 0 to the number of pieces; they end at {pieces}, "
                f"and documents, starts and lengths have {shapes}."
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.path is not None:  # pickle would copy the memory map's content
            return open_bins, (self.path,)
        return super().__reduce_ex__(protocol)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens in all bins."""
        return int(self.lengths.sum())

    @property
    def fill(self) -> float:
        """Fraction of positions that hold tokens; the rest is padding."""
        return self.tokens / max(1, len(self) * self.capacity)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the bins: equal strings mean equal pieces in each. Reads all arrays."""
        arrays = (getattr(self, name) for name in ARRAYS)
        return digest(self.capacity, self.align, 0, *arrays)  # 0: kept from before


def pad_lengths(lengths: NDArray[np.int64], align: int) -> NDArray[np.int64]:
    """Round lengths up to multiples of ``align``, the positions that pieces take in a bin.

    Examples:
        >>> pad_lengths(np.array([1, 4, 5]), align=4)
        array([4, 4, 8])
    """
    return lengths if align == 1 else -(-lengths // align) * align


def pack(
    lengths: ArrayLike,
    capacity: int,
    *,
    method: PackingMethod = "best_fit",
    align: int = 1,
    long: LongDocuments = "split",
) -> Bins:
    """Pack documents into bins of ``capacity`` positions.

    A document that fits into a bin is never split; ``token_dataset(doc_ids=True)`` reads a corpus
    as one stream of tokens instead, split wherever a row ends. The same lengths give the same bins
    on every machine and version. Documents without tokens are in no bin.

    Args:
        lengths: ``[documents]`` tokens of each document; ``np.diff(open_tokens(path).offsets)``.
        capacity: Positions in a bin: the ``seq_len`` of the rows. Labels are made inside documents,
            so the shift needs no extra position.
        method: ``"best_fit"``: from the longest to the shortest, each into the fullest bin that has
            room. ``"sequential"``: in their order; a document that does not fit begins the next
            bin.
        align: Each piece is padded to a multiple of this: ``2 * cp`` for context parallelism by
            document, or what a kernel requires.
        long: What happens to documents longer than ``capacity``: ``"split"`` makes pieces of
            ``capacity`` and a rest, ``"error"`` raises.

    Returns:
        The bins, in the order in which they were begun; documents in a bin keep their own order.

    Raises:
        TypeError: If a length is not an integer.
        ValueError: If a number or a name is out of range, or with ``long="error"`` a document is
            too long.

    References:
        Johnson, Near-optimal bin packing algorithms, https://dspace.mit.edu/handle/1721.1/57819

    Examples:
        >>> bins = pack([3, 6, 4, 2, 9], capacity=8)
        >>> [bins.documents[a:b].tolist() for a, b in zip(bins.offsets, bins.offsets[1:])]
        [[4], [1, 3], [0, 2, 4]]
        >>> bins.starts.tolist(), bins.lengths.tolist()
        ([0, 0, 0, 0, 0, 8], [8, 6, 2, 3, 4, 1])
    """
    tokens = _checked_lengths(lengths)
    check_integers(capacity=(capacity, 1), align=(align, 1))
    check_choice("method", method, get_args(PackingMethod))
    check_choice("long", long, get_args(LongDocuments))
    if capacity % align:
        nearest = nearest_multiples(capacity, align)
        raise ValueError(f"capacity {capacity} must be divisible by align {align}; {nearest}.")
    is_long = tokens > capacity
    if long == "error" and is_long.any():
        raise ValueError(
            f"document {is_long.argmax()} has {tokens[is_long][0]} tokens; a bin has {capacity} "
            'positions. Pass long="split", or a larger capacity.'
        )
    counts = -(-tokens // capacity)
    documents = np.repeat(np.arange(len(tokens)), counts)
    starts = (np.arange(len(documents)) - (np.cumsum(counts) - counts)[documents]) * capacity
    pieces = np.minimum(tokens[documents] - starts, capacity)
    # Lengths in units of `align`: fewer distinct ones, and the methods need not know it.
    units = pad_lengths(pieces, align) // align
    bin_of = (_sequential if method == "sequential" else _best_fit)(units, capacity // align)
    order = np.argsort(bin_of, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(bin_of))])
    columns = (column[order] for column in (documents, starts, pieces))
    return Bins(offsets, *columns, capacity=capacity, align=align)


def cached_bins(
    folder: str | os.PathLike[str],
    documents: TokenFile | ArrayLike,
    capacity: int,
    *,
    method: PackingMethod = "best_fit",
    align: int = 1,
    long: LongDocuments = "split",
) -> Bins:
    """Open the cached result of ``pack`` for these arguments; pack if there is none.

    Each set of arguments has its own file, named by a hash of the tokens, the tokenizer beside
    them, and every argument; there is no seed, because packing draws no random numbers. The bins
    are mapped, so that no rank holds those of a large corpus in memory. A file that cannot be read
    is written again. It appears whole or not at all; processes that pack at once write the same.

    Args:
        folder: The directory of the bins of all arguments. Not inside a token file's directory,
            which could then not be replaced.
        documents: A token file, or ``[documents]`` lengths.
        capacity: Positions in a bin, as for ``pack``.
        method: As for ``pack``.
        align: As for ``pack``.
        long: As for ``pack``.

    Returns:
        The bins, mapped from disk.

    Raises:
        ValueError: As for ``pack``.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bins = cached_bins(folder, [3, 6, 4, 2, 9], capacity=8)
        ...     len(bins), cached_bins(folder, [3, 6, 4, 2, 9], capacity=8).path == bins.path
        (3, True)
    """
    if isinstance(documents, TokenFile):
        lengths, content = np.diff(documents.offsets), documents.fingerprint
        content += f" {tokenizer_of(documents.path)}"
    else:
        lengths = _checked_lengths(documents)
        content = digest(lengths)
    key = digest(PACKING, content, int(capacity), method, int(align), long)
    file = path_of("folder", folder) / f"bins-{key[:16]}.npy"
    with contextlib.suppress(ValueError):  # missing or damaged
        return open_bins(file)
    _save(pack(lengths, capacity, method=method, align=align, long=long), file)
    return open_bins(file)


def open_bins(file: Path) -> Bins:
    """Memory-map bins that ``cached_bins`` wrote.

    Raises:
        ValueError: If there are none, or a bit has changed since they were written.
    """
    try:
        stored = np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        checksum, capacity, align, _ = stored[:, -1].tolist()
        offsets, *pieces = stored[:, :-1]
        count = np.searchsorted(offsets, len(offsets) - 1)
        sizes = {"capacity": capacity, "align": align}
        bins = Bins(offsets[: count + 1], *(column[:-1] for column in pieces), **sizes, path=file)
    except Exception as error:  # numpy raises anything for a damaged header
        raise ValueError(f"{file} cannot be read ({error}). Delete it, and pack again.") from None
    if _number_of(bins.fingerprint) != checksum:
        raise ValueError(f"{file} has changed since it was written. Delete it, and pack again.")
    return bins


def _save(bins: Bins, file: Path) -> None:
    """Write ``[4, pieces + 2]`` int64: the offsets, padded with the last one, and the pieces.

    The last column holds a checksum, the capacity, the alignment and 0.
    """
    pieces = len(bins.documents)
    stored = np.full((4, pieces + 2), pieces)
    stored[0, : len(bins.offsets)] = bins.offsets
    stored[1:, :pieces] = bins.documents, bins.starts, bins.lengths
    stored[:, -1] = _number_of(bins.fingerprint), bins.capacity, bins.align, 0
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.stem}.{uuid.uuid4().hex}.npy")
    np.save(new, stored)
    sync(new)
    new.replace(file)


def _number_of(fingerprint: str) -> int:
    return int(fingerprint[:15], 16)


def _sequential(lengths: Ints, capacity: int) -> Ints:
    """Next fit in O(pieces log pieces).

    One vectorised search finds, for every piece, the bin that would begin with it: the piece after
    its end. Following these links from piece 0 gives the bins.
    """
    ends = np.concatenate([[0], np.cumsum(lengths)])
    following = np.searchsorted(ends, ends[:-1] + capacity, side="right") - 1
    next_first = array("q", following.tobytes())  # cheaper to index one by one
    firsts, at = [], 0
    while at < len(lengths):
        firsts.append(at)
        at = next_first[at]
    sizes = np.diff(np.array(firsts, dtype=np.int64), append=len(lengths))
    return np.repeat(np.arange(len(firsts)), sizes)


def _best_fit(lengths: Ints, capacity: int) -> Ints:
    """Best fit: put each piece into the fullest bin with room, bins of equal space at once.

    A bin that has taken a piece has less space than before, so it remains the best fit until it has
    no room for another piece of this length. The cost depends on the number of lengths, not of
    documents.
    """
    order = np.argsort(-lengths, kind="stable")
    sizes, numbers = np.unique(lengths, return_counts=True)
    by_space: dict[int, array[int]] = {}
    # Bit i is set if a bin has i positions free. The smallest sufficient space is then a shift and
    # the lowest set bit of one Python integer: a fraction of a microsecond for 8,192 bits.
    spaces = opened = 0
    bins, takes = array("q"), array("q")
    for length, number in zip(sizes[::-1].tolist(), numbers[::-1].tolist(), strict=True):
        while number:
            if sufficient := spaces >> length:
                space = length + (sufficient & -sufficient).bit_length() - 1
            else:
                space, fresh = capacity, -(-number // (capacity // length))
                by_space[space] = array("q", range(opened, opened + fresh))
                spaces |= 1 << space
                opened += fresh
            each = min(space // length, number)
            here = by_space[space]
            used = here[max(0, len(here) - number // each) :]
            del here[len(here) - len(used) :]
            if not here:
                spaces ^= 1 << space
            if left := space - each * length:
                by_space.setdefault(left, array("q")).extend(used)
                spaces |= 1 << left
            bins.extend(used)
            takes.extend(repeat(each, len(used)))
            number -= each * len(used)
    bin_of = np.empty(len(order), dtype=np.int64)  # bin j takes the next takes[j] pieces
    bin_of[order] = np.repeat(np.frombuffer(bins, np.int64), np.frombuffer(takes, np.int64))
    return bin_of


def _checked_lengths(values: ArrayLike) -> Ints:
    lengths = np.asarray(values)
    check_integers(length=(int(lengths.min(initial=0)), 0))
    # An empty list is float64; other floats are refused, not truncated.
    return lengths.astype(np.int64, casting="same_kind" if lengths.size else "unsafe")
