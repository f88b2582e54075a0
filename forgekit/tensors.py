"""A model's tensors by name: the local shard, the full tensor, a copy on the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; it shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(value: Any) -> Any:
    """Return the full tensor of a DTensor, by a collective; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


Box = tuple[tuple[int, int], ...]
"""Start and stop index of each dimension."""


def ranges_of(tensor: Tensor) -> Box:
    """Return the ranges of this rank's shard in the full tensor."""
    return to_ranges(*box_of(tensor))


def to_ranges(offset: Sequence[int], size: Sequence[int]) -> Box:
    """Convert offset and size to start and stop of each dimension."""
    return tuple((start, start + length) for start, length in zip(offset, size, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the ranges that two boxes share; None if there are none."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(stop - start for start, stop in box)


def index_in(box: Box, within: Box) -> tuple[slice, ...]:
    """Return the index of a box in a tensor that holds the ranges ``within``."""
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, within, strict=True))


def box_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and size of this rank's shard in the full tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    size, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset), tuple(size)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied ones under their first name only."""
    # state_dict also makes FSDP reshard modules that are still gathered after an
    # evaluation; until then named_parameters yields full tensors unknown to the optimizer.
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach() for name, tensor in named if id(tensor) in kept}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, sums and updates: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class HostCopy:
    """An asynchronous copy of a tensor to the host; only ``read`` waits.

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
