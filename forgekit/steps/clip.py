"""From a step's totals to the one factor that normalises and clips its gradients.

A step whose loss or norm is an outlier may be skipped like one that is not finite.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from forgekit.ranges import ranged
from forgekit.steps.totals import Totals

EPS = 1e-6
"""Added to the norm that divides, as torch's ``clip_grad_norm_`` does."""


class Correction(NamedTuple):
    """How to scale a step's raw gradients.

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
    sums = dict(totals.sums.items())
    targets, norm, scale = sums["targets"], sums["grad_sq"].sqrt(), sums["loss_scale"]
    has_targets = targets > 0
    divisor = scaled = torch.where(has_targets, scale * targets, scale)
    if max_norm < math.inf:  # `fmax` passes over NaN: the divisor of a bad step is a number too
        divisor = scaled.fmax(norm.add(scaled, alpha=EPS) / max_norm)
    good = is_finite(totals) & has_targets
    return Correction(good / divisor, norm / scaled, good)


def is_finite(totals: Totals) -> Tensor:
    """Whether a step has a finite loss and a finite gradient, ``[]`` bool."""
    sums = dict(totals.sums.items())
    square = sums["grad_sq"]
    if "loss" in sums:
        square = square.add(sums["loss"], alpha=0)  # 0 times what is not finite is NaN
    return square < math.inf  # False for NaN as well


def check_max_norm(max_norm: float) -> None:
    """Raise for a bound that is not positive: it would flip or zero every gradient."""
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive (inf disables clipping).")


ROUNDING = 1e-6
"""Least standard deviation, relative to the mean: equal numbers differ by rounding."""


@attrs.frozen
class SpikeLimit:
    """How far the loss or the gradient norm of a step may lie above those of the last good steps.

    Attributes:
        sigmas: A step this many standard deviations above the mean is a spike.
        window: Number of last good steps over which mean and deviation are taken.
        least: Number of good steps before any step is judged, from 2 to ``window``.

    Raises:
        ValueError: If ``sigmas`` is not positive, or not ``2 <= least <= window``.
    """

    sigmas: float = attrs.field(default=6.0, validator=attrs.validators.gt(0))
    window: int = 128
    least: int = attrs.field(default=32, validator=attrs.validators.ge(2))

    @least.validator  # pyright: ignore[reportAttributeAccessIssue]
    def _fits(self, _: Any, least: int) -> None:
        if least > self.window:
            raise ValueError(f"least ({least}) must be at most the window ({self.window}).")


def limit_spikes(
    correction: Correction, totals: Totals, recent: Tensor | None, limit: SpikeLimit
) -> tuple[Correction, Tensor]:
    """Turn an outlier into a bad step, which changes nothing; on the device.

    Only losses and norms of good steps are remembered. So if a loss has risen for good, every step
    is skipped, and ``bad_step_policy`` decides when that is too often.

    Args:
        correction: What ``clip`` returned.
        totals: Reduced totals; reads ``loss`` and ``targets``.
        recent: ``[window 2]`` float64: ``state.recent``; None before the first step.
        limit: When a step is an outlier.

    Returns:
        The correction, its ``finite`` False and its ``factor`` 0 for a spike, and the next
        ``recent``, for ``donate(state, recent=recent)`` after the update.

    Examples:
        >>> limit, recent = SpikeLimit(window=4, least=2), None
        >>> for loss in (2.0, 2.1, 9.0):
        ...     totals = Totals.of(targets=1, loss=loss)
        ...     good = Correction(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(True))
        ...     correction, recent = limit_spikes(good, totals, recent, limit)
        ...     print(bool(correction.finite))
        True
        True
        False
    """
    now = torch.stack([totals["loss"] / totals["targets"], correction.grad_norm]).double()
    # A checkpoint may have been written with another window.
    empty = now.new_full((limit.window, 2), math.nan)
    recent = empty if recent is None else torch.cat([empty, recent.to(now)])[-limit.window :]
    remembered = ~recent[:, 0].isnan()
    mean = recent.nanmean(0)
    deviation = (recent - mean).square().nanmean(0).sqrt().maximum(ROUNDING * mean.abs())
    # Comparisons with NaN are False: without remembered steps there are no outliers.
    stands_out = (now > mean + limit.sigmas * deviation).any() & (remembered.sum() >= limit.least)
    good = correction.finite & ~stands_out
    factor = torch.where(good, correction.factor, 0.0)
    moved = torch.cat([recent[1:], now[None]])
    return Correction(factor, correction.grad_norm, good), torch.where(good, moved, recent)
