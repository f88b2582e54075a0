"""Streams and events of the pretend device, and the copies that are on their way in them.

Computation happens at once; only copies that need not wait are late. Such a copy *proceeds* (its
source is read, and a target on the device is filled) when its stream next does something, when
another stream waits for an event behind it, or when the host does. A target in host memory is
filled only when the host waits. Until then targets hold garbage.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch

_lock = threading.RLock()
_here = threading.local()


def spoil(tensor: torch.Tensor) -> None:
    """Fill a tensor with garbage: NaN, or a number that is no index."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(torch.nan)
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


@attrs.define(eq=False)
class Copy:
    """A copy on its way; both tensors are those of the CPU that hold the values."""

    source: torch.Tensor
    target: torch.Tensor
    to_host: bool
    values: torch.Tensor | None = None
    is_done: bool = False

    def proceed(self) -> None:
        """Go as far as the device gets alone."""
        if self.values is None:
            self.values = self.source.detach().clone()
            if not self.to_host:
                self.arrive()

    def arrive(self) -> None:
        """Finish; to the host, because it waits."""
        self.proceed()
        if not self.is_done:
            assert self.values is not None
            self.target.copy_(self.values)
            self.is_done = True


class Event:
    """A point in a stream; as ``torch.cuda.Event``."""

    def __init__(self, **_: Any) -> None:
        self._stream: Stream | None = None
        self._until = 0

    def record(self, stream: Stream | None = None) -> None:
        """Stand behind all that the stream was given."""
        self._stream = stream or current_stream()
        self._until = self._stream.issued

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or current_stream()).wait_event(self)

    def pending(self) -> list[Copy]:
        """What is before this point and has not arrived."""
        return [] if self._stream is None else self._stream.pending(self._until)

    def synchronize(self) -> None:
        """Let the host wait."""
        for copy in self.pending():
            copy.arrive()


class Stream:
    """A queue of copies; as ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = device, priority
        self.issued = 0
        self._pending: list[tuple[int, Copy]] = []
        every.append(self)

    def put(self, copy: Copy) -> None:
        """Add a copy, which waits for its turn."""
        with _lock:
            self.issued += 1
            self._pending.append((self.issued, copy))

    def pending(self, until: float = math.inf) -> list[Copy]:
        """What has not arrived, up to a point."""
        if not self._pending:
            return []
        with _lock:
            self._pending = [(n, copy) for n, copy in self._pending if not copy.is_done]
            return [copy for number, copy in self._pending if number <= until]

    def proceed(self) -> None:
        """Do what the device does alone."""
        for copy in self.pending():
            copy.proceed()

    synchronize = Event.synchronize

    def wait_event(self, event: Event) -> None:
        """Let what follows here wait for an event."""
        here = self.pending()
        for copy in event.pending():
            copy.proceed()
            if not (copy.is_done or copy in here):
                self.put(copy)  # whoever waits for this stream now waits for it too

    def wait_stream(self, other: Stream) -> None:
        """Let what follows here wait for all that another stream was given."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event here."""
        event = event or Event()
        event.record(self)
        return event


every: list[Stream] = []
DEFAULT = Stream()


def synchronize(_device: Any = None) -> None:
    """Let the host wait for all streams."""
    for one in every:
        one.synchronize()


def current_stream(_device: Any = None) -> Stream:
    """The stream of this thread."""
    return getattr(_here, "stream", DEFAULT)


def set_stream(chosen: Stream) -> None:
    """Make a stream that of this thread."""
    _here.stream = chosen


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Work in another stream for a while."""
    before = current_stream()
    set_stream(chosen or before)
    try:
        yield
    finally:
        set_stream(before)
