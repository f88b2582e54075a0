"""Rotary frequencies of models that were extended to longer sequences."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any, Literal

import attrs
import torch
from attrs import field
from attrs.validators import ge, gt, lt, optional
from torch import Tensor

from forgekit.checks import check_choice

ABOVE = MappingProxyType({"high_freq_factor": "low_freq_factor", "beta_fast": "beta_slow"})
"""Upper bounds, and the lower ones that they must exceed."""


def _check_kind(_scaling: RopeScaling, _field: Any, kind: str) -> None:
    check_choice("rope_scaling.kind", kind, ("linear", "llama3", "yarn"))


def _check_original(scaling: RopeScaling, _field: Any, positions: int | None) -> None:
    if positions is None and scaling.kind != "linear":
        raise ValueError(
            f"rope_scaling {scaling.kind!r} needs original_max_seq_len: the sequence length that "
            "the model was trained on before its extension."
        )


def _check_above(scaling: RopeScaling, bound: Any, value: float) -> None:
    lower = ABOVE[bound.name]
    if not value > (least := getattr(scaling, lower)):
        raise ValueError(f"rope_scaling.{bound.name} {value} must be above {lower} {least}.")


@attrs.frozen(kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for longer sequences.

    Attributes:
        kind: "linear": all by ``factor``; "llama3" and "yarn": low ones by ``factor``, high ones
            not at all, those between by less.
        factor: At least 1.
        original_max_seq_len: Sequence length before the extension; not for "linear".
        low_freq_factor: llama3: wavelengths above ``original_max_seq_len`` divided by this are
            scaled by the whole factor.
        high_freq_factor: llama3: those below ``original_max_seq_len`` divided by this stay.
        beta_fast: yarn: a frequency that turns this often in the original length stays.
        beta_slow: yarn: one that turns this often is scaled by the whole factor.
        attention_factor: yarn: by what queries and keys are multiplied; ``0.1 ln(factor) + 1`` if
            None.
        truncate: yarn: whether the bounds are rounded to whole channels.

    References:
        Linear, https://arxiv.org/abs/2306.15595; YaRN, https://arxiv.org/abs/2309.00071;
        Llama 3, https://arxiv.org/abs/2407.21783
    """

    kind: Literal["linear", "llama3", "yarn"] = field(validator=_check_kind)
    factor: float = field(validator=(ge(1), lt(math.inf)))
    original_max_seq_len: int | None = field(
        default=None, validator=(optional(ge(1)), _check_original)
    )
    low_freq_factor: float = field(default=1.0, validator=(gt(0), lt(math.inf)))
    high_freq_factor: float = field(default=4.0, validator=(_check_above, lt(math.inf)))
    beta_fast: float = field(default=32.0, validator=(_check_above, lt(math.inf)))
    beta_slow: float = field(default=1.0, validator=(gt(0), lt(math.inf)))
    attention_factor: float | None = field(
        default=None, validator=optional((ge(0.0), lt(math.inf)))
    )
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Factor of cosines and sines."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is None:
            return 0.1 * math.log(self.factor) + 1.0
        return self.attention_factor

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """``[c/2]`` frequencies -> ``[c/2]`` lower ones."""
        if self.kind == "linear":
            return frequencies / self.factor
        kept = self._kept_by_llama3 if self.kind == "llama3" else self._kept_by_yarn
        share = kept(frequencies, theta)
        return frequencies * (share + (1 - share) / self.factor)

    def _kept_by_llama3(self, frequencies: Tensor, _theta: float) -> Tensor:
        turns = frequencies * ((self.original_max_seq_len or 1) / (2 * math.pi))
        span = self.high_freq_factor - self.low_freq_factor
        return ((turns - self.low_freq_factor) / span).clamp(0, 1)

    def _kept_by_yarn(self, frequencies: Tensor, theta: float) -> Tensor:
        channels = 2 * len(frequencies)

        def channel(turns: float) -> float:
            length = (self.original_max_seq_len or 1) / (turns * 2 * math.pi)
            return channels * math.log(length) / (2 * math.log(theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, channels - 1)
        numbers = torch.arange(len(frequencies), device=frequencies.device).double()
        return 1 - ((numbers - low) / (high - low if high != low else 0.001)).clamp(0, 1)


def rotary_frequencies(
    channels: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Compute the rotation angle per position of each pair of channels.

    Args:
        channels: Channels per head, ``c``.
        theta: Base of the wavelengths.
        scaling: For longer sequences; None for none.
        device: Where they are needed.

    Returns:
        ``[c/2]`` float64.
    """
    exponents = torch.arange(0, channels, 2, dtype=torch.float64, device=device)
    frequencies = theta ** (-exponents / channels)
    return frequencies if scaling is None else scaling.scale(frequencies, theta)
