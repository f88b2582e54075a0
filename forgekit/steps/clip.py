"""From a step's totals to the one factor that normalises and clips its gradients."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from forgekit.steps.ranges import ranged
from forgekit.steps.totals import Totals

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


@ranged
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
    targets, norm = totals["targets"], totals["grad_sq"].sqrt()
    scale = totals["loss_scale"]
    divisor = scaled = torch.where(targets > 0, scale * targets, scale)
    if max_norm < math.inf:  # `fmax` passes over NaN: the divisor of a bad step is a number too
        divisor = scaled.fmax(norm.add(scaled, alpha=EPS) / max_norm)
    good = is_good(totals)
    return Correction(good / divisor, norm / scaled, good)


def is_good(totals: Totals) -> Tensor:
    """Whether a step has targets, a finite loss and a finite gradient, ``[]`` bool."""
    square = totals["grad_sq"]
    if "loss" in totals.sums.keys():  # noqa: SIM118 (a TensorDict iterates over its rows)
        square = square.add(totals["loss"], alpha=0)  # 0 times what is not finite is NaN
    return (square < math.inf) & (totals["targets"] > 0)  # False for NaN as well


def check_max_norm(max_norm: float) -> None:
    """Refuse a bound that would turn every gradient around or into nothing."""
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive. inf does not clip.")
