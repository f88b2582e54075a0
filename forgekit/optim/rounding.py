"""Stochastic rounding: bfloat16 parameters are rounded up or down at random, with the right mean.

bfloat16 keeps 8 bits: an update below 1/512 of a weight is lost where it is rounded to nearest.
The random bits are a hash of a key and of each value's index in the whole tensor: they do not
depend on the sharding, and differ between tensors and steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from forgekit.optim.shards import global_indices


def round_values(group: dict[str, Any], parameter: Tensor, values: Tensor, step: Tensor) -> Tensor:
    """Round a bfloat16 parameter's next values, if its group has ``keys``."""
    if "keys" not in group or parameter.dtype != torch.bfloat16:
        return values
    keys = zip(group["params"], group["keys"], strict=True)
    key = next(key for other, key in keys if other is parameter)
    return round_stochastically(values, global_indices(parameter), key, step)


def key_of(seed: int, name: str) -> int:
    """Hash a seed and a parameter's name to 63 bits, the same in every process."""
    digest = hashlib.blake2b(f"{seed}/rounding/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def round_stochastically(
    values: Tensor, indices: Sequence[Tensor], key: int, step: Tensor | int
) -> Tensor:
    """Round to bfloat16, up with the probability that makes the mean the value itself.

    Values that bfloat16 represents exactly stay, infinities and NaN included.

    Args:
        values: ``[...]`` float32: this rank's part of a tensor.
        indices: From ``global_indices``.
        key: From ``key_of``; identifies the tensor.
        step: The step number; ``[]`` on the device, or an int.

    Returns:
        ``[...]`` bfloat16.
    """
    noise = _noise(values, indices, key, step) & 0xFFFF
    bits = values.contiguous().view(torch.int32)
    rounded = ((bits + noise) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _noise(values: Tensor, indices: Sequence[Tensor], key: int, step: Tensor | int) -> Tensor:
    """Hash each value to 32 bits: its row with key and step in 64 bits, then its column."""
    *leading, columns = indices if indices else [torch.zeros(1, device=values.device)]
    row = torch.zeros((), dtype=torch.int64, device=values.device)
    for index in leading:  # one dimension at a time, so that no product overflows
        row = _mix64(row.unsqueeze(-1) + index)
    start = _mix64(torch.as_tensor(step, device=values.device).to(torch.int64) + key)
    halves = _mix64(row ^ start).unsqueeze(-1).view(torch.int32)
    first, second = halves[..., :1], halves[..., 1:]
    # A Weyl sequence through murmur3's finalizer, with the row's other half between its rounds.
    x = columns.to(torch.int32) * _C[0] + first
    x = ((x ^ _shifted(x, 16)) * _C[1]) ^ second
    x = (x ^ _shifted(x, 13)) * _C[2]
    return (x ^ _shifted(x, 16)).view(values.shape)


_C = (-0x61C88647, -0x7A143595, -0x3D4D51CB)
"""0x9E3779B9, 0x85EBCA6B and 0xC2B2AE35 as signed integers."""


def _mix64(x: Tensor) -> Tensor:
    """splitmix64 of integers, which wrap around.

    References:
        https://doi.org/10.1145/2714064.2660195
    """
    x = x + -0x61C8864680B583EB
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right of int32."""
    return (x >> by) & ((1 << (32 - by)) - 1)
