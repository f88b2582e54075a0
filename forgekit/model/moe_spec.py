"""Specification of experts: sizes, router, auxiliary terms and load balancing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import attrs
from attrs import field
from attrs.validators import ge, gt, lt, optional

from forgekit.checks import check_choice, check_numbers

Rate = Callable[[int, int | None], float]
"""``rate(step, total)``: a pure function of the step, from 0, and the number of steps."""


WEIGHT = (ge(0.0), lt(math.inf))


def _check_rate(_spec: MoESpec, _field: Any, rate: float | Rate | None) -> None:
    if rate is not None and not callable(rate):
        check_numbers(bias_rate=(rate, 0))


def _check_router(_spec: MoESpec, _field: Any, router: str) -> None:
    check_choice("router", router, ("softmax", "sigmoid"))


def _check_groups(spec: MoESpec, _field: Any, top_groups: int | None) -> None:
    if (spec.groups is None) != (top_groups is None):
        raise ValueError(
            f"groups is {spec.groups} and top_groups {top_groups}; give both or neither."
        )
    if spec.groups is None or top_groups is None:
        return
    if spec.top_k > (most := top_groups * spec.experts // spec.groups):
        raise ValueError(
            f"top_k {spec.top_k} is above the {most} experts of the chosen groups: top_groups "
            f"{top_groups} * experts {spec.experts} / groups {spec.groups} = {most}."
        )


@attrs.frozen(kw_only=True)
class MoESpec:
    """Experts of a ``Transformer``, which replace the feed-forward of some or all blocks.

    Attributes:
        experts: Number of routed experts, ``e``.
        top_k: Experts for each token, ``k``.
        ffn_dim: Width of each expert, ``f``.
        shared: Number of experts of the same width that every token goes to.
        first: The first block that has experts; those before are dense.
        every: From there on each such block has experts, the others are dense.
        router: "softmax" over all experts, or a "sigmoid" for each.
        renormalize: Whether the weights of a token's experts are divided by their sum.
        scale: Factor of these weights.
        groups: Number of groups of neighbours that experts are divided into; None for no groups.
        top_groups: Groups that a token's experts may come from.
        capacity: Tokens that an expert computes at most, as a factor of the even share of a
            micro-batch; the others are dropped. None drops none.
        aux_loss: Weight of the balance loss over the batch.
        sequence_aux_loss: Weight of the balance loss over each sequence.
        z_loss: Weight of the squared log-partition of the router's logits.
        bias_rate: By how much the bias of an expert moves in a step, a number or a function of
            the step and the number of steps; None for no balancing by bias.
        centered: Whether these moves keep the mean of the biases.
        selection_bias: Whether there is a bias; None if `bias_rate` moves one.
        force_balance: Whether experts take turns, for benchmarks.
    """

    experts: int = field(default=64, validator=ge(1))
    top_k: int = field(default=8, validator=ge(1))
    ffn_dim: int = field(default=512, validator=ge(1))
    shared: int = field(default=1, validator=ge(0))
    first: int = field(default=0, validator=ge(0))
    every: int = field(default=1, validator=ge(1))
    router: Literal["softmax", "sigmoid"] = field(default="softmax", validator=_check_router)
    renormalize: bool = True
    scale: float = field(default=1.0, validator=WEIGHT)
    groups: int | None = field(default=None, validator=optional(ge(1)))
    top_groups: int | None = field(default=None, validator=(optional(ge(1)), _check_groups))
    capacity: float | None = field(default=None, validator=optional((gt(0.0), lt(math.inf))))
    aux_loss: float = field(default=0.0, validator=WEIGHT)
    sequence_aux_loss: float = field(default=0.0, validator=WEIGHT)
    z_loss: float = field(default=0.0, validator=WEIGHT)
    bias_rate: float | Rate | None = field(default=None, validator=_check_rate)
    centered: bool = True
    selection_bias: bool | None = None
    force_balance: bool = False

    @property
    def has_bias(self) -> bool:
        """Whether routers have a bias for their choice."""
        return self.bias_rate is not None or bool(self.selection_bias)

    def is_routed(self, layer: int) -> bool:
        """Whether a block, counted from 0, has experts."""
        return layer >= self.first and (layer - self.first) % self.every == 0

    def rate(self, step: int, total: int | None) -> float:
        """Return the step size of biases."""
        rate = self.bias_rate(step, total) if callable(self.bias_rate) else self.bias_rate or 0.0
        check_numbers(bias_rate=(rate, 0))  # a negative rate would unbalance loads
        return rate


def cosine_rate(rate: float) -> Rate:
    """A ``bias_rate`` that falls along half a cosine from ``rate`` to 0 at the last step.

    Examples:
        >>> cosine_rate(0.1)(5, 10)
        0.05
    """

    def at(step: int, total: int | None) -> float:
        if total is None:
            raise ValueError(
                "a cosine bias_rate needs the number of steps; pass make_step(..., total=steps)."
            )
        progress = min(step / max(total, 1), 1.0)
        return rate * 0.5 * (1 + math.cos(math.pi * progress))

    return at


def linear_rate(rate: float, *, warmup: int) -> Rate:
    """A ``bias_rate`` that rises in a straight line to ``rate`` at step ``warmup``.

    Examples:
        >>> linear_rate(0.1, warmup=4)(0, None)
        0.025
    """
    return lambda step, _total: rate * min((step + 1) / warmup, 1.0)
