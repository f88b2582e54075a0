"""Micro-batches in groups, one group per optimizer step, each pulled on use.

A stream of rollouts must not be drained before the first backward pass, and only one micro-batch
has to be in memory. So a group has a length and holds no micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Literal, Protocol

from tensordict import TensorDict

from forgekit.checks import (
    LARGEST,
    RankCountError,
    check_choice,
    check_integers,
    nearest_multiples,
)
from forgekit.data.batch import mask_batch


class End(Protocol):
    """The interface that ``groups`` needs from a ``DataEnd``."""

    def watch(self, has_more: Callable[[], bool]) -> None:
        """Register a function that says whether this rank has data for another group."""
        ...

    def goes_on(self, groups: int) -> bool:
        """Whether another group follows after so many; the same on every rank."""
        ...


def groups(
    loader: Iterable[Any],
    micro_batches: int | None = None,
    *,
    partial: Literal["pad", "drop", "error"] = "pad",
    end: End | None = None,
) -> Iterator[Group]:
    """Divide a stream of micro-batches into groups of a known length, without reading ahead.

    Group ``g`` holds the micro-batches from ``g * micro_batches`` on. Unused micro-batches of a
    group are skipped when a later one is used, so the groups of all ranks stay aligned.

    Args:
        loader: A loader, a list or anything else with a length, or any iterator. From an iterator
            the first micro-batch of a group is pulled with the group, to know whether it exists. A
            stream with ``has_next()`` is asked instead: one whose position is saved must not be
            behind a micro-batch that is not trained yet.
        micro_batches: Micro-batches per group; None for those of ``loader.micro_batches()``, where
            sizes change.
        partial: What to do if the last group is not full: ``"pad"`` completes it with copies of its
            last micro-batch without a loss, ``"drop"`` leaves it out, ``"error"`` raises, at once
            if the length is known.
        end: The ``DataEnd`` that was passed to ``make_step``: if the ranks' streams end after
            different steps, it decides which group is the last. Until then a rank without data
            yields groups without a loss.

    Returns:
        An iterator of groups.

    Raises:
        ValueError: If ``micro_batches`` is not positive, ``partial`` is none of the three or
            ``"drop"`` for a stream without a length, or ``end`` is missing for the finite stream of
            one of several ranks.

    Examples:
        >>> [[batch for batch in group] for group in groups("abcd", 2)]
        [['a', 'b'], ['c', 'd']]
    """
    if micro_batches is None:
        return _sized_groups(loader, _Source(loader, math.inf))
    check_integers(micro_batches=(micro_batches, 1))
    check_choice("partial", partial, ("pad", "drop", "error"))
    if end is not None and partial != "pad":
        raise ValueError(f"partial {partial!r} and end contradict each other; pass one of them.")
    total, world = _length(loader), getattr(loader, "world", 1)
    if total is None and end is None and world > 1:
        raise ValueError(
            f"this stream is one of {world} and ends on its own, so the others would hang. Pass "
            'end=forgekit.run.DataEnd("pad") to groups and make_step, or stream with epochs=None.'
        )
    if total is None and partial == "drop":
        raise ValueError(
            'partial="drop" needs a loader with a length; use partial="pad" or "error".'
        )
    if isinstance(total, int) and (rest := total % micro_batches):
        if partial == "error":
            raise _partial_error(total, micro_batches)
        if partial == "drop":
            total -= rest
    return _groups(_Source(loader, total), micro_batches, partial, end)


class Group:
    """The micro-batches of one optimizer step: sized, lazy, iterable once."""

    def __init__(self, source: _Source, first: int, micro_batches: int, partial: str) -> None:
        self._source = source
        self._numbers = range(first, first + micro_batches)
        self._partial = partial
        self._rows = 0

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def samples(self) -> int | None:
        """Rows that all ranks have consumed with the micro-batches pulled so far, without padding.

        None if the stream does not count ``samples``.
        """
        return None if self._source.samples is None else self._rows

    def __iter__(self) -> Iterator[Any]:
        for number in self._numbers:
            if self._source.has(number):
                batch, rows = self._source.take(number)
                self._rows += rows
                yield batch
            elif self._partial == "error":
                raise _partial_error(number, len(self))
            else:
                yield self._source.padding()


class _Source:
    """The stream behind all groups: micro-batches by number, each pulled once and in order."""

    def __init__(self, stream: Iterable[Any], total: float | None) -> None:
        self._stream: Any = stream
        self._iterator, self._total = iter(stream), total
        self._pulled = 0
        self._ahead: Any = None  # pulled to look for the end, not yet used; with its rows
        self._last: Any = None

    @property
    def samples(self) -> int | None:
        """Rows that all ranks have consumed; None if the stream does not count them."""
        samples = getattr(self._stream, "samples", None)
        return samples if isinstance(samples, int) else None

    def padding(self) -> TensorDict:
        """Make a micro-batch without a loss from the last one, or by the stream's ``padding()``.

        Raises:
            ValueError: If there is neither.
        """
        if self._last is None:
            if not hasattr(self._stream, "padding"):
                raise ValueError(
                    "this rank's stream ended before its first micro-batch and has no padding(). "
                    "Give each rank at least one micro-batch."
                )
            self._last = self._stream.padding()
        return mask_batch(self._last)

    def has(self, number: int) -> bool:
        """Whether this micro-batch exists; pulls it if the stream has no length."""
        if self._total is not None:
            return number < self._total
        with suppress(StopIteration):
            if number >= self._pulled and hasattr(self._stream, "has_next"):
                if number > self._pulled:
                    self._pull_up_to(number - 1)
                return self._stream.has_next()
            self._pull_up_to(number)
            return True
        return False

    def take(self, number: int) -> tuple[Any, int]:
        """Return a micro-batch and the rows that all ranks consumed with it."""
        self._pull_up_to(number)
        pulled, self._ahead = self._ahead, None
        self._last = pulled[0]
        return pulled

    def skip_to(self, number: int) -> None:
        """Pull the micro-batches before this one that nobody has used."""
        if number > self._pulled:
            self.take(number - 1)

    def _pull_up_to(self, number: int) -> None:
        if number < self._pulled - (self._ahead is not None):
            raise RuntimeError(
                f"micro-batch {number} has been used or skipped: use each group once, before "
                "the next one; batches = list(group) keeps them."
            )
        while self._pulled <= number:
            before = self.samples or 0
            batch = next(self._iterator)
            self._pulled += 1
            self._ahead = batch, (self.samples or 0) - before


def _groups(source: _Source, micro_batches: int, partial: str, end: End | None) -> Iterator[Group]:
    first = 0
    if end is not None:
        end.watch(lambda: source.has(first + micro_batches))
    while source.has(first) if end is None else end.goes_on(first // micro_batches):
        yield Group(source, first, micro_batches, partial)
        first += micro_batches


def _sized_groups(loader: Any, source: _Source) -> Iterator[Group]:
    first = 0
    while True:
        group = Group(source, first, loader.micro_batches(), "error")
        yield group
        first += len(group)
        source.skip_to(first)  # what was left unused: the next size follows from the position


def _length(loader: Any) -> float | None:
    """Count a loader's micro-batches: ``inf`` if it never ends, None if it does not say."""
    if getattr(loader, "is_endless", False):
        return math.inf
    try:
        return len(loader)
    except TypeError:
        return None


