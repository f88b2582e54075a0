"""Documents into bins of one capacity: three ways, all of them pure functions of the lengths.

Padding rows to the longest document wastes most of a batch; packed rows hold several documents,
kept apart by masks. Finding the fewest bins is hard, but documents are many and most are short, and
then dealing them out from the longest to the shortest comes within a bin of the lower bound. The
two methods that do so work one *length* at a time: documents of equal length are interchangeable,
so there are never more decisions than lengths, however many documents there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import repeat
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.packing.bins import Bins, rooms_of
from forgekit.inputs import check_integers, nearest_multiples

__all__ = ["LongDocuments", "PackingMethod", "pack"]

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
    """Deal documents into bins of ``capacity`` places.

    No document that fits into a bin is ever cut; to read a corpus as one stream of tokens, cut
    wherever a row ends, is what ``token_dataset(doc_ids=True)`` does. The same lengths give the
    same bins on every machine and version. Documents without tokens take no room and are in no bin.

    Args:
        lengths: ``[documents]`` tokens of each document; ``np.diff(open_tokens(path).offsets)``.
        capacity: Places in a bin: the ``seq_len`` of the rows. Labels are made inside documents, so
            no place has to be kept for the shift.
        method: ``"best_fit"``: from the longest to the shortest, each into the fullest bin that has
            room. ``"first_fit_decreasing"``: each into the first bin that has room.
            ``"sequential"``: in their order; where one does not fit, the next bin is begun.
        group: ``[documents]`` int; documents of different groups (sources, languages) never share a
            bin. The bins of a group stand together, groups ascending, so that
            ``group[bins.documents[bins.offsets[:-1]]]`` is the group of each bin.
        align: The room of each piece is rounded up to a multiple of this, with padding behind the
            piece: ``2 * cp`` for context parallelism by document, or what a kernel asks for.
        long: What happens to documents longer than ``capacity``: ``"split"`` cuts them into pieces
            of ``capacity`` and a rest, ``"error"`` raises, ``"drop"`` leaves them out and counts
            them in ``Bins.dropped``.

    Returns:
        The bins, in the order in which they were begun; inside a bin documents stand in their own
        order.

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
    sizes = _checked_lengths(lengths)
    _check_options(capacity, align, method, long)
    groups = None if group is None else _checked_groups(group, len(sizes))
    documents, starts, pieces, dropped = _pieces(sizes, capacity, long)
    rooms = rooms_of(pieces, align) // align
    piece_groups = None if groups is None else groups[documents]
    bin_of = _deal(rooms, capacity // align, piece_groups, _METHODS[method])
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


def _pieces(sizes: Ints, capacity: int, long: str) -> tuple[Ints, Ints, Ints, int]:
    """Cut documents into pieces that fit: their documents, starts and lengths, in order."""
    is_long = sizes > capacity
    dropped = 0
    if long == "error" and is_long.any():
        raise _long_error(sizes, is_long, capacity)
    if long == "drop":
        dropped = int(is_long.sum())
        sizes = np.where(is_long, 0, sizes)
    if len(sizes) and 0 < sizes.min() <= sizes.max() <= capacity:
        return np.arange(len(sizes)), np.zeros_like(sizes), sizes, dropped
    counts = -(-sizes // capacity)
    documents = np.repeat(np.arange(len(sizes)), counts)
    firsts = np.cumsum(counts) - counts
    starts = (np.arange(len(documents)) - firsts[documents]) * capacity
    return documents, starts, np.minimum(sizes[documents] - starts, capacity), dropped


def _deal(
    rooms: Ints, capacity: int, groups: Ints | None, method: Callable[[Ints, int], Ints]
) -> Ints:
    """Say which bin each piece goes to, group after group."""
    if groups is None or not len(rooms):
        return method(rooms, capacity)
    order = np.argsort(groups, kind="stable")
    cuts = np.flatnonzero(np.diff(groups[order])) + 1
    bin_of, opened = np.empty(len(rooms), dtype=np.int64), 0
    for members in np.split(order, cuts):
        bin_of[members] = opened + method(rooms[members], capacity)
        opened = int(bin_of[members].max()) + 1
    return bin_of


def _sequential(rooms: Ints, capacity: int) -> Ints:
    """Next fit: from each piece it is known at once where a bin that begins with it ends."""
    if not len(rooms):
        return rooms
    ends = np.concatenate([[0], np.cumsum(rooms)])
    following = np.searchsorted(ends, ends[:-1] + capacity, side="right") - 1
    next_first = array("q", following.tobytes())  # far cheaper to index than numpy's
    firsts, at = array("q"), next_first[0]
    while at < len(rooms):
        firsts.append(at)
        at = next_first[at]
    begins = np.zeros(len(rooms), dtype=np.int64)
    begins[np.frombuffer(firsts, np.int64)] = 1
    return np.cumsum(begins)


def _first_fit_decreasing(rooms: Ints, capacity: int) -> Ints:
    """For one length all bins are looked at together: the first ones with room take all of it."""
    order, lengths = _decreasing(rooms)
    left = np.empty(2 * (int(rooms.sum()) // capacity + 1), dtype=np.int64)  # bins are half full
    opened, bins, takes = 0, [], []
    for room, number in lengths:
        with_room = np.flatnonzero(left[:opened] >= room)
        holds = left[with_room] // room
        used = int(np.searchsorted(np.cumsum(holds), number)) + 1
        with_room, holds = with_room[:used], holds[:used]
        more = number - int(holds.sum())
        if more > 0:
            fresh = -(-more // (capacity // room))
            left[opened : opened + fresh] = capacity
            with_room = np.append(with_room, np.arange(opened, opened + fresh))
            holds = np.append(holds, np.full(fresh, capacity // room))
            opened += fresh
        holds[-1] -= holds.sum() - number
        left[with_room] -= holds * room
        bins.append(with_room)
        takes.append(holds)
    return _dealt(order, np.concatenate(bins), np.concatenate(takes)) if bins else rooms


def _best_fit(rooms: Ints, capacity: int) -> Ints:
    """For one length the fullest bins with room take it, each as often as it fits, then the next.

    A bin that has taken one has less room than before, so it stays the best fit until it has no
    room for another. Hence bins of equal room are filled together.
    """
    order, lengths = _decreasing(rooms)
    opened = _OpenBins(capacity)
    bins, takes = array("q"), array("q")
    for room, number in lengths:
        while number:
            space = opened.closest(room) or opened.add(-(-number // (capacity // room)))
            each = min(space // room, number)
            used = opened.take(space, number // each, left=space - each * room)
            bins.extend(used)
            takes.extend(repeat(each, len(used)))
            number -= each * len(used)
    return _dealt(order, np.frombuffer(bins, np.int64), np.frombuffer(takes, np.int64))


class _OpenBins:
    """Open bins by the room that is left in them, and the set of these rooms as bits of a number.

    Shifting a number of some thousand bits takes a fraction of a microsecond, which makes the
    smallest room that suffices cheaper to find than by any search.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._count = 0
        self._rooms = 0
        self._bins: dict[int, array[int]] = {}

    def closest(self, room: int) -> int:
        """Find the smallest room of at least ``room``; 0 if there is none."""
        suffices = self._rooms >> room
        return room + (suffices & -suffices).bit_length() - 1 if suffices else 0

    def add(self, count: int) -> int:
        """Begin new bins; returns their room."""
        self._put(array("q", range(self._count, self._count + count)), self._capacity)
        self._count += count
        return self._capacity

    def take(self, space: int, count: int, *, left: int) -> array[int]:
        """Take up to ``count`` bins of room ``space``, which have room ``left`` from now on."""
        bins = self._bins[space]
        first = max(0, len(bins) - count)
        taken = bins[first:]
        del bins[first:]
        if not bins:
            self._rooms ^= 1 << space
        if left:
            self._put(taken, left)
        return taken

    def _put(self, bins: array[int], room: int) -> None:
        there = self._bins.get(room)
        if there:
            there.extend(bins)
        else:
            self._bins[room] = bins[:]
            self._rooms |= 1 << room


_METHODS: dict[str, Callable[[Ints, int], Ints]] = {
    "best_fit": _best_fit,
    "first_fit_decreasing": _first_fit_decreasing,
    "sequential": _sequential,
}


def _decreasing(rooms: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """Sort pieces by falling room, and count them: ``(room, number)`` for each room there is."""
    counts = np.bincount(rooms)
    there = np.flatnonzero(counts)[::-1]
    order = _stable_order(len(counts) - rooms)
    return order, list(zip(there.tolist(), counts[there].tolist(), strict=True))


def _dealt(order: Ints, bins: Ints, takes: Ints) -> Ints:
    """Give bin ``bins[j]`` the next ``takes[j]`` pieces of the order."""
    bin_of = np.empty(len(order), dtype=np.int64)
    bin_of[order] = np.repeat(bins, takes)
    return bin_of


def _stable_order(values: Ints) -> Ints:
    """Sort non-negative numbers two bytes at a time, for which numpy needs linear time."""
    order = np.argsort(values.astype(np.uint16), kind="stable")
    while len(values) and (values := values >> 16).any():
        order = order[np.argsort(values[order].astype(np.uint16), kind="stable")]
    return order


def _checked_lengths(lengths: ArrayLike) -> Ints:
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths are {sizes.dtype} of shape {sizes.shape}; they must be integers [documents]. "
            "np.diff(open_tokens(path).offsets) gives those of a token file."
        )
    if sizes.size and sizes.min() < 0:
        raise ValueError(
            f"document {int(sizes.argmin())} has length {sizes.min()}; lengths are tokens, "
            "0 or more."
        )
    return sizes.astype(np.int64)


def _checked_groups(group: ArrayLike, documents: int) -> Ints:
    groups = np.asarray(group)
    if groups.shape != (documents,) or (groups.size and groups.dtype.kind not in "iu"):
        raise ValueError(
            f"group is {groups.dtype} of shape {groups.shape}; it must be integers "
            f"[documents] = [{documents}], one for each length."
        )
    return groups.astype(np.int64)


def _check_options(capacity: int, align: int, method: str, long: str) -> None:
    check_integers(capacity=(capacity, 1), align=(align, 1))
    if capacity % align:
        nearest = nearest_multiples(capacity, align)
        raise ValueError(
            f"capacity {capacity} must be divisible by align {align}; the nearest are {nearest}."
        )
    for name, value, known in (
        ("method", method, get_args(PackingMethod)),
        ("long", long, get_args(LongDocuments)),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} must be one of {', '.join(map(repr, known))}.")


def _long_error(sizes: Ints, is_long: NDArray[np.bool_], capacity: int) -> ValueError:
    first, count = int(is_long.argmax()), int(is_long.sum())
    others = f", and {count - 1} more are longer" if count > 1 else ""
    return ValueError(
        f"document {first} has {sizes[first]} tokens; a bin has {capacity} places{others}. "
        'Pass long="split" to cut them or long="drop" to leave them out, or a larger capacity.'
    )
