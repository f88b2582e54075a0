"""The order of several sources, mixed by weights that may change during training.

The source of sample ``i`` and its row there are pure functions of ``i``. So weights change at
exactly their sample, on every rank and whatever was read ahead, and a run resumes before, at or
after a change from its number of samples alone.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgekit.data.hashing import hash_integers
from forgekit.data.mixture.interleave import BLOCK, Stretch, split_interval
from forgekit.data.mixture.permutation import sample_rows
from forgekit.data.mixture.phases import Phase, check_sizes, mixed_weights
from forgekit.inputs import check_integers

Integers = NDArray[np.int64]


def make_order(
    sizes: Mapping[str, int],
    weights: Mapping[str, float] | None = None,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    phases: Sequence[Phase] = (),
) -> Order:
    """Assign to each sample number a source and a row of it.

    Each source is read without replacement, epoch after epoch, in another shuffle each epoch; other
    weights change how fast, and repeat or skip nothing. Samples are assigned in blocks of 1,024,
    counted from the last change of weights. In each block every source has its share, rounded up or
    down; over many blocks the roundings cancel.

    Args:
        sizes: Rows of each source, by name. The order depends on the sequence of the names.
        weights: Relative weights of all sources, of any sum; 0 leaves a source out. By default
            each source's share of all rows.
        temperature: Weights are raised to the power ``1 / temperature`` and then normalised, in
            every phase. Above 1 small sources come more often; ``inf`` makes all equal.
        seed: Selects the shuffles. A loader's seed is ignored.
        phases: Changes of the weights, by increasing start.

    Returns:
        The order: ``order(i)`` is the name of a source and a row.

    Raises:
        TypeError: If a number of rows is no integer.
        ValueError: If there is no source or one of no rows, if weights are missing, unknown,
            negative, not finite or all 0, if phases do not increase, or ``temperature`` is not
            positive.

    Examples:
        >>> sizes, change = {"code": 1000, "prose": 500}, Phase(start=102_400, weights={"code": 2})
        >>> order = make_order(sizes, weights={"code": 6, "prose": 2}, phases=[change])
        >>> order(0), order(10**9)
        (('prose', 343), ('prose', 250))
        >>> order.taken(102_400), order.shares(102_400, 1024 * 50)
        (array([76800, 25600]), array([0.5, 0.5]))
    """
    counts, seed = check_sizes(sizes), operator.index(seed)
    key = int(_key("blocks", seed))
    stretches: list[Stretch] = []
    for start, mixed in mixed_weights(counts, weights, temperature, phases):
        bounds = split_interval(mixed)
        if stretches and np.array_equal(bounds, stretches[-1].bounds):
            continue
        before = stretches[-1].taken(start) if stretches else np.zeros(len(counts), np.int64)
        stretches.append(Stretch(start, bounds, key, before))
    # By name: the shuffle of a source does not depend on the other sources.
    seeds = np.stack([_key(f"source {name}", seed) for name in counts])
    names, rows = tuple(counts), tuple(counts.values())
    return Order(names, rows, seed, tuple(phases), tuple(stretches), seeds)


@attrs.frozen(eq=False)
class Order:
    """Which row of which source each sample is; ``make_order`` makes one.

    Attributes:
        sources: Their names; an integer that stands for a source is an index into them.
        sizes: Rows of each.
        seed: Selects the shuffles.
        phases: Changes of the weights.
    """

    sources: tuple[str, ...]
    sizes: tuple[int, ...]
    seed: int
    phases: tuple[Phase, ...]
    _stretches: tuple[Stretch, ...] = attrs.field(repr=False)
    _seeds: NDArray[np.uint64] = attrs.field(repr=False)

    def __call__(self, sample: int) -> tuple[str, int]:
        """Find the source, by name, and the row of one sample."""
        sources, rows = self.find(operator.index(sample))
        return self.sources[int(sources)], int(rows)

    def span(self, start: int, count: int) -> tuple[Integers, Integers]:
        """Find the samples ``start`` to ``start + count - 1``.

        Args:
            start: The first sample.
            count: How many.

        Returns:
            ``[count]`` indices into ``sources`` and ``[count]`` rows, int64.

        Raises:
            ValueError: If a number is negative.

        Examples:
            >>> make_order({"a": 3, "b": 3}, seed=1).span(10**12, 4)
            (array([0, 0, 1, 1]), array([2, 1, 1, 0]))
        """
        if count < 0:
            raise ValueError(f"count {count} must be at least 0.")
        return self.find(np.arange(start, start + count))

    def find(self, samples: ArrayLike) -> tuple[Integers, Integers]:
        """Find any samples; consecutive ones cost least.

        Args:
            samples: Sample numbers of any shape.

        Returns:
            Indices into ``sources`` and rows, each int64 of the shape of ``samples``.

        Raises:
            ValueError: If a number is negative.
        """
        samples = np.asarray(samples, dtype=np.int64)
        if samples.size and samples.min() < 0:
            raise ValueError(f"sample {samples.min()} must be at least 0.")
        flat = samples.ravel()
        sources, rows = np.empty_like(flat), np.empty_like(flat)
        for part, stretch, block in self._runs(flat):
            inside = flat[part] - stretch.start - block * BLOCK
            sources[part], rows[part] = (column[inside] for column in _block(self, stretch, block))
        return sources.reshape(samples.shape), rows.reshape(samples.shape)

    def taken(self, samples: int) -> Integers:
        """Count the samples of each source among the first ``samples``.

        Divided by ``sizes`` these are the epochs of each source. Takes constant time.

        Args:
            samples: How many samples.

        Returns:
            ``[sources]`` int64.

        Raises:
            ValueError: If ``samples`` is negative.
        """
        check_integers(samples=(samples, 0))
        which = bisect_right(self._stretches, samples, key=lambda stretch: stretch.start) - 1
        return self._stretches[which].taken(samples)

    def shares(self, start: int, count: int) -> NDArray[np.float64]:
        """Compute each source's share of the samples ``start`` to ``start + count - 1``.

        Args:
            start: The first sample.
            count: How many, at least 1.

        Returns:
            ``[sources]`` float64 that sum to 1.

        Raises:
            ValueError: If ``start`` is negative or ``count`` is not positive.

        Examples:
            >>> make_order({"a": 30, "b": 10}).shares(0, 1024)
            array([0.75, 0.25])
        """
        check_integers(count=(count, 1))
        return (self.taken(start + count) - self.taken(start)) / count

    @property
    def fingerprint(self) -> str:
        """Identifies the order: equal strings mean the same row at each sample."""
        return self.fingerprint_at(self._stretches[-1].start + 1)

    def fingerprint_at(self, samples: int) -> str:
        """Identify the order of the first ``samples`` samples.

        Phases that start later are not included, so they may be moved, changed or added during a
        run. The scale of the learning rate is never included.
        """
        parts = []
        for stretch in self._stretches:
            if stretch.start < max(samples, 1):
                shares = zip(self.sources, self.sizes, stretch.bounds.tolist()[1:], strict=True)
                parts.append([stretch.start, *shares])
        return hashlib.sha256(json.dumps(["order 1", self.seed, parts]).encode()).hexdigest()

    def _runs(self, samples: Integers) -> Iterator[tuple[slice, Stretch, int]]:
        """Split sample numbers into runs within one block of one stretch."""
        starts = np.array([stretch.start for stretch in self._stretches])
        which = np.searchsorted(starts, samples, side="right") - 1
        blocks = (samples - starts[which]) // BLOCK
        changes = np.flatnonzero((np.diff(which) != 0) | (np.diff(blocks) != 0)) + 1
        edges = [0, *changes.tolist(), samples.size] if samples.size else []
        for first, end in itertools.pairwise(edges):
            yield slice(first, end), self._stretches[which[first]], int(blocks[first])


@lru_cache(maxsize=64)
def _block(order: Order, stretch: Stretch, block: int) -> tuple[Integers, Integers]:
    """Compute a whole block, and cache the last ones.

    Eight samples cost nearly as much as a thousand, and the next micro-batch needs the next eight.
    """
    sources, earlier = stretch.assign(block)
    rows = sample_rows(earlier, np.array(order.sizes)[sources], order._seeds[sources])
    return sources, rows


def _key(text: str, seed: int) -> NDArray[np.uint64]:
    return hash_integers(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]), seed)
