"""Tensors of a model, by name; their local part, their whole, their copy on the host."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; a change of it in place is one of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, gathered where ranks share it; all of them call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def box_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return where this rank's part of a tensor begins in the whole, and its size."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset), tuple(size)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a tied one under its first name only."""
    # state_dict also makes FSDP put back the shards of modules that are still gathered after an
    # evaluation; until then named_parameters yields full tensors that the optimizer has never seen.
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in named if id(tensor) in kept}


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
