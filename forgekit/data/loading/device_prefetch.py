"""Copies micro-batches to a device while the step computes with the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from tensordict import TensorDict
from torch import Tensor


@attrs.frozen
class Copy:
    """A micro-batch on its device, and the event that marks the end of its copy."""

    batch: TensorDict
    done: torch.Event | None


class DeviceCopies:
    """Copies micro-batches to a device.

    ``start`` runs in a thread that reads ahead, ``finish`` in the consumer's. Only pinning blocks
    the host, in the thread that reads ahead.

    Attributes:
        device: The device.
        ahead: Most micro-batches on the device before they are requested.
        note: Told of each copy of document ids: ``note(there, here)``.
    """

    def __init__(
        self, device: torch.device, ahead: int, note: Callable[[Tensor, Tensor], None] | None = None
    ) -> None:
        self.device, self.ahead, self.note = device, ahead, note
        try:
            self._module: Any = torch.get_device_module(device)
        except RuntimeError:  # "meta" has no module
            self._module = None
        self._stream = self._module.Stream(device) if hasattr(self._module, "Stream") else None

    def start(self, batch: TensorDict) -> Copy:
        """Start the copy; to an accelerator from pinned memory and on a separate stream."""
        if self._stream is None:
            return Copy(batch.to(self.device), None)
        done = self._module.Event()
        pinned: dict[str, Any] = {key: tensor.pin_memory() for key, tensor in batch.items()}
        with self._module.stream(self._stream):
            copied = {key: p.to(self.device, non_blocking=True) for key, p in pinned.items()}
            done.record(self._stream)
        if self.note is not None and "doc_ids" in pinned:
            self.note(copied["doc_ids"], pinned["doc_ids"])
        return Copy(TensorDict(copied, batch.batch_size), done)

    def finish(self, copy: Copy) -> TensorDict:
        """Make the current stream wait for a copy, and keep its memory until the stream is done."""
        if copy.done is not None:
            current = self._module.current_stream(self.device)
            current.wait_event(copy.done)
            tensors: Any = copy.batch.values()
            for tensor in tensors:
                tensor.record_stream(current)
        return copy.batch
