"""FLOPs of single operations: matrix products and attention; all else counts as memory traffic."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_ATTENTION = MappingProxyType(
    {
        aten._scaled_dot_product_flash_attention_for_cpu: (2, 0, 4),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (4, 1, 7),
    }
)
"""Products of queries and keys in it, where its queries stand, and its ``is_causal``.

A backward has five: one is the forward's again and, like other recomputation, not a model's FLOPs.
"""

_IN_PLACE = MappingProxyType({aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm})
"""Products that torch's registry knows under another name."""


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of an operation; 0 if it is neither a matrix product nor attention.

    Attention that is causal counts half. Torch's own registry lacks the attention of the CPU and
    grouped products.
    """
    packet = func.overloadpacket
    if packet in _ATTENTION:
        return _attention(*_ATTENTION[packet], args, kwargs)
    if packet is aten._grouped_mm:
        return _grouped(*args[:2])
    known = flop_registry.get(_IN_PLACE.get(packet, packet))
    return 0 if known is None else int(known(*args, **kwargs, out_val=result))


def _attention(products: int, first: int, causal: int, args: Any, kwargs: dict[str, Any]) -> int:
    q, k = args[first], args[first + 1]
    is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
    rows, heads, positions, channels = q.shape
    full = 2 * products * rows * heads * positions * k.shape[2] * channels
    return full // 2 if is_causal else full


def _grouped(a: Tensor, b: Tensor) -> int:
    """Each row of ``a`` meets one matrix of ``b``; or, for their gradients, one column's group."""
    if a.ndim == b.ndim == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    return 2 * math.prod(a.shape) * b.shape[-1]
