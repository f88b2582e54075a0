"""Micro-batches in groups, one group per optimizer step, each pulled when it is used.

A stream of rollouts must not be drained before the first backward pass, and no more than one
micro-batch needs to be in memory. So a group is a promise: it knows its length and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

from tensordict import TensorDict

from forgekit.data.batches.batch import mask_batch
from forgekit.inputs import is_integer

__all__ = ["Group", "groups"]


class End(Protocol):
    """What ``groups`` asks of a ``DataEnd``."""

    def watch(self, has_more: Callable[[], bool]) -> None:
        """Take the function that says whether this rank has data for another group."""
        ...

    def goes_on(self, groups: int) -> bool:
        """Whether another group is due after so many; the same on every rank."""
        ...


def groups(
    loader: Iterable[Any],
    micro_batches: int,
    *,
    partial: Literal["pad", "drop", "error"] = "pad",
    end: End | None = None,
) -> Iterator[Group]:
    """Cut a stream of micro-batches into groups of a known length, without reading ahead.

    Group ``g`` holds the micro-batches from ``g * micro_batches`` on. What is left of a group when
    a later one is used is passed over, so that the groups of all ranks stay side by side.

    Args:
        loader: A loader, a list or whatever else has a length, or any iterator. An iterator is
            asked for one micro-batch when a group is asked for, to know whether there is one;
            the others for nothing.
        micro_batches: Micro-batches per group.
        partial: What to do if the last group is not full: ``"pad"`` completes it with copies of its
            last micro-batch that carry no loss, ``"drop"`` leaves it out, ``"error"`` raises, at
            once where the length is known.
        end: A ``DataEnd``, the one that ``make_step`` has: where the streams of the ranks end
            after different steps it decides which group is the last. Until then a rank without
            data brings groups that carry no loss.

    Returns:
        An iterator of groups.

    Raises:
        ValueError: If ``micro_batches`` is not positive, ``partial`` is none of the three,
            ``"drop"`` is asked of a stream whose end cannot be seen coming, or a stream of one of
            several ranks has an end and no ``end`` is given.

    Examples:
        >>> [[batch for batch in group] for group in groups("abcd", 2)]
        [['a', 'b'], ['c', 'd']]
    """
    if not is_integer(micro_batches):
        raise TypeError(
            f"micro_batches is {micro_batches!r}, a {type(micro_batches).__name__}; pass an "
            "integer: loader.micro_batches(global_batch_size)."
        )
    if micro_batches < 1:
        raise ValueError(f"micro_batches {micro_batches} must be at least 1.")
    if partial not in ("pad", "drop", "error"):
        raise ValueError(f'partial {partial!r} must be "pad", "drop" or "error".')
    if end is not None and partial != "pad":
        raise ValueError(f"partial {partial!r} and end are two answers to one question; pass one.")
    total = _length(loader)
    is_endless = getattr(loader, "is_endless", False)
    world = getattr(loader, "world", 1)
    if end is None and total is None and not is_endless and world > 1:
        raise ValueError(
            f"this stream is one of {world} and has an end of its own; ranks that go on would wait "
            'for ever. Pass end=forgekit.DataEnd("pad") here and to make_step, or stream without '
            "end: epochs=None."
        )
    if total is None and partial == "drop" and not is_endless:
        raise ValueError(
            'partial="drop" needs a stream with a length: a group of this one is used before its '
            'end is seen. Use partial="pad" or "error", or pass a list.'
        )
    if total is not None and partial == "error" and total % micro_batches:
        raise _partial_error(total, micro_batches)
    if total is not None and partial == "drop":
        total -= total % micro_batches
    return _groups(_Source(loader, total, is_endless), micro_batches, partial, end)


class Group:
    """The micro-batches of one optimizer step; has a length, can be iterated once."""

    def __init__(self, source: _Source, first: int, micro_batches: int, partial: str) -> None:
        self._source = source
        self._first = first
        self._micro_batches = micro_batches
        self._partial = partial
        self._rows = 0
        self._is_used = False

    def __len__(self) -> int:
        return self._micro_batches

    @property
    def samples(self) -> int | None:
        """Rows that all ranks have consumed with the micro-batches pulled so far.

        None where the stream does not count ``samples``. Padding does not count.
        """
        return self._rows if self._source.counts_samples else None

    def __iter__(self) -> Iterator[Any]:
        if self._is_used:
            raise RuntimeError(
                "this group was iterated before; its micro-batches are gone from the stream. "
                "Keep them to use them twice: batches = list(group)."
            )
        self._is_used = True
        return self._pull()

    def _pull(self) -> Iterator[Any]:
        for number in range(self._first, self._first + self._micro_batches):
            if self._source.has(number):
                batch, rows = self._source.pull(number)
                self._rows += rows
                yield batch
            else:
                yield self._padding(number)

    def _padding(self, number: int) -> TensorDict:
        if self._partial == "error":
            raise _partial_error(number, self._micro_batches)
        last = self._source.last()
        if not isinstance(last, TensorDict):
            raise TypeError(
                f"the last group has {number - self._first} of {self._micro_batches} micro-batches "
                f"and a {type(last).__name__} cannot be padded; yield TensorDicts, or pass "
                'partial="drop" or "error".'
            )
        return mask_batch(last)


class _Source:
    """The shared stream: its micro-batches by number, each pulled once and in order."""

    def __init__(self, stream: Iterable[Any], total: int | None, is_endless: bool) -> None:
        self.counts_samples = isinstance(getattr(stream, "samples", None), int)
        self._stream = stream
        self._iterator = iter(stream)
        self._total = total
        self._is_endless = is_endless
        self._pulled = 0
        self._ahead: list[tuple[Any, int]] = []
        self._last: Any = None

    def last(self) -> Any:
        """A micro-batch to make padding of: the last one, or the stream's own idea of one.

        Raises:
            ValueError: If there was none.
        """
        if self._last is None and (padding := getattr(self._stream, "padding", None)):
            self._last = padding()
        if self._last is None:
            raise ValueError(
                "this rank's stream ended before its first micro-batch, so nothing says what "
                "padding looks like. Give each rank at least one, or the stream a padding()."
            )
        return self._last

    def has(self, number: int) -> bool:
        """Say whether there is such a micro-batch, pulling it only if nothing else can tell."""
        if self._total is not None:
            return number < self._total
        return self._is_endless or self._look(number)

    def pull(self, number: int) -> tuple[Any, int]:
        """Return a micro-batch and the rows that all ranks consumed with it."""
        if not self._look(number):
            raise RuntimeError(
                f"the stream ended after {self._pulled} micro-batches, but its length is "
                f"{self._total}. Its len() must count what it yields."
            )
        batch, rows = self._ahead.pop()
        self._last = batch
        return batch, rows

    def _look(self, number: int) -> bool:
        at = self._pulled - len(self._ahead)
        if number < at:
            raise RuntimeError(
                f"micro-batch {number} was passed over: a later group has been used already. "
                "Use each group before asking for the next."
            )
        while self._pulled <= number:
            self._ahead.clear()
            before = self._samples()
            try:
                batch = next(self._iterator)
            except StopIteration:
                return False
            self._pulled += 1
            self._ahead.append((batch, self._samples() - before))
        return True

    def _samples(self) -> int:
        return getattr(self._stream, "samples", 0) if self.counts_samples else 0


def _groups(source: _Source, micro_batches: int, partial: str, end: End | None) -> Iterator[Group]:
    first = 0
    if end is not None:
        end.watch(lambda: source.has(first + micro_batches))
    while source.has(first) if end is None else end.goes_on(first // micro_batches):
        yield Group(source, first, micro_batches, partial)
        first += micro_batches


def _length(loader: Any) -> int | None:
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
