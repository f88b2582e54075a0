"""Bring tokens to their experts and back: the plain callable that a ``dispatch`` socket takes.

An expert layer keeps the matrices of all experts in parameters ``[e ...]`` of one module and calls
``self.dispatch(tokens, expert_ids, experts, compute)``. On one device the tokens are put in order
of their experts, computed, and put back; where experts are spread over ranks, ``parallelize``
puts an exchange in its place and the layer stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Compute", "Dispatch", "dispatch_local", "invert", "sort_by_expert"]

Compute = Callable[[Tensor, Tensor], Tensor]
"""``compute(tokens, counts)``: ``[m d]`` in order of the experts and ``[e]`` int64, how many each
has, to ``[m d]``. Under expert parallelism ``e`` is the number of experts that this rank holds."""


class Dispatch(Protocol):
    """What an expert layer calls; ``parallelize`` puts another one in its place."""

    def __call__(
        self, tokens: Tensor, expert_ids: Tensor, experts: int, compute: Compute
    ) -> Tensor:
        """Give each token to its expert and return what became of it, in the tokens' order."""
        ...


def dispatch_local(tokens: Tensor, expert_ids: Tensor, experts: int, compute: Compute) -> Tensor:
    """Compute each token with its expert on one device.

    Args:
        tokens: ``[n d]``; a token that goes to several experts is there several times.
        expert_ids: ``[n]`` int64, from 0 to ``experts - 1``.
        experts: Number of experts, ``e``.
        compute: What the experts do; called once, also without any token.

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
    return compute(tokens[order], counts)[invert(order)]


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
