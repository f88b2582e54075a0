"""The row of each sample, of one dataset or of a mixture: a pure function of its number.

A shuffled array would have to be stored, rebuilt at each resume and equal on all ranks. A keyed
permutation needs none of this: sample ``i`` of seed ``s`` is the same row on any number of ranks
and workers, and the whole position is one integer. No library's random generator is used, since its
stream may change with the next version. In a mixture weights change at exactly their sample,
whatever was read ahead.

A mixture's samples are assigned in blocks of 16,384. Before block ``t`` each source has had its
share of the samples, rounded to the nearest, and the largest source the rest: an integer formula,
so that nothing is replayed and no rounding adds up.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from tensordict import TensorDict

from forgekit.checks import (
    LARGEST,
    check_integers,
    check_numbers,
    check_phases,
    nearest_multiples,
    quoted,
)
from forgekit.data.batch import check_alike, read_rows
from forgekit.hashing import (
    SAMPLE_ORDER,
    U64,
    digest,
    facts_of,
    hash_integers,
    permute,
    state_facts,
)

Integers = NDArray[np.int64]

Skips = Sequence[tuple[int, int]]
"""Pairs of the first sample and the number of rows, in the numbering before this skip."""

BLOCK = 2**14
"""Samples per block; above 128 sources, the square of their number."""

UNITS = 2**40
"""Weights are whole multiples of ``1 / UNITS``."""

LEAST_SHARE = 1e-6
"""Smallest share of a source: one row in a million."""

BLOCKS_KEPT = 4


def sample_rows(
    samples: ArrayLike, n: ArrayLike, seed: ArrayLike, *, shuffle: bool = True
) -> Integers:
    """Return the row of each sample number, epoch after epoch.

    Args:
        samples: Sample numbers since the start of training, 0 and up, of any shape.
        n: Rows in the data; samples ``e * n .. (e + 1) * n - 1`` are epoch ``e``. Integers that
            broadcast against ``samples``, for several datasets at once.
        seed: Selects the order; each epoch has another one. Broadcasts like ``n``.
        shuffle: False keeps the rows in their own order.

    Returns:
        ``int64`` rows in ``range(n)``, of the broadcast shape.

    Examples:
        >>> sample_rows(range(6), 3, seed=0, shuffle=False)
        array([0, 1, 2, 0, 1, 2])
    """
    epochs, indices = np.divmod(np.asarray(samples, np.int64), np.asarray(n, np.int64))
    return permute(indices, n, hash_integers(epochs, seed)) if shuffle else indices


def renumber(samples: ArrayLike, skips: Skips) -> Integers:
    """Translate sample numbers to those of a stream without skips.

    What remains is numbered as if the skipped samples had never existed. So ``state.samples`` is
    still the only position in the data, and any number of ranks or workers skips the same rows.

    Args:
        samples: Sample numbers of any shape.
        skips: What is skipped, in the order in which it was added.

    Returns:
        int64 of the shape of ``samples``.

    Examples:
        >>> renumber([0, 1, 2, 3], skips=[(1, 10), (2, 5)])
        array([ 0, 11, 17, 18])
    """
    numbers = np.array(samples, dtype=np.int64)
    for first, rows in reversed(skips):  # undo the last renumbering first
        numbers[numbers >= first] += rows
    return numbers


@attrs.frozen
class Phase:
    """New weights and a new scale of the learning rate from a sample number on.

    A phase lasts until the next one starts and inherits nothing from the one before: whatever it
    does not set has its original value.

    Attributes:
        start: Its first sample, counted over all ranks since the start of training.
        weights: Weights by source; a source that is not named keeps its original weight.
        lr_scale: Factor of the learning rate; see ``forgekit.with_phases``.

    Raises:
        ValueError: If ``start`` is negative, or ``lr_scale`` is negative or not finite.

    Examples:
        >>> Phase(start=50_000, weights={"code": 0.1}, lr_scale=0.5)
        Phase(start=50000, weights={'code': 0.1}, lr_scale=0.5)
    """

    start: int
    weights: Mapping[str, float] = attrs.field(factory=dict)
    lr_scale: float = 1.0

    def __attrs_post_init__(self) -> None:
        check_integers(start=(self.start, 0))
        check_numbers(lr_scale=(self.lr_scale, 0))


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
    weights change how fast, and repeat or skip nothing. Samples are assigned in blocks of 16,384,
    counted from the last change of weights. Up to each block every source has had its share of the
    samples, rounded to the nearest.

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
        TypeError: If a number of rows is not an integer.
        ValueError: If there is no source, or one without rows, if weights are missing, unknown,
            negative, not finite or all 0, if a share is positive and below 1e-6, if phases do not
            increase, or ``temperature`` is not positive.

    Examples:
        >>> sizes, change = {"code": 1000, "prose": 500}, Phase(start=163_840, weights={"code": 2})
        >>> order = make_order(sizes, weights={"code": 6, "prose": 2}, phases=[change])
        >>> order(0), order(10**9)
        (('prose', 233), ('prose', 316))
        >>> order.taken(163_840), order.shares(163_840, 16_384 * 50)
        (array([122880,  40960]), array([0.5, 0.5]))
    """
    check_integers(**{f"sizes[{name!r}]": (size, 1) for name, size in sizes.items()})
    rows, seed = tuple(map(operator.index, sizes.values())), operator.index(seed)
    stretches: list[Stretch] = []
    for start, mixed in _mixed_weights(sizes, weights, temperature, phases):
        units = _units_of(sizes, mixed)
        if stretches and stretches[-1].units == units:
            continue
        before = stretches[-1].taken(start) if stretches else np.zeros(len(rows), np.int64)
        stretches.append(Stretch(start, units, int(_key("blocks", seed)), before))
    # By name, so that a source's shuffle does not depend on the other sources.
    keys = np.stack([_key(name, seed) for name in sizes])
    return Order(tuple(sizes), rows, seed, tuple(phases), tuple(stretches), keys)


