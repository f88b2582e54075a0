"""Steps whose loss or gradient stands out from those before them, left out like broken ones."""

from __future__ import annotations

import math

import attrs
import torch
from torch import Tensor

from forgekit.steps.clip import Correction
from forgekit.steps.totals import Totals

ROUNDING = 1e-6
"""Least standard deviation, relative to the mean: equal numbers differ by rounding."""


@attrs.frozen
class SpikeLimit:
    """How far the loss or the gradient norm of a step may lie above those of the last good steps.

    Attributes:
        sigmas: Standard deviations above the mean from which on a step is a spike.
        window: Good steps that mean and deviation are of.
        least: Good steps that have to be there before any is judged.

    Raises:
        ValueError: If ``sigmas`` is not positive, or not ``2 <= least <= window``.
    """

    sigmas: float = 6.0
    window: int = 128
    least: int = 32

    def __attrs_post_init__(self) -> None:
        if not 0 < self.sigmas < math.inf:
            raise ValueError(f"sigmas is {self.sigmas}; it must be positive and finite, like 6.0.")
        if not 2 <= self.least <= self.window:
            raise ValueError(
                f"least is {self.least} good steps and window {self.window}; a deviation needs at "
                "least 2, and the window must hold them."
            )


def limit_spikes(
    correction: Correction, totals: Totals, recent: Tensor | None, limit: SpikeLimit
) -> tuple[Correction, Tensor]:
    """Turn a step that stands out into a bad one, which changes nothing; on the device.

    Losses and norms of good steps alone are remembered. So a loss that has risen for good is
    left out step after step, and ``bad_step_policy`` says when that is too often.

    Args:
        correction: What ``clip`` returned.
        totals: Reduced totals; reads ``loss`` and ``targets``.
        recent: ``[window 2]`` float64: ``state.recent``; None before the first step.
        limit: What standing out means.

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
    recent = _window(recent, limit.window, now.device)
    known = ~recent[:, 0].isnan()
    mean = recent.nanmean(0)
    deviation = (recent - mean).square().nanmean(0).sqrt().maximum(ROUNDING * mean.abs())
    # Comparisons with NaN are False: nothing stands out where nothing is known.
    stands_out = (now > mean + limit.sigmas * deviation).any() & (known.sum() >= limit.least)
    good = correction.finite & ~stands_out
    factor = torch.where(good, correction.factor, 0.0)
    moved = torch.cat([recent[1:], now[None]])
    return Correction(factor, correction.grad_norm, good), torch.where(good, moved, recent)


def _window(recent: Tensor | None, window: int, device: torch.device) -> Tensor:
    """The last steps, as many as asked for now; a checkpoint may hold another number."""
    if recent is None:
        recent = torch.empty(0, 2, dtype=torch.float64, device=device)
    recent = recent.to(device)[-window:]
    if len(recent) == window:
        return recent
    missing = recent.new_full((window - len(recent), 2), math.nan)
    return torch.cat([missing, recent])
