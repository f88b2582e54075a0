"""Averages of the weights over steps, kept beside them in float32 or wider.

A rule gives the weight of the current parameters in the average. The average is sharded like the
parameters and updated on the device; a skipped step leaves it unchanged.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import torch
from torch import Tensor, nn

from forgekit.optim.step_chain import keep_or_write
from forgekit.tensors import local, wide


class Rule(Protocol):
    """How to weight the current parameters in an average."""

    def share(self, count: Tensor) -> Tensor:
        """Return the weight of the current parameters in the next average.

        Args:
            count: ``[]`` int64: number of steps averaged so far.

        Returns:
            ``[]`` float64; 1 replaces the average by the parameters.
        """
        ...

    def counts(self, step: int) -> bool:
        """Return whether a step, counted from 0, enters the average."""
        ...


@attrs.frozen
class EMA:
    """An exponential moving average: ``average = decay * average + (1 - decay) * weights``.

    It starts from the weights at ``TrainState.create``.

    Attributes:
        decay: Share of the average that each step keeps, at least 0 and below 1.

    Raises:
        ValueError: If ``decay`` is out of range.
    """

    decay: float = attrs.field(validator=(attrs.validators.ge(0), attrs.validators.lt(1)))

    def begin(self, model: nn.Module, device: torch.device) -> Average:
        """Start an average at a model's current weights."""
        return Average.start(self, model, device)

    def share(self, count: Tensor) -> Tensor:
        """See ``Rule``."""
        return torch.full_like(count, 1 - self.decay, dtype=torch.float64)

    def counts(self, step: int) -> bool:  # noqa: ARG002
        """See ``Rule``."""
        return True


@attrs.frozen
class UniformAverage:
    """The mean of the weights after each good step from ``start_step`` on; before, the weights.

    Attributes:
        start_step: Number of the first step, from 0, after which the weights enter the mean.

    References:
        https://arxiv.org/abs/1803.05407
    """

    start_step: int

    def begin(self, model: nn.Module, device: torch.device) -> Average:
        """Start an average at a model's current weights."""
        return Average.start(self, model, device)

    def share(self, count: Tensor) -> Tensor:
        """See ``Rule``."""
        return 1 / (count + 1).double()

    def counts(self, step: int) -> bool:
        """See ``Rule``."""
        return step >= self.start_step


@attrs.define(eq=False, repr=False)
class Average:
    """A running average of a model's trainable parameters; ``TrainState.create`` makes one.

    Attributes:
        rule: How it is computed.
        parameters: The parameters by name.
        values: Their averages by name, in float32 or wider, sharded like them.
        count: ``[]`` int64: number of steps averaged so far.
    """

    rule: Rule
    parameters: dict[str, nn.Parameter]
    values: dict[str, Tensor]
    count: Tensor

    @classmethod
    def start(cls, rule: Rule, model: nn.Module, device: torch.device) -> Average:
        """Start an average at a model's current weights.

        Args:
            rule: ``EMA`` or ``UniformAverage``.
            model: The model, after ``parallelize`` where there is more than one rank.
            device: Where the model computes.
        """
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        values = {n: p.detach().clone().to(wide(p.dtype)) for n, p in trained.items()}
        return cls(rule, trained, values, torch.zeros((), dtype=torch.int64, device=device))

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the average to the current weights, in place."""
        for name, value in self.values.items():
            local(value).copy_(local(self.parameters[name]))
        self.count.zero_()

    @torch.no_grad()
    def advance(self, finite: Tensor, step: int) -> None:
        """Update the average with the weights after a step, in place; a skipped step has no effect.

        Args:
            finite: ``[]`` bool on the device: whether the step was good.
            step: Its number, from 0.
        """
        share, skip = self.rule.share(self.count), ~finite
        for name, value in self.values.items():
            mean, weights = local(value), local(self.parameters[name])
            moved = torch.lerp(mean, weights.to(mean.dtype), share.to(mean))
            keep_or_write(skip, mean, moved)
        if self.rule.counts(step):
            self.count += finite


def average_of(state: Any) -> Average | None:
    """Return a state's running average, or None; a user's own field may have the same name."""
    return state.average if isinstance(state.average, Average) else None
