"""From a step's totals to the one factor that normalises and clips its gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forgekit.steps.totals import Totals

__all__ = ["Correction", "clip"]

EPS = 1e-6
"""Added to the norm that divides, as torch's ``clip_grad_norm_`` does."""


class Correction(NamedTuple):
    """What is due to the raw gradient of a step.

    Attributes:
        factor: ``[]`` float64 by which the raw gradient is multiplied; 0 for a bad step.
        grad_norm: ``[]`` float64 global L2 norm of the token-mean gradient, before clipping.
        finite: ``[]`` bool: there were targets, and loss and gradient are finite.
    """

    factor: Tensor
    grad_norm: Tensor
    finite: Tensor


def clip(totals: Totals, max_norm: float = float("inf")) -> Correction:
    """Turn a step's totals into the one factor that normalises and clips its gradients.

    No gradient is touched: the factor is applied once, inside the optimizer's kernel where it has
    one. Nothing is read by the host.

    Args:
        totals: Reduced totals; reads ``targets``, ``grad_sq``, ``loss_scale`` and, where it is
            there, ``loss``: each ``[]`` float64 and the same on every rank.
        max_norm: Upper bound of the global L2 norm. ``inf`` measures without clipping.

    Returns:
        ``Correction(factor, grad_norm, finite)``, each ``[]`` on the totals' device.

    Raises:
        ValueError: If ``max_norm`` is not positive.
        KeyError: If the totals were not reduced.

    Examples:
        >>> totals = Totals.of(targets=8, grad_sq=16.0, loss_scale=0.125)
        >>> clip(totals, max_norm=0.25).grad_norm
        tensor(4., dtype=torch.float64)
    """
    check_max_norm(max_norm)
    targets, grad_sq = totals["targets"], totals["grad_sq"]
    finite = ~has_overflow(totals) & (targets > 0)
    normalise = 1.0 / (totals["loss_scale"] * torch.where(targets > 0, targets, 1.0))
    grad_norm = normalise * grad_sq.sqrt()
    factor = normalise * (max_norm / (grad_norm + EPS)).clamp(max=1.0)
    return Correction(torch.where(finite, factor, 0.0), grad_norm, finite)


def has_overflow(totals: Totals) -> Tensor:
    """Whether the loss or the gradient of a step is not finite, ``[]`` bool."""
    finite = torch.isfinite(totals["grad_sq"])
    if "loss" in totals.sums.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        finite = finite & torch.isfinite(totals["loss"])
    return ~finite


def check_max_norm(max_norm: float) -> None:
    """Refuse a bound that would turn every gradient around or into nothing."""
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive. inf does not clip.")
