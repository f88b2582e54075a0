"""Mixture of experts: a router sends each token to a few feed-forwards.

No token is padded to a common length: tokens are sorted by expert and multiplied group by group.
What no expert computes, padding and tokens beyond an expert's capacity, is sorted behind the last
group. There ``grouped_mm`` leaves memory as it was, NaN perhaps, in values and in gradients; both
are replaced by zero where tokens leave the layer and where they come back.

A layer keeps the matrices of all experts in parameters ``[e ...]`` of one module and calls the
socket ``self.dispatch(tokens, expert_ids, experts, compute)``. On one device ``dispatch_local``
puts tokens in order of their experts, computes, and puts them back; where experts are sharded over
ranks, ``parallelize`` puts an exchange in its place and the layer stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgekit.model.layers import FeedForward
from forgekit.model.moe_spec import MoESpec
from forgekit.model.routing import Router, Routing, add_gradient

ALIGNMENT = 16
"""Bytes that divide the strides which ``grouped_mm`` takes."""


Compute = Callable[[Tensor, Tensor], Tensor]
"""``compute(tokens, counts)``: ``[m d]`` in order of the experts and ``[e]`` int64, how many each
has, to ``[m d]``. Under expert parallelism ``e`` is the number of experts that this rank holds.
Tokens of no expert stand behind the last one's; what becomes of them is not looked at."""

Multiply = Callable[[Tensor, Tensor], Tensor]
"""Rows ``[m in]`` that are sorted by expert, and a stack ``[e out in]`` -> ``[m out]``."""


class Dispatch(Protocol):
    """Interface of the ``dispatch`` socket, which ``parallelize`` may replace."""

    def __call__(
        self,
        tokens: Tensor,
        expert_ids: Tensor,
        experts: int,
        compute: Compute,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Compute each token with its expert; return results in the tokens' order."""
        ...


class Experts(nn.Module):
    """SwiGLU feed-forwards, each applied to its count of tokens.

    ``widths`` says along which dimension tensor parallelism shards each parameter, None for one
    that every rank has whole; each rank then computes a part of the sum.
    """

    widths: Mapping[str, int | None] = MappingProxyType({"gate": 1, "up": 1, "down": 2})

    def __init__(self, dim: int, ffn_dim: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, ffn_dim, dim))
        self.up = nn.Parameter(torch.empty(experts, ffn_dim, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, ffn_dim))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Compute tokens sorted by expert.

        Args:
            tokens: ``[m d]``.
            counts: ``[e]`` int64, how many tokens each expert has; there may be more behind.

        Returns:
            ``[m d]``; rows behind the last expert's may hold anything.
        """
        by_group = _multiply_grouped if _fits_grouped(tokens, self.gate) else _multiply_each
        multiply = by_group(counts)
        gate, up = (self.project(stack, tokens, multiply) for stack in ("gate", "up"))
        return self.project("down", F.silu(gate) * up, multiply)

    def project(self, stack: str, rows: Tensor, multiply: Multiply) -> Tensor:
        """Multiply rows, ``[m in]``, by their expert's matrix of a stack -> ``[m out]``."""
        return multiply(rows, getattr(self, stack))


class MoE(nn.Module):
    """Routed and shared experts, which replace a feed-forward.

    ``dispatch`` and ``reduce`` are sockets: plain callables that ``parallelize`` replaces where
    experts are sharded over ranks, and where each rank has a part of each expert.

    Args:
        dim: Width of the residual stream, ``d``.
        spec: Sizes.
        layer: Its name, under which choices and notes are kept.
    """

    def __init__(self, dim: int, spec: MoESpec, layer: str) -> None:
        super().__init__()
        self.spec = spec
        self.router = Router(dim, spec, layer)
        self.experts = Experts(dim, spec.ffn_dim, spec.experts)
        self.shared = FeedForward(dim, spec.shared * spec.ffn_dim) if spec.shared else None
        self.dispatch: Dispatch = dispatch_local
        self.reduce: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = reduce_local

    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """Send each token to its experts and sum their outputs.

        Args:
            x: ``[b s d]``.
            routing: What routers go by and note; shared by all layers of one call.

        Returns:
            ``[b s d]``; of padding what the shared experts make of it.
        """
        routing = Routing() if routing is None else routing
        if self.shared is None:
            return self.reduce(partial(self._route, routing), x)
        shared, beside = self.shared, list[Tensor]()
        # Overlaps with the exchange of tokens: it needs none of them.
        meanwhile = lambda: beside.append(shared(x))  # noqa: E731
        mixed = self.reduce(partial(self._route, routing, meanwhile=meanwhile), x)
        return mixed + beside[0]

    def _route(self, routing: Routing, x: Tensor, **during: Callable[[], None]) -> Tensor:
        weights, choice, term = self.router(x, routing)
        may_leave_out = routing.is_token is not None or self.spec.capacity is not None
        tokens = x.flatten(0, 1).repeat_interleave(self.spec.top_k, dim=0)
        ids = choice.flatten()
        is_taken = (ids < self.spec.experts).unsqueeze(-1)
        if may_leave_out:  # keeps rows past the last offset out of gradients
            tokens = torch.where(is_taken, tokens, 0.0)
        out = self.dispatch(tokens, ids, self.spec.experts, self.experts, **during)
        if may_leave_out:
            out = torch.where(is_taken, out, 0.0)
        out = out.unflatten(0, (-1, self.spec.top_k)).to(weights.dtype)
        # A batched product is slow for matrices this small.
        mixed = (out * weights.flatten(0, 1).unsqueeze(-1)).sum(1).view(x.shape).to(x.dtype)
        return add_gradient(mixed, term, routing.scale)


