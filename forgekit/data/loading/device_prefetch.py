"""Micro-batches on their way to a device, copied while the step computes with the one before."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from tensordict import TensorDict

__all__ = ["Transfer"]


@attrs.frozen
class Sent:
    """A micro-batch on its device, and the event after which its copy has arrived."""

    batch: TensorDict
    arrived: torch.Event | None


class Transfer:
    """How micro-batches reach a device.

    ``send`` runs in a thread that reads ahead, ``receive`` in the one that consumes. Nothing here
    makes the host wait for the device but the pinning, which happens in that thread.

    Attributes:
        device: Where they go.
        ahead: How many may be there before they are asked for.
    """

    def __init__(self, device: torch.device, ahead: int) -> None:
        self.device, self.ahead = device, ahead
        self._module: Any = torch.get_device_module(device) if device.type != "cpu" else None
        self._stream = self._module.Stream(device) if hasattr(self._module, "Stream") else None

    def send(self, batch: TensorDict) -> Sent:
        """Start the copy; to an accelerator from pinned memory and on a stream of its own."""
        if self._stream is None:
            return Sent(batch.to(self.device), None)
        arrived = self._module.Event()
        pinned = {key: tensor.pin_memory() for key, tensor in batch.items()}
        with self._module.stream(self._stream):
            there = {key: p.to(self.device, non_blocking=True) for key, p in pinned.items()}
            arrived.record(self._stream)
        return Sent(TensorDict(there, batch.batch_size), arrived)

    def receive(self, sent: Sent) -> TensorDict:
        """Let the current stream wait for a copy, and tell the allocator who uses it."""
        if sent.arrived is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(sent.arrived)
            tensors: Any = sent.batch.values()
            for tensor in tensors:
                tensor.record_stream(current)
        return sent.batch
