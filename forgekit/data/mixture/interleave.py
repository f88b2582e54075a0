"""Weights to whole numbers: which source each sample number takes, block by block.

Numbers are dealt in blocks of 1,024. The weights divide the unit interval among the sources, and
block ``t`` lays the points ``(j + u_t) / 1024`` over it, one for each of its numbers: systematic
sampling, which gives every source its share of the block rounded down or up, never farther off.
The offsets ``u_t`` are the van der Corput sequence. It spreads the roundings so evenly that the
counts stay right over any number of blocks, and it has a closed form for how many of its first
``t`` terms lie below a threshold. So the counts before any block cost the same anywhere, with no
table and no replay.

References:
    https://en.wikipedia.org/wiki/Systematic_sampling and
    https://en.wikipedia.org/wiki/Van_der_Corput_sequence
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from forgekit.data.hashing import hash_integers

__all__ = ["BLOCK", "UNITS", "Stretch", "count_dealt", "cut_interval", "deal_block"]

Integers = NDArray[np.int64]

BLOCK = 1024
"""Numbers per block."""

BITS = 30
"""Binary digits of an offset."""

UNITS = BLOCK << BITS
"""Weights are whole multiples of ``1 / UNITS``, about 1e-12, so that all counts are exact."""

_MASK = (1 << BITS) - 1
_DIGITS = np.arange(BITS)


def cut_interval(weights: Sequence[float]) -> Integers:
    """Divide ``range(UNITS)`` among weights.

    Each part is rounded to the nearest unit, a positive weight gets at least one, and the largest
    takes what rounding leaves: of all parts it is the one that changes least by it.

    Args:
        weights: One finite number of at least 0 per source, at least one of them positive.

    Returns:
        ``[sources + 1]``: where each part begins, and ``UNITS``.

    Examples:
        >>> cut_interval([1.0, 0.0, 3.0]) * 4 // UNITS
        array([0, 1, 1, 4])
    """
    total = sum(weights)
    units = [max(round(weight / total * UNITS), 1) if weight else 0 for weight in weights]
    units[units.index(max(units))] += UNITS - sum(units)
    return np.cumsum([0, *units])


def count_dealt(cuts: Integers, first: int, blocks: int) -> Integers:
    """Count what each source gets from the blocks ``first`` to ``first + blocks - 1``.

    Args:
        cuts: What ``cut_interval`` returned.
        first: A block.
        blocks: How many.

    Returns:
        ``[sources]`` counts, together ``1024 * blocks``.

    Examples:
        >>> cuts = cut_interval([1.0, 3.0])
        >>> count_dealt(cuts, first=10**9, blocks=1000)
        array([256000, 768000])
    """
    whole, rest = cuts >> BITS, cuts & _MASK
    below = blocks * whole + _count_below(first + blocks, rest) - _count_below(first, rest)
    return np.diff(below)


def deal_block(cuts: Integers, block: int, key: int) -> tuple[Integers, Integers]:
    """Deal one block.

    Args:
        cuts: What ``cut_interval`` returned.
        block: Which block.
        key: Names its shuffle.

    Returns:
        ``[1024]`` the source of each number of the block, and ``[1024]`` how many numbers before it
        in the block are of the same source.

    Examples:
        >>> sources, earlier = deal_block(cut_interval([1.0, 3.0]), block=0, key=7)
        >>> sources[:8], earlier[:8]
        (array([0, 1, 1, 1, 0, 1, 1, 0]), array([0, 0, 1, 2, 1, 3, 4, 2]))
    """
    starts = (cuts >> BITS) + ((cuts & _MASK) > _offset(block & _MASK))
    unshuffled = np.repeat(np.arange(len(cuts) - 1), np.diff(starts))
    places = np.arange(BLOCK)
    sources = unshuffled[np.argsort(hash_integers(places, key), kind="stable")]
    earlier = np.empty_like(places)
    earlier[np.argsort(sources, kind="stable")] = places - starts[unshuffled]
    return sources, earlier


@attrs.frozen(eq=False)
class Stretch:
    """The samples from one on, as long as the weights stay the same.

    Attributes:
        start: The first sample; blocks are counted from it.
        cuts: What ``cut_interval`` made of the weights.
        key: Names the shuffles of the blocks.
        before: ``[sources]``, what each source gave before ``start``.
    """

    start: int
    cuts: Integers
    key: int
    before: Integers

    def taken(self, samples: int) -> Integers:
        """Count what the first ``samples`` samples, ``start`` at least, take from each source."""
        blocks, rest = divmod(samples - self.start, BLOCK)
        taken = self.before + count_dealt(self.cuts, self._first_block, blocks)
        if rest:
            taken += np.bincount(self.deal(blocks)[0][:rest], minlength=len(taken))
        return taken

    def deal(self, block: int) -> tuple[Integers, Integers]:
        """Say of each number of a block its source and how many rows that source gave before."""
        cuts, first = self.cuts, self._first_block
        key = int(hash_integers(self.start + block * BLOCK, self.key))
        sources, earlier = deal_block(cuts, first + block, key)
        return sources, (self.before + count_dealt(cuts, first, block))[sources] + earlier

    @property
    def _first_block(self) -> int:
        # Not 0, where offsets are least: the sources that come last in the interval would always
        # wait longest for their first rounding up.
        return int(hash_integers(~self.start, self.key)) & _MASK


def _offset(block: int) -> int:
    """Mirror the binary digits of a block's number: the van der Corput sequence, in units."""
    return int((((block >> _DIGITS) & 1) << (BITS - 1 - _DIGITS)).sum())


def _count_below(blocks: int, thresholds: Integers) -> Integers:
    """Count the offsets of the first ``blocks`` blocks that lie below each threshold.

    A digit 1 of ``blocks`` stands for the numbers that agree with it above, have 0 there and
    anything below. Mirrored, these are evenly spaced, and evenly spaced numbers below a threshold
    are counted by a division.
    """
    periods, rest = divmod(blocks, 1 << BITS)
    digits = _DIGITS[(rest >> _DIGITS) & 1 == 1][:, None]
    lowest = _offset(rest) & ((1 << (BITS - 1 - digits)) - 1)
    spacing_bits = BITS - digits
    counts = (thresholds - lowest + (1 << spacing_bits) - 1) >> spacing_bits
    return periods * thresholds + counts.sum(axis=0)
