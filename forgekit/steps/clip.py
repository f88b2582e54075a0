"""From a step's totals to the one factor that normalises and clips its gradients."""

from __future__ import annotations

import math
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
    has_targets = targets > 0
    finite = is_finite(totals) & has_targets
    normalise = (totals["loss_scale"] * torch.where(has_targets, targets, 1.0)).reciprocal()
    grad_norm = normalise * grad_sq.sqrt()
    factor = normalise * (max_norm / (grad_norm + EPS)).clamp(max=1.0)
    return Correction(torch.where(finite, factor, 0.0), grad_norm, finite)


def is_finite(totals: Totals) -> Tensor:
    """Whether the loss and the gradient of a step are finite, ``[]`` bool."""
    largest = totals["grad_sq"]
    if "loss" in totals.sums.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        largest = largest + totals["loss"].abs()
    return largest < math.inf  # False for NaN as well


def check_max_norm(max_norm: float) -> None:
    """Refuse a bound that would turn every gradient around or into nothing."""
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive. inf does not clip.")
