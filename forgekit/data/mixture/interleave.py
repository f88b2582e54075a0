"""Weights to integer counts: which source each sample comes from, block by block.

Samples are assigned in blocks of 1,024. The weights divide the unit interval among the sources, and
block ``t`` places the points ``(j + u_t) / 1024`` on it, one for each of its samples: systematic
sampling, which gives every source its share of the block rounded down or up, never farther off.
The offsets ``u_t`` are the van der Corput sequence. It distributes the roundings so evenly that the
counts stay right over any number of blocks, and there is a closed form for how many of its first
``t`` terms lie below a threshold. So the counts before any block take constant time, without a
table or replay.

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

Integers = NDArray[np.int64]

BLOCK = 1024
"""Samples per block."""

BITS = 30
"""Binary digits of an offset."""

UNITS = BLOCK << BITS
"""Weights are whole multiples of ``1 / UNITS``, about 1e-12, so that all counts are exact."""

_MASK = (1 << BITS) - 1
_DIGITS = np.arange(BITS)


def split_interval(weights: Sequence[float]) -> Integers:
    """Divide ``range(UNITS)`` among weights.

    Each part is rounded to the nearest unit, a positive weight gets at least one, and the largest
    part absorbs the rounding error: relative to its size it changes least.

    Args:
        weights: One finite number of at least 0 per source, at least one of them positive.

    Returns:
        ``[sources + 1]``: where each part begins, and ``UNITS``.

    Examples:
        >>> split_interval([1.0, 0.0, 3.0]) * 4 // UNITS
        array([0, 1, 1, 4])
    """
    total = sum(weights)
    units = [max(round(weight / total * UNITS), 1) if weight else 0 for weight in weights]
    units[units.index(max(units))] += UNITS - sum(units)
    return np.cumsum([0, *units])


def count_assigned(bounds: Integers, first: int, blocks: int) -> Integers:
    """Count the samples of each source in the blocks ``first`` to ``first + blocks - 1``.

    Args:
        bounds: What ``split_interval`` returned.
        first: The first block.
        blocks: How many.

    Returns:
        ``[sources]`` counts, together ``1024 * blocks``.

    Examples:
        >>> bounds = split_interval([1.0, 3.0])
        >>> count_assigned(bounds, first=10**9, blocks=1000)
        array([256000, 768000])
    """
    whole, rest = bounds >> BITS, bounds & _MASK
    below = blocks * whole + _count_below(first + blocks, rest) - _count_below(first, rest)
    return np.diff(below)


def assign_block(bounds: Integers, block: int, key: int) -> tuple[Integers, Integers]:
    """Assign a source to each sample of one block.

    Args:
        bounds: What ``split_interval`` returned.
        block: Number of the block.
        key: Selects its shuffle.

    Returns:
        ``[1024]`` the source of each sample of the block, and ``[1024]`` how many samples before it
        in the block have the same source.

    Examples:
        >>> sources, earlier = assign_block(split_interval([1.0, 3.0]), block=0, key=7)
        >>> sources[:8], earlier[:8]
        (array([0, 1, 1, 1, 0, 1, 1, 0]), array([0, 0, 1, 2, 1, 3, 4, 2]))
    """
    starts = (bounds >> BITS) + ((bounds & _MASK) > _offset(block & _MASK))
    unshuffled = np.repeat(np.arange(len(bounds) - 1), np.diff(starts))
    positions = np.arange(BLOCK)
    sources = unshuffled[np.argsort(hash_integers(positions, key), kind="stable")]
    earlier = np.empty_like(positions)
    earlier[np.argsort(sources, kind="stable")] = positions - starts[unshuffled]
    return sources, earlier


@attrs.frozen(eq=False)
class Stretch:
    """A range of samples with constant weights.

    Attributes:
        start: The first sample; blocks are counted from it.
        bounds: What ``split_interval`` made of the weights.
        key: Selects the shuffles of the blocks.
        before: ``[sources]`` samples of each source before ``start``.
    """

    start: int
    bounds: Integers
    key: int
    before: Integers

    def taken(self, samples: int) -> Integers:
        """Count the samples of each source among the first ``samples``, at least ``start``."""
        blocks, rest = divmod(samples - self.start, BLOCK)
        taken = self.before + count_assigned(self.bounds, self._first_block, blocks)
        if rest:
            taken += np.bincount(self.assign(blocks)[0][:rest], minlength=len(taken))
        return taken

    def assign(self, block: int) -> tuple[Integers, Integers]:
        """Find the source of each sample of a block, and that source's samples before it."""
        bounds, first = self.bounds, self._first_block
        key = int(hash_integers(self.start + block * BLOCK, self.key))
        sources, earlier = assign_block(bounds, first + block, key)
        return sources, (self.before + count_assigned(bounds, first, block))[sources] + earlier

    @property
    def _first_block(self) -> int:
        # Not block 0, whose offset is least: the last sources of the interval would always be
        # the last to be rounded up.
        return int(hash_integers(~self.start, self.key)) & _MASK


def _offset(block: int) -> int:
    """Reverse the binary digits of a block's number: the van der Corput sequence, in units."""
    return int((((block >> _DIGITS) & 1) << (BITS - 1 - _DIGITS)).sum())


def _count_below(blocks: int, thresholds: Integers) -> Integers:
    """Count the offsets of the first ``blocks`` blocks that lie below each threshold.

    Each digit 1 of ``blocks`` represents the numbers that have its higher digits, 0 there, and any
    lower digits. Reversed, these are evenly spaced, and a division counts evenly spaced numbers
    below a threshold.
    """
    periods, rest = divmod(blocks, 1 << BITS)
    digits = _DIGITS[(rest >> _DIGITS) & 1 == 1][:, None]
    lowest = _offset(rest) & ((1 << (BITS - 1 - digits)) - 1)
    spacing_bits = BITS - digits
    counts = (thresholds - lowest + (1 << spacing_bits) - 1) >> spacing_bits
    return periods * thresholds + counts.sum(axis=0)
