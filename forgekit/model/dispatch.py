"""Bring tokens to their experts and back: the plain callable that a ``dispatch`` socket takes.

An expert layer keeps the matrices of all experts in parameters ``[e ...]`` of one module and calls
``self.dispatch(tokens, expert_ids, experts, compute)``. On one device the tokens are put in order
of their experts, computed, and put back; where experts are spread over ranks, ``parallelize``
puts an exchange in its place and the layer stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Compute = Callable[[Tensor, Tensor], Tensor]
"""``compute(tokens, counts)``: ``[m d]`` in order of the experts and ``[e]`` int64, how many each
has, to ``[m d]``. Under expert parallelism ``e`` is the number of experts that this rank holds.
Tokens of no expert stand behind the last one's; what becomes of them is not looked at."""


class Dispatch(Protocol):
    """What an expert layer calls; ``parallelize`` puts another one in its place."""

    def __call__(
        self,
        tokens: Tensor,
        expert_ids: Tensor,
        experts: int,
        compute: Compute,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Give each token to its expert and return what became of it, in the tokens' order."""
        ...


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
    if expert_ids.shape != tokens.shape[:1]:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)} and expert_ids {tuple(expert_ids.shape)}; "
            "expert_ids must be [n], one for each of the n tokens."
        )
    order, counts = sort_by_expert(expert_ids, experts)
    inverse = invert(order)
    computed = permute(compute(permute(tokens, order, inverse), counts), inverse, order)
    if meanwhile is not None:
        meanwhile()
    return computed


def sort_by_expert(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Find the order that puts tokens of the same expert side by side; nothing is read by the host.

    Args:
        expert_ids: ``[n]`` int64.
        experts: Number of experts, ``e``.

    Returns:
        ``[n]`` int64 positions of the tokens sorted by expert, stable within an
        expert, and ``[e]`` int64 how many tokens each expert has.
    """
    ordered, order = torch.sort(expert_ids, stable=True)
    bounds = torch.arange(experts + 1, device=expert_ids.device)
    # Not bincount: on an accelerator it waits for the largest id.
    return order, torch.searchsorted(ordered, bounds).diff()


def invert(order: Tensor) -> Tensor:
    """Find the permutation that undoes another, ``[n]`` int64."""
    positions = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, positions)


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Put rows in another order.

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
        return rows.index_select(0, order)  # on a CPU a quarter of the time of rows[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        order, inverse = ctx.saved_tensors
        return permute(gradients[0], inverse, order), None, None
