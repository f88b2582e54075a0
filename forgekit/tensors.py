"""A tensor's local part, its whole, and the dtype in which it is summed."""

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
