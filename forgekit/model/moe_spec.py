"""What experts a model has: their sizes, their router, its terms and its balance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import attrs

from forgekit.inputs import (
    brief,
    check_choice,
    check_integers,
    check_numbers,
    nearest_multiples,
)

Rate = Callable[[int, int | None], float]
"""``rate(step, total)``: a pure function of the step, from 0, and the number of steps."""

LARGEST_SIZE = 2**31

TERMS = ("aux_loss", "sequence_aux_loss", "z_loss")


@attrs.frozen(kw_only=True)
class MoESpec:
    """Experts of a ``Transformer``, in place of the feed-forward of some or all blocks.

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

    experts: int = 64
    top_k: int = 8
    ffn_dim: int = 512
    shared: int = 1
    first: int = 0
    every: int = 1
    router: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int | None = None
    top_groups: int | None = None
    capacity: float | None = None
    aux_loss: float = 0.0
    sequence_aux_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float | Rate | None = None
    centered: bool = True
    selection_bias: bool | None = None
    force_balance: bool = False

    def __attrs_post_init__(self) -> None:
        sizes = {name: (getattr(self, name), 1, LARGEST_SIZE) for name in ("experts", "ffn_dim")}
        check_integers(**sizes, top_k=(self.top_k, 1), every=(self.every, 1))
        check_integers(shared=(self.shared, 0, LARGEST_SIZE), first=(self.first, 0))
        check_choice("router", self.router, ("softmax", "sigmoid"))
        check_numbers(**{name: (getattr(self, name), 0) for name in (*TERMS, "scale")})
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k {self.top_k} is above experts {self.experts}; a token goes to at most "
                f"{self.experts} experts."
            )
        if self.capacity is not None:
            check_numbers(capacity=(self.capacity, 0))
            if not self.capacity > 0:
                raise ValueError(
                    f"capacity is {self.capacity}: each expert would take "
                    f"{self.capacity} * tokens * top_k / experts = 0 tokens. It must be above 0; "
                    "None drops no token."
                )
        self._check_groups()
        self._check_bias()

    @property
    def has_bias(self) -> bool:
        """Whether routers have a bias for their choice."""
        return self.bias_rate is not None or bool(self.selection_bias)

    def is_routed(self, layer: int) -> bool:
        """Whether a block, counted from 0, has experts."""
        return layer >= self.first and (layer - self.first) % self.every == 0

    def rate(self, step: int, total: int | None) -> float:
        """By how much biases move in a step."""
        rate = self.bias_rate(step, total) if callable(self.bias_rate) else self.bias_rate or 0.0
        check_numbers(**{f"bias_rate of step {step}": (rate, 0)})
        return rate

    def _check_groups(self) -> None:
        given = {name: getattr(self, name) for name in ("groups", "top_groups")}
        check_integers(**{name: (size, 1) for name, size in given.items() if size is not None})
        if self.groups is None and self.top_groups is None:
            return
        if self.groups is None or self.top_groups is None:
            raise ValueError(
                f"groups is {self.groups} and top_groups {self.top_groups}; give both or neither."
            )
        if self.experts % self.groups:
            raise ValueError(
                f"experts {self.experts} must be divisible by groups {self.groups}; "
                f"{nearest_multiples(self.experts, self.groups)}."
            )
        if self.top_groups > self.groups:
            raise ValueError(
                f"top_groups {self.top_groups} is above groups {self.groups}; experts come from at "
                f"most {self.groups} groups."
            )
        each = self.experts // self.groups
        if self.top_k > (most := self.top_groups * each):
            raise ValueError(
                f"top_k {self.top_k} is above the {most} experts of the chosen groups: "
                f"top_groups {self.top_groups} * experts {self.experts} / groups {self.groups} = "
                f"{most}."
            )

    def _check_bias(self) -> None:
        if self.bias_rate is None:
            return
        if not callable(self.bias_rate):
            check_numbers(bias_rate=(self.bias_rate, 0))
        if self.selection_bias is False:
            raise ValueError(
                f"bias_rate is {brief(self.bias_rate)} and selection_bias False: the router has no "
                "bias to move. Leave selection_bias at None, or set bias_rate to None."
            )
        if self.force_balance:
            raise ValueError(
                f"bias_rate is {brief(self.bias_rate)} and force_balance True: experts take turns, "
                "whatever the bias. Use one of them."
            )


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
    check_integers(warmup=(warmup, 1))
    return lambda step, _total: rate * min((step + 1) / warmup, 1.0)
