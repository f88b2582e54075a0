"""What the device has computed, read later: numbers on their way to the host, and times."""

from __future__ import annotations

import time
from typing import Any, Self

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Moment:
    """A moment of the host's clock and, where work is queued on an accelerator, of that queue.

    Attributes:
        host: Seconds of ``time.perf_counter``.
        event: Happens when the device has done what was queued; None if nothing is queued.
    """

    host: float
    event: Any

    @classmethod
    def now(cls, device: torch.device | None = None) -> Self:
        """Take the present moment; nothing waits for it.

        Args:
            device: The one whose queue is meant; None and a CPU have none.
        """
        accelerator = torch.accelerator.current_accelerator()
        if device is None or accelerator is None or device.type != accelerator.type:
            return cls(time.perf_counter(), None)
        module = torch.get_device_module(device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(device))
        return cls(time.perf_counter(), event)

    def wait(self) -> None:
        """Let the host wait until the device is there."""
        if self.event is not None:
            self.event.synchronize()

    def until(self, end: Moment) -> float:
        """Seconds between two moments: of the device if both have an event, else of the host.

        Waits for ``end``. If the device reaches it alone, the host's clock is read only now.
        """
        end.wait()
        if self.event is None and end.event is not None:
            return time.perf_counter() - self.host
        if self.event is None or end.event is None:
            return end.host - self.host
        return self.event.elapsed_time(end.event) / 1000


@attrs.frozen
class HostCopy:
    """A tensor on its way to the host.

    Attributes:
        value: The tensor there; to be read by ``read`` alone.
        arrived: The moment after which it has arrived.
    """

    value: Tensor
    arrived: Moment

    @classmethod
    def start(cls, value: Tensor) -> Self:
        """Start the copy; nothing waits for it."""
        # An asynchronous copy from an accelerator goes to pinned memory; on a CPU this is a plain
        # copy, since the caller may reuse its tensor before it is read here.
        host = value.detach().to("cpu", non_blocking=True, copy=True)
        return cls(host, Moment.now(value.device))

    def read(self) -> Tensor:
        """Wait for the copy and return it."""
        self.arrived.wait()
        return self.value
