"""A tensor's local part, its whole, its copy on the host, and the dtype in which it is summed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a change of it in place is one of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, gathered where ranks share it; all of them call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, sums and updates: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class HostCopy:
    """A tensor on its way to the host; nothing waits for it until it is read.

    Args:
        value: On any device; it may be overwritten at once.
    """

    def __init__(self, value: Tensor) -> None:
        # An asynchronous copy from an accelerator goes to pinned memory; on a CPU this is a plain
        # copy, since the caller may reuse its tensor before it is read here.
        self._value = value.detach().to("cpu", non_blocking=True, copy=True)
        self._arrived = None
        if value.device.type != "cpu":
            self._arrived = torch.get_device_module(value.device).Event()
            self._arrived.record()

    def read(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._value
