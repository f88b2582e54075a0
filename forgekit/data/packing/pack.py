"""Pack documents into bins of one capacity, by one of three methods; pure functions of the lengths.

Padding rows to the longest document wastes most of a batch; packed rows hold several documents,
separated by masks. Finding the fewest bins is NP-hard, but documents are many and most are short:
then best fit or first fit from the longest to the shortest comes within one bin of the lower bound.
Both methods work on one *length* at a time. Documents of equal length are interchangeable, so there
are never more decisions than lengths, however many documents there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import repeat
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.packing.bins import Bins, pad_lengths
from forgekit.inputs import check_choice, check_integers, nearest_multiples

Ints = NDArray[np.int64]
PackingMethod = Literal["best_fit", "first_fit_decreasing", "sequential"]
LongDocuments = Literal["split", "error", "drop"]


def pack(
    lengths: ArrayLike,
    capacity: int,
    *,
    method: PackingMethod = "best_fit",
    group: ArrayLike | None = None,
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
            room. ``"first_fit_decreasing"``: each into the first bin that has room.
            ``"sequential"``: in their order; a document that does not fit begins the next bin.
        group: ``[documents]`` int; documents of different groups (sources, languages) never share a
            bin. The bins of a group are contiguous, groups ascending, so
            ``group[bins.documents[bins.offsets[:-1]]]`` is the group of each bin.
        align: Each piece is padded to a multiple of this: ``2 * cp`` for context parallelism by
            document, or what a kernel requires.
        long: What happens to documents longer than ``capacity``: ``"split"`` makes pieces of
            ``capacity`` and a rest, ``"error"`` raises, ``"drop"`` leaves them out and counts them
            in ``Bins.dropped``.

    Returns:
        The bins, in the order in which they were begun; documents in a bin keep their own order.

    Raises:
        ValueError: If a number, a name or a shape is out of range, or with ``long="error"`` a
            document is too long.

    References:
        Johnson, Near-optimal bin packing algorithms, https://dspace.mit.edu/handle/1721.1/57819

    Examples:
        >>> bins = pack([3, 6, 4, 2, 9], capacity=8)
        >>> [bins.documents[a:b].tolist() for a, b in zip(bins.offsets, bins.offsets[1:])]
        [[4], [1, 3], [0, 2, 4]]
        >>> bins.starts.tolist(), bins.lengths.tolist()
        ([0, 0, 0, 0, 0, 8], [8, 6, 2, 3, 4, 1])
    """
    tokens = _checked_integers("lengths", lengths)
    if tokens.size and tokens.min() < 0:
        raise ValueError(
            f"document {int(tokens.argmin())} has length {tokens.min()}; lengths are tokens, "
            "0 or more."
        )
    _check_options(capacity, align, method, long)
    groups = None if group is None else _checked_integers("group", group, len(tokens))
    documents, starts, pieces, dropped = _pieces(tokens, capacity, long)
    # All lengths in units of `align`: there are fewer of them, and the methods need not know it.
    units = pad_lengths(pieces, align) // align
    of_pieces = None if groups is None else groups[documents]
    bin_of = _pack_groups(units, capacity // align, of_pieces, _METHODS[method])
    order = _stable_order(bin_of)
    return Bins(
        np.concatenate([[0], np.cumsum(np.bincount(bin_of))]) if len(bin_of) else [0],
        documents[order],
        starts[order] if starts.any() else starts,
        pieces[order],
        capacity=capacity,
        align=align,
        dropped=dropped,
    )


def _pieces(tokens: Ints, capacity: int, long: str) -> tuple[Ints, Ints, Ints, int]:
    """Split documents into pieces that fit: their documents, starts and lengths, in order."""
    is_long = tokens > capacity
    dropped = 0
    if long == "error" and is_long.any():
        raise _long_error(tokens, is_long, capacity)
    if long == "drop":
        dropped = int(is_long.sum())
        tokens = np.where(is_long, 0, tokens)
    if len(tokens) and 0 < tokens.min() <= tokens.max() <= capacity:  # a piece each; saves time
        return np.arange(len(tokens)), np.zeros_like(tokens), tokens, dropped
    counts = -(-tokens // capacity)
    documents = np.repeat(np.arange(len(tokens)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - firsts[documents]) * capacity
    return documents, starts, np.minimum(tokens[documents] - starts, capacity), dropped


def _pack_groups(
    lengths: Ints, capacity: int, groups: Ints | None, method: Callable[[Ints, int], Ints]
) -> Ints:
    """Return the bin of each piece, ``[pieces]``, packing one group after another."""
    if groups is None or not len(lengths):
        return method(lengths, capacity)
    order = np.argsort(groups, kind="stable")
    changes = np.flatnonzero(np.diff(groups[order])) + 1
    bin_of, opened = np.empty(len(lengths), dtype=np.int64), 0
    for members in np.split(order, changes):
        bin_of[members] = opened + method(lengths[members], capacity)
        opened = int(bin_of[members].max()) + 1
    return bin_of


def _sequential(lengths: Ints, capacity: int) -> Ints:
    """Next fit in O(pieces log pieces).

    One vectorised search finds, for every piece, the bin that would begin with it: the piece after
    its end. Following these links from piece 0 gives the bins.
    """
    ends = np.concatenate([[0], np.cumsum(lengths)])
    following = np.searchsorted(ends, ends[:-1] + capacity, side="right") - 1
    next_first = array("q", following.tobytes())  # far cheaper to index one by one than numpy's
    firsts, at = [], 0
    while at < len(lengths):
        firsts.append(at)
        at = next_first[at]
    sizes = np.diff(np.array(firsts, dtype=np.int64), append=len(lengths))
    return np.repeat(np.arange(len(firsts)), sizes)


def _first_fit_decreasing(lengths: Ints, capacity: int) -> Ints:
    """Place all pieces of one length at once, into the first bins with room: O(lengths * bins)."""
    order, counted = _decreasing(lengths)
    # Two bins that are at most half full never coexist, so twice the tokens bounds their number.
    free = np.full(2 * (int(lengths.sum()) // capacity + 1), capacity)
    opened, bins, takes = 0, [], []
    for length, number in counted:
        enough = opened + -(-number // (capacity // length))  # even if no open bin has room
        with_room = np.flatnonzero(free[:enough] >= length)
        holds = free[with_room] // length
        used = int(np.searchsorted(np.cumsum(holds), number)) + 1
        with_room, holds = with_room[:used], holds[:used]
        holds[-1] -= holds.sum() - number
        free[with_room] -= holds * length
        opened = max(opened, int(with_room[-1]) + 1)
        bins.append(with_room)
        takes.append(holds)
    return _assign(order, np.concatenate(bins), np.concatenate(takes)) if bins else lengths


def _best_fit(lengths: Ints, capacity: int) -> Ints:
    """Fill the fullest bins with room, all bins of equal free space at once.

    A bin that has taken a piece has less space than before, so it remains the best fit until it has
    no room for another piece of this length. The cost depends on the number of lengths, not of
    documents.
    """
    order, counted = _decreasing(lengths)
    by_space: dict[int, array[int]] = {}
    # Bit i is set if a bin has i positions free. The smallest sufficient space is then a shift and
    # the lowest set bit of one Python integer: a fraction of a microsecond for 8,192 bits.
    spaces = opened = 0
    bins, takes = array("q"), array("q")
    for length, number in counted:
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
    return _assign(order, np.frombuffer(bins, np.int64), np.frombuffer(takes, np.int64))


_METHODS: dict[str, Callable[[Ints, int], Ints]] = {
    "best_fit": _best_fit,
    "first_fit_decreasing": _first_fit_decreasing,
    "sequential": _sequential,
}


def _decreasing(lengths: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """Sort pieces from the longest, and count them: ``(length, number)`` of each length."""
    counts = np.bincount(lengths)
    there = np.flatnonzero(counts)[::-1]
    order = _stable_order(len(counts) - lengths)
    return order, list(zip(there.tolist(), counts[there].tolist(), strict=True))


def _assign(order: Ints, bins: Ints, takes: Ints) -> Ints:
    """Give bin ``bins[j]`` the next ``takes[j]`` pieces of the order."""
    bin_of = np.empty(len(order), dtype=np.int64)
    bin_of[order] = np.repeat(bins, takes)
    return bin_of


def _stable_order(values: Ints) -> Ints:
    """Sort non-negative numbers by 16 bits at a time: numpy's radix sort, in linear time."""
    order = np.argsort(values.astype(np.uint16), kind="stable")
    while len(values) and (values := values >> 16).any():
        order = order[np.argsort(values[order].astype(np.uint16), kind="stable")]
    return order


def _checked_integers(name: str, values: ArrayLike, documents: int | None = None) -> Ints:
    found = np.asarray(values)
    is_shaped = found.ndim == 1 and documents in (None, len(found))
    if not is_shaped or (found.size and found.dtype.kind not in "iu"):
        size = "" if documents is None else f" = [{documents}], one for each length"
        raise ValueError(
            f"{name} must be integers [documents]{size}, not {found.dtype} of shape {found.shape}. "
            "np.diff(open_tokens(path).offsets) gives the lengths of a token file."
        )
    return found.astype(np.int64)


def _check_options(capacity: int, align: int, method: str, long: str) -> None:
    check_integers(capacity=(capacity, 1), align=(align, 1))
    if capacity % align:
        nearest = nearest_multiples(capacity, align)
        raise ValueError(f"capacity {capacity} must be divisible by align {align}; {nearest}.")
    check_choice("method", method, _METHODS)
    check_choice("long", long, get_args(LongDocuments))


def _long_error(tokens: Ints, is_long: NDArray[np.bool_], capacity: int) -> ValueError:
    first, count = int(is_long.argmax()), int(is_long.sum())
    others = f", and {count - 1} more are longer" if count > 1 else ""
    return ValueError(
        f"document {first} has {tokens[first]} tokens; a bin has {capacity} positions{others}. "
        'Pass long="split" to split them or long="drop" to leave them out, or a larger capacity.'
    )