@attrs.frozen(eq=False)
class Stretch:
    """A range of samples with constant weights.

    Attributes:
        start: The first sample; blocks are counted from it.
        units: The weights, whole numbers that sum to ``UNITS``.
        key: Selects the shuffles of the blocks.
        before: ``[sources]`` samples of each source before ``start``.
    """

    start: int
    units: tuple[int, ...]
    key: int
    before: Integers

    @property
    def size(self) -> int:
        """Samples per block: enough for the largest source to absorb the rounding of all others."""
        return max(BLOCK, len(self.units) ** 2)

    def counts_until(self, block: int) -> Integers:
        """Count the samples of each source in the blocks before ``block``.

        Each source gets its share, rounded, and the largest one the remainder. In Python integers:
        the products exceed 64 bits.
        """
        samples = block * self.size
        counts = [(2 * samples * units + UNITS) // (2 * UNITS) for units in self.units]
        counts[self.units.index(max(self.units))] += samples - sum(counts)
        return np.array(counts, dtype=np.int64)

    def taken(self, samples: int) -> Integers:
        """Count the samples of each source among the first ``samples``, at least ``start``."""
        block, rest = divmod(samples - self.start, self.size)
        taken = self.before + self.counts_until(block)
        if rest:
            taken += np.bincount(self.assign(block)[0][:rest], minlength=len(taken))
        return taken

    def assign(self, block: int) -> tuple[Integers, Integers]:
        """Return the source of each sample of a block, and the number of its earlier samples."""
        before = self.before + self.counts_until(block)
        counts = self.before + self.counts_until(block + 1) - before
        key = int(hash_integers(self.start + block * self.size, self.key))
        shuffle = np.argsort(hash_integers(np.arange(self.size), key), kind="stable")
        sources = np.repeat(np.arange(len(counts)), counts)[shuffle]
        nth = np.empty_like(sources)
        nth[np.argsort(sources, kind="stable")] = np.concatenate(
            [np.arange(first, first + count) for first, count in zip(before, counts, strict=True)]
        )
        return sources, nth


@attrs.frozen(eq=False)
class Order:
    """The source and row of each sample; made by ``make_order``.

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
    _keys: U64 = attrs.field(repr=False)
    # A cache of the last blocks: consecutive batches share them.
    _blocks: dict[Any, Any] = attrs.field(factory=dict, init=False, repr=False)

    def __call__(self, sample: int) -> tuple[str, int]:
        """Return source name and row of one sample."""
        sources, rows = self.find(operator.index(sample))
        return self.sources[int(sources)], int(rows)

    def span(self, start: int, count: int) -> tuple[Integers, Integers]:
        """Return source and row of the samples ``start`` to ``start + count - 1``.

        Args:
            start: The first sample.
            count: How many.

        Returns:
            ``[count]`` indices into ``sources`` and ``[count]`` rows, int64.

        Raises:
            ValueError: If a sample is negative.

        Examples:
            >>> make_order({"a": 3, "b": 3}, seed=1).span(10**12, 4)
            (array([1, 1, 0, 0]), array([0, 2, 2, 0]))
        """
        return self.find(np.arange(start, start + count))

    def find(self, samples: ArrayLike) -> tuple[Integers, Integers]:
        """Return source and row of any samples; consecutive ones cost least.

        Args:
            samples: Sample numbers of any shape.

        Returns:
            Indices into ``sources`` and rows, each int64 of the shape of ``samples``.

        Raises:
            ValueError: If a number is negative.
        """
        samples = np.asarray(samples, dtype=np.int64)
        check_integers(sample=(int(samples.min(initial=0)), 0))
        starts = np.array([stretch.start for stretch in self._stretches])
        stretch = np.searchsorted(starts, samples, side="right") - 1
        block, inside = np.divmod(samples - starts[stretch], self._stretches[0].size)
        sources, rows = np.empty_like(samples), np.empty_like(samples)
        for at in set(zip(stretch.ravel().tolist(), block.ravel().tolist(), strict=True)):
            here = (stretch == at[0]) & (block == at[1])
            sources[here], rows[here] = (column[inside[here]] for column in self._block(at))
        return sources, rows

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
            ValueError: If ``start`` is negative.

        Examples:
            >>> make_order({"a": 30, "b": 10}).shares(0, 16_384)
            array([0.75, 0.25])
        """
        return (self.taken(start + count) - self.taken(start)) / count

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the order: equal strings mean the same row at each sample."""
        return self.fingerprint_at(LARGEST)

    def fingerprint_at(self, samples: int) -> str:
        """Identify the order of the first ``samples`` samples.

        Phases that start later are not included, so they may be moved, changed or added during a
        run. The scale of the learning rate is never included.
        """
        begun = [each for each in self._stretches if each.start < max(samples, 1)]
        parts = [[stretch.start, stretch.units] for stretch in begun]
        return digest(SAMPLE_ORDER, self.seed, self.sources, self.sizes, parts)

    def _block(self, at: tuple[int, int]) -> tuple[Integers, Integers]:
        """Compute sources and rows of a block, by the numbers of stretch and block."""
        if (block := self._blocks.get(at)) is None:
            sources, nth = self._stretches[at[0]].assign(at[1])
            block = sources, sample_rows(nth, np.array(self.sizes)[sources], self._keys[sources])
            if len(self._blocks) >= BLOCKS_KEPT:
                self._blocks.clear()
            self._blocks[at] = block
        return block


def _mixed_weights(
    sizes: Mapping[str, int],
    weights: Mapping[str, float] | None,
    temperature: float,
    phases: Sequence[Phase],
) -> Iterator[tuple[int, list[float]]]:
    """Yield start and weights of each phase, and of the time before the first."""
    if not temperature > 0:  # a negative one would invert the order of weights
        raise ValueError(f"temperature {temperature} must be above 0; 1.0 changes no weight.")
    if weights is None:
        weights = {name: size / sum(sizes.values()) for name, size in sizes.items()}
    if missing := [name for name in sizes if name not in weights]:
        raise ValueError(f"weights lack {quoted(missing)}; pass one for each source, 0 to omit it.")
    if not phases or phases[0].start:
        phases = (Phase(start=0), *phases)
    check_phases(phases)
    for phase in phases:
        mixed = {**weights, **phase.weights}
        of_phase = f"the phase at sample {phase.start}: weights" if phase.weights else "weights"
        if unknown := [name for name in mixed if name not in sizes]:
            raise ValueError(f"{of_phase} name {quoted(unknown)}; the sources are {quoted(sizes)}.")
        check_numbers(**{f"{of_phase}[{name!r}]": (mixed[name], 0) for name in mixed})
        if not (largest := max(mixed.values())):
            raise ValueError(f"{of_phase} are all 0; at least one must be above 0.")
        # The largest weight is 1, so no power overflows, and no positive one becomes 0.
        shares = (mixed[name] / largest for name in sizes)
        powers = [share and max(share ** (1 / temperature), math.ulp(0)) for share in shares]
        yield operator.index(phase.start), powers


def _units_of(sources: Mapping[str, Any], weights: Sequence[float]) -> tuple[int, ...]:
    """Divide ``UNITS`` in proportion to weights; the largest takes the rounding rest."""
    total = sum(weights)
    for name, weight in zip(sources, weights, strict=True):
        if 0 < weight / total < LEAST_SHARE:
            raise ValueError(
                f"the share of {name!r} is {weight / total:.1e}; it must be 0 or >= {LEAST_SHARE}."
            )
    units = [round(weight / total * UNITS) for weight in weights]
    units[units.index(max(units))] += UNITS - sum(units)
    return tuple(units)


def _key(text: str, seed: int) -> U64:
    return hash_integers(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]), seed)


def mixture_dataset(datasets: Mapping[str, Any], order: Order) -> Mixture:
    """Mix datasets by an order: row ``i`` is sample ``i``.

    It is endless and shuffled by the order, so ``make_loader`` reads row ``i`` for sample ``i`` and
    ignores its own ``seed`` and ``shuffle``.

    Args:
        datasets: Map-style datasets by name, those of the order. Their rows are TensorDicts of the
            same keys, shapes and dtypes.
        order: What ``make_order`` made of their lengths.

    Returns:
        A map-style dataset without a length. Rows carry ``source``, int64, an index into
        ``order.sources``.

    Raises:
        ValueError: If names or numbers of rows differ; on reading, if rows differ in shape.

    Examples:
        >>> code, prose = ([{"input_ids": torch.tensor([n, i])} for i in range(3)] for n in (8, 9))
        >>> order = make_order({"code": 3, "prose": 3})
        >>> rows = mixture_dataset({"code": code, "prose": prose}, order)
        >>> rows[0]["input_ids"], rows[0]["source"]
        (tensor([9, 0]), tensor(1))
    """
    lengths = {name: len(dataset) for name, dataset in datasets.items()}
    expected = dict(zip(order.sources, order.sizes, strict=True))
    if lengths != expected:
        raise ValueError(f"the datasets have {lengths} rows; the order is for {expected}.")
    return Mixture(tuple(datasets[name] for name in order.sources), order)


@attrs.frozen(eq=False)
class Mixture:
    """Rows of several datasets; made by ``mixture_dataset``.

    Attributes:
        datasets: The datasets, in the sequence of ``order.sources``.
        order: Which row of which of them each sample is; an ``Order`` or a ``LengthOrder``.
        is_endless: True: rows are samples, by number, so a loader neither shuffles nor wraps.
    """

    datasets: tuple[Any, ...]
    order: Order | LengthOrder
    is_endless: bool = attrs.field(default=True, init=False)

    @property
    def seq_len(self) -> int:
        """Positions in a row, at first; 0 if the datasets have no ``seq_len``."""
        return getattr(self.datasets[0], "seq_len", 0)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the rows: equal strings mean the same row at each sample."""
        return self.fingerprint_at(LARGEST)

    def fingerprint_at(self, samples: int) -> str:
        """Fingerprint of the first ``samples`` rows; later phases are not part of it."""
        rows = (getattr(dataset, "fingerprint", None) for dataset in self.datasets)
        sources = zip(self.order.sources, rows, strict=True)
        facts = {name: facts_of(row) or {"rows": row} for name, row in sources}
        return state_facts(order=self.order.fingerprint_at(samples), sources=facts)

    def __getitem__(self, sample: int) -> TensorDict:
        return self.__getitems__([sample])[0]

    def __getitems__(self, samples: Sequence[int]) -> TensorDict:
        """Build the batch of these samples, reading each dataset once, ``batch_size=[b]``."""
        sources, rows = self.order.find(samples)
        parts: dict[str, TensorDict] = {}
        for n in np.unique(sources).tolist():
            batch = read_rows(self.datasets[n], rows[sources == n].tolist())
            parts[f'source "{self.order.sources[n]}"'] = batch
        check_alike(parts, dim=1)
        by_source = torch.from_numpy(np.argsort(sources, kind="stable"))
        batch: Any = torch.cat([*parts.values()])[by_source.argsort()]
        if "source" in batch:
            raise ValueError('rows already have "source", which the mixture adds; rename theirs.')
        return batch.set("source", torch.from_numpy(sources))


@attrs.frozen
class SizePhase:
    """A new batch size or length of rows, and scale of the learning rate, from a sample number on.

    A phase inherits nothing from the one before: whatever it does not set has its original value.

    Attributes:
        start: Its first sample, counted over all ranks since the start of training.
        global_batch_size: Rows per optimizer step, over all ranks.
        seq_len: Positions in a row.
        lr_scale: Factor of the learning rate.

    Raises:
        ValueError: If a number is out of range.
    """

    start: int
    global_batch_size: int | None = None
    seq_len: int | None = None
    lr_scale: float = 1.0

    def __attrs_post_init__(self) -> None:
        check_numbers(lr_scale=(self.lr_scale, 0))
        sizes = {"global_batch_size": self.global_batch_size, "seq_len": self.seq_len}
        given = {name: (size, 1) for name, size in sizes.items() if size is not None}
        check_integers(start=(self.start, 0), **given)


def make_sizes(global_batch_size: int, seq_len: int, phases: Sequence[SizePhase] = ()) -> Sizes:
    """Change the batch size and the length of rows at sample numbers.

    Where a size changes, whole steps have to end; where lengths differ, also whole windows of the
    longest rows, so that each token is read once.

    Args:
        global_batch_size: Rows per optimizer step, over all ranks.
        seq_len: Positions in a row.
        phases: The changes, by increasing start.

    Returns:
        The sizes, for ``vary_length``, ``train_loader`` and ``with_phases``.

    Raises:
        ValueError: If a size is not positive, phases do not increase, the longest length is no
            multiple of another one, or a phase starts within a step or a window.

    Examples:
        >>> sizes = make_sizes(8, 256, [SizePhase(80, 16), SizePhase(160, seq_len=512)])
        >>> [sizes.samples(steps) for steps in (10, 15, 16)], sizes.progress(168)
        ([80, 160, 168], 22)
    """
    check_integers(global_batch_size=(global_batch_size, 1), seq_len=(seq_len, 1))
    check_phases(phases)
    rows = [(0, global_batch_size, seq_len)]
    for phase in phases:
        size = phase.global_batch_size or global_batch_size, phase.seq_len or seq_len
        if not phase.start:
            rows = [(0, *size)]
        elif size != rows[-1][1:]:
            rows.append((phase.start, *size))
    longest = max(length for *_, length in rows)
    if odd := [length for *_, length in rows if longest % length]:
        raise ValueError(
            f"seq_len {odd[0]} must divide the longest one, {longest}, of which shorter rows are "
            "pieces. Change a length."
        )
    for (start, batch, length), (stop, *_) in itertools.pairwise(rows):
        whole = math.lcm(batch, longest // length)
        if (stop - start) % whole:
            raise ValueError(
                f"from sample {start} to the phase at {stop} there are {stop - start} rows, which "
                f"steps of {batch} rows and windows of {longest // length} do not fill; "
                f"{nearest_multiples(stop - start, whole)}. Move the phase."
            )
    return Sizes(*zip(*rows, strict=True))


@attrs.frozen
class Sizes:
    """Rows per step and positions in a row at each sample; made by ``make_sizes``.

    Attributes:
        starts: The first sample of each phase; 0 at first.
        global_batch_sizes: Rows per optimizer step.
        seq_lens: Positions in a row.
    """

    starts: tuple[int, ...]
    global_batch_sizes: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def spans(self) -> Iterator[tuple[int, int, int, int]]:
        """First sample of each phase, the one after its last, rows of a step, length of a row."""
        ends = (*self.starts[1:], LARGEST)
        return zip(self.starts, ends, self.global_batch_sizes, self.seq_lens, strict=True)

    def samples(self, steps: int) -> int:
        """Count the rows of the first steps."""
        samples = 0
        for start, end, rows, _ in self.spans:
            taken = min(steps, (end - start) // rows)
            samples, steps = samples + taken * rows, steps - taken
        return samples

    def positions(self, sample: int) -> int:
        """Count the positions in the rows before a sample."""
        return sum(max(min(sample, e) - start, 0) * length for start, e, _, length in self.spans)

    def progress(self, sample: int) -> float:
        """Count the steps of the first phase that have as many positions as the rows before."""
        first = self.global_batch_sizes[0] * self.seq_lens[0]
        steps, rest = divmod(self.positions(sample), first)
        return steps + rest / first if rest else steps


def vary_length(dataset: Any, sizes: Sizes, seed: int = 0) -> Any:
    """Read a token file in rows whose length changes along the way; every token once per epoch.

    The file is divided into windows of the longest rows, shuffled anew in each epoch. Each phase
    takes its number of windows, cuts them into rows of its length and shuffles these. So a phase
    continues where the one before ended, and what follows depends on the sample number alone. Rows
    of the last window that lie past the end of the file are padding.

    Args:
        dataset: What ``token_dataset`` returned.
        sizes: The lengths; see ``make_sizes``.
        seed: Selects the shuffles. A loader's seed is ignored where lengths change.

    Returns:
        The dataset itself if its rows have the only length, else a mixture without end: row ``i``
        is sample ``i``. Its ``source`` is the length, an index into ``order.sources``.

    Raises:
        ValueError: If lengths change and the rows are no windows over a token file.
    """
    if set(sizes.seq_lens) == {dataset.seq_len}:
        return dataset
    if getattr(dataset, "bins", None) is not None:
        raise ValueError("rows of packed documents have one length; vary that of a token_dataset.")
    longest, lengths = max(sizes.seq_lens), [*dict.fromkeys(sizes.seq_lens)]
    windows = len(attrs.evolve(dataset, seq_len=longest))
    parts = tuple(attrs.evolve(dataset, seq_len=length, window=longest) for length in lengths)
    return Mixture(parts, LengthOrder(tuple(map(str, lengths)), sizes, windows, seed))


@attrs.frozen(eq=False)
class LengthOrder:
    """The length and row of each sample; made by ``vary_length``.

    Attributes:
        sources: The lengths, as text.
        phases: The sizes.
        windows: Those of an epoch, of the longest rows.
        seed: Selects the shuffles.
    """

    sources: tuple[str, ...]
    phases: Sizes
    windows: int
    seed: int

    def __call__(self, sample: int) -> tuple[str, int]:
        """Return the length, as text, and the row of one sample."""
        source, row = self.find(sample)
        return self.sources[int(source)], int(row)

    def find(self, samples: ArrayLike) -> tuple[Integers, Integers]:
        """Return the length, an index into ``sources``, and the row of any samples."""
        starts, seq_lens = self.phases.starts, self.phases.seq_lens
        phase = np.searchsorted(starts, samples, side="right") - 1
        row = samples - np.array(starts)[phase]  # within the phase
        # Windows of the longest rows, counted over all epochs, and how many rows each becomes.
        before = np.array([*map(self.phases.positions, starts), LARGEST]) // max(seq_lens)
        pieces = np.array([max(seq_lens) // length for length in seq_lens])[phase]
        begin = before[phase]
        epoch = (begin + row // pieces) // self.windows
        # Rows are shuffled among the windows that this phase reads in this epoch.
        low = np.maximum(begin, epoch * self.windows)
        high = np.minimum(before[phase + 1], (epoch + 1) * self.windows)
        key = hash_integers(low, _key("lengths", self.seed))
        row = permute(row - (low - begin) * pieces, (high - low) * pieces, key)
        window, piece = np.divmod(row, pieces)
        window = sample_rows(low + window, self.windows, self.seed)
        which = np.array([self.sources.index(str(length)) for length in seq_lens])
        return which[phase], window * pieces + piece

    def fingerprint_at(self, samples: int) -> str:
        """Identify the order of the first ``samples`` samples.

        The start of the next phase is included, as it determines what is shuffled before it.
        """
        begun = sum(start < max(samples, 1) for start in self.phases.starts)
        starts, lengths = self.phases.starts[: begun + 1], self.phases.seq_lens
        facts = self.seed, self.windows, max(lengths), starts, lengths[:begun]
        return digest(SAMPLE_ORDER, "lengths", *facts)