def _partial_error(total: int, micro_batches: int) -> ValueError:
    whole, rest = divmod(total, micro_batches)
    return ValueError(
        f"{total} micro-batches make {whole} groups of {micro_batches} and leave {rest}. "
        f'Use a number that divides, or partial="pad" or "drop".'
    )


def count_micro_batches(global_batch_size: int, batch_size: int, world: int) -> int:
    """Count the micro-batches per optimizer step that make a global batch.

    Args:
        global_batch_size: Rows per optimizer step, over all ranks.
        batch_size: Rows per rank and micro-batch.
        world: Number of data-parallel ranks.

    Returns:
        ``global_batch_size / (batch_size * world)``.

    Raises:
        RankCountError: A ``ValueError``, if that is not a whole number of at least 1.

    Examples:
        >>> count_micro_batches(64, batch_size=8, world=4)
        2
    """
    check_integers(global_batch_size=(global_batch_size, -LARGEST))
    rows = batch_size * world
    if global_batch_size < 1 or global_batch_size % rows:
        raise RankCountError(
            f"global_batch_size {global_batch_size} must be divisible by batch_size {batch_size} * "
            f"{world} data-parallel ranks = {rows}; {nearest_multiples(global_batch_size, rows)}."
        )
    return global_batch_size // rows