def reduce_local(compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return outputs of whole experts as they are: there is nothing to sum.

    Where each rank has a part of each expert, ``parallelize`` puts in its place what gives
    ``compute`` the positions of all ranks and adds up what they return.
    """
    return compute(x)


def _fits_grouped(tokens: Tensor, weight: Tensor) -> bool:
    """Whether torch's grouped product supports dtypes, strides and number of rows."""
    size = tokens.element_size()
    return (
        tokens.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and tokens.dtype == weight.dtype
        and len(tokens) > 0
        and not any(width * size % ALIGNMENT for width in weight.shape[1:])
    )


def _multiply_grouped(counts: Tensor) -> Multiply:
    ends = counts.cumsum(0).to(torch.int32)

    def multiply(rows: Tensor, weight: Tensor) -> Tensor:
        # The compiler knows shapes of grouped products for bfloat16 only.
        is_traced = rows.dtype == torch.bfloat16
        product = _product if is_traced else _product_as_written
        return product(rows, weight, ends)

    return multiply


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


_product_as_written: Any = torch.compiler.disable(_product)


def _multiply_each(counts: Tensor) -> Multiply:
    """Multiply expert by expert; the host reads the counts."""
    lengths = counts.tolist()

    def multiply(rows: Tensor, weight: Tensor) -> Tensor:
        *parts, left = rows.split([*lengths, len(rows) - sum(lengths)])
        done = [F.linear(part, one) for part, one in zip(parts, weight.unbind(), strict=True)]
        return torch.cat([*done, left.new_zeros(len(left), weight.shape[1])])

    return multiply


def dispatch_local(
    tokens: Tensor,
    expert_ids: Tensor,
    experts: int,
    compute: Compute,
    meanwhile: Callable[[], None] | None = None,
) -> Tensor:
    """Compute each token with its expert on one device.

    Args:
        tokens: ``[n d]``; a token that goes to several experts is there several times.
        expert_ids: ``[n]`` int64, from 0 to ``experts - 1``; ``experts`` for a token of no expert,
            for which anything may come back, NaN included.
        experts: Number of experts, ``e``.
        compute: What the experts do; called once, also without any token.
        meanwhile: Called once, while tokens travel where they do: work that needs none of them.

    Returns:
        ``[n d]`` in the order of ``tokens``.

    Examples:
        >>> tokens, ids = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1, 0, 1])
        >>> scale = torch.tensor([[10.0], [100.0]])
        >>> double = lambda x, counts: x * scale.repeat_interleave(counts, dim=0)
        >>> dispatch_local(tokens, ids, 2, double).flatten()
        tensor([100.,  20., 300.])
    """
    order, counts = sort_by_expert(expert_ids, experts)
    inverse = invert(order)
    computed = permute(compute(permute(tokens, order, inverse), counts), inverse, order)
    if meanwhile is not None:
        meanwhile()
    return computed


def sort_by_expert(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Find the order that sorts tokens by expert, without a host read.

    Args:
        expert_ids: ``[n]`` int64.
        experts: Number of experts, ``e``.

    Returns:
        ``[n]`` int64 positions of the tokens sorted by expert, stable within an
        expert, and ``[e]`` int64 how many tokens each expert has.
    """
    ordered, order = torch.sort(expert_ids, stable=True)
    bounds = torch.arange(experts + 1, device=expert_ids.device)
    # Not bincount, which on an accelerator waits for the largest id.
    return order, torch.searchsorted(ordered, bounds).diff()


def invert(order: Tensor) -> Tensor:
    """Find the permutation that undoes another, ``[n]`` int64."""
    positions = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Permute rows.

    Its backward is a gather. That of plain indexing adds rows up, as indices might repeat: one
    after the other on a CPU, and sorted first on an accelerator.

    Args:
        rows: ``[n d]``.
        order: ``[n]`` int64, a permutation.
        inverse: ``[n]`` int64, what ``invert`` makes of it.
    """
    return _Permute.apply(rows, order, inverse)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return rows.index_select(0, order)  # four times as fast as rows[order] on a CPU

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        order, inverse = ctx.saved_tensors
        return permute(gradients[0], inverse, order), None, None
