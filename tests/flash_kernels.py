"""Torch's flash kernels as they are on CUDA, in plain formulas, for devices that have none.

Registered with torch's own schemas under the CPU's key, so that everything above them is torch:
autograd, its saved tensors, fake tensors. They refuse what the real ones refuse. The pretend device
unwraps to the CPU; that it is offered the kernels is registered under its own key.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import attrs
import torch
from torch import Tensor

from forgekit.model import attention_kernels

HALVES = (torch.float16, torch.bfloat16)
MOST_SEQUENCES = 65_535
"""Sequences of one call: a dimension of a CUDA grid."""


@contextmanager
def flash_kernels(
    *, dtypes: tuple[torch.dtype, ...] = HALVES, keys: tuple[str, ...] = ("CPU",)
) -> Iterator[list[dict[str, Any]]]:
    """Register the kernels for a while; the table says that they take ``dtypes``.

    Yields:
        Each call: the operator, ``q`` (shape), ``k``, the ``lengths`` of sequences, ``causal``.
    """
    calls: list[dict[str, Any]] = []
    library = torch.library.Library("aten", "IMPL")
    table = dict(attention_kernels.KERNELS)
    table |= {name: attrs.evolve(table[name], dtypes=dtypes) for name in ("flash", "varlen")}

    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Any:
        cu_q, cu_k, longest_q, longest_k, dropout, causal, debug = rest
        assert not debug
        assert dropout == 0.0
        return _forward(calls, dtypes, q, k, v, (cu_q, cu_k, longest_q, longest_k), causal, options)

    def backward(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any):
        out, lse, cu_q, cu_k, longest_q, longest_k, dropout, causal, _state, _unused = rest
        assert dropout == 0.0
        bounds = cu_q, cu_k, longest_q, longest_k
        return _backward(calls, dtypes, gradient, q, k, v, out, lse, bounds, causal, options)

    for key in keys:
        library.impl("_flash_attention_forward", forward, key)
        library.impl("_flash_attention_backward", backward, key)
    try:
        with patch.object(attention_kernels, "KERNELS", MappingProxyType(table)):
            yield calls
    finally:
        library._destroy()


def _forward(calls, dtypes, q, k, v, bounds, causal, options):
    pieces = _pieces(calls, "forward", dtypes, q, k, v, bounds, causal, options)
    out, lse = torch.empty_like(q), q.new_empty(_lse_shape(q, bounds), dtype=_wide(q))
    for queries, keys in pieces:
        scores, _ = _scores(q[queries], k[keys], causal)
        sums = scores.logsumexp(-1)
        weights = (scores - sums.nan_to_num(neginf=0.0)[..., None]).exp()
        # Without keys: zeros, and infinity where one expects minus infinity.
        blind = sums == float("-inf")
        values = v[keys].to(weights.dtype).movedim(-2, -3)
        values = values.repeat_interleave(q.shape[-2] // k.shape[-2], -3)
        out[queries] = (weights @ values).movedim(-3, -2).to(q.dtype)
        _of(lse, queries).copy_(sums.masked_fill(blind, float("inf")))
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse, state, torch.empty((), dtype=torch.uint64), q.new_empty(0)


def _backward(calls, dtypes, gradient, q, k, v, out, lse, bounds, causal, options):
    pieces = _pieces(calls, "backward", dtypes, q, k, v, bounds, causal, options)
    for other in (gradient, out):
        assert other.shape == q.shape
        assert other.dtype == q.dtype
        assert other.stride(-1) == 1
    assert lse.dtype == _wide(q)
    assert lse.is_contiguous()
    assert lse.shape == _lse_shape(q, bounds)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    group = q.shape[-2] // k.shape[-2]
    for queries, keys in pieces:
        scores, scale = _scores(q[queries], k[keys], causal)
        weights = (scores - _of(lse, queries).to(scores.dtype)[..., None]).exp()
        above, given = (x[queries].to(scores.dtype).movedim(-2, -3) for x in (gradient, out))
        values = v[keys].to(scores.dtype).movedim(-2, -3).repeat_interleave(group, -3)
        inner = (above * given).sum(-1, keepdim=True)
        share = weights * (above @ values.mT - inner) * scale
        repeated = k[keys].to(scores.dtype).movedim(-2, -3).repeat_interleave(group, -3)
        dq[queries] = (share @ repeated).movedim(-3, -2).to(q.dtype)
        of_keys = share.mT @ q[queries].to(scores.dtype).movedim(-2, -3)
        for into, grouped in ((dk, of_keys), (dv, weights.mT @ above)):
            summed = grouped.unflatten(-3, (-1, group)).sum(-3)
            into[keys] = summed.movedim(-3, -2).to(into.dtype)
    return dq, dk, dv


def _pieces(calls, kind, dtypes, q, k, v, bounds, causal, options):
    """Check a call as the kernel does, note it, and give the queries and keys of each sequence."""
    cu_q, cu_k, longest_q, longest_k = bounds
    assert {key for key, value in options.items() if value is not None} <= {"scale"}
    for tensor in (q, k, v):
        assert tensor.dtype in dtypes, f"FlashAttention only supports {dtypes}"
        assert tensor.dtype == q.dtype
        assert tensor.stride(-1) == 1, "input tensor must have contiguous last dimension"
        assert tensor.shape[-1] % 8 == 0, "head_size must be a multiple of 8"
        assert tensor.shape[-1] <= 256, "head dimension at most 256"
    assert q.shape[-2] % k.shape[-2] == 0
    lengths = None
    if cu_q is None:
        assert (longest_q, longest_k) == (q.shape[1], k.shape[1])
        pieces = [((slice(None),), (slice(None),))]
    else:
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert cu_q.is_contiguous()
        assert 1 <= len(cu_q) - 1 <= MOST_SEQUENCES
        assert cu_q[-1] == q.shape[0], "every query belongs to a sequence"
        assert cu_k[-1] == k.shape[0]
        ends = list(map(list, map(itertools.pairwise, (cu_q.tolist(), cu_k.tolist()))))
        lengths = [b - a for a, b in ends[0]]
        assert longest_q == max(lengths), "the longest document, not a bound of it"
        pieces = [((slice(*a),), (slice(*b),)) for a, b in zip(*ends, strict=True)]
    shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "dtype": q.dtype}
    calls.append({"kind": kind, "lengths": lengths, "causal": causal, **shapes})
    return pieces


def _scores(q: Tensor, k: Tensor, causal: bool) -> tuple[Tensor, float]:
    """``[... h m n]`` in float64, masked from the lower right as FlashAttention does."""
    q, k = (x.double().movedim(-2, -3) for x in (q, k))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.repeat_interleave(q.shape[-3] // k.shape[-3], -3).mT * scale
    if causal:
        m, n = scores.shape[-2:]
        seen = torch.ones(m, n, dtype=torch.bool).tril(n - m)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores, scale


def _of(lse: Tensor, queries: tuple[slice]) -> Tensor:
    """The part of ``[b h s]``, or of ``[h t]`` of sequences end to end."""
    return lse if lse.ndim == 3 else lse[:, queries[0]]


def _lse_shape(q: Tensor, bounds: Any) -> tuple[int, ...]:
    return (len(q), q.shape[2], q.shape[1]) if bounds[0] is None else (q.shape[1], len(q))


def _wide(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
