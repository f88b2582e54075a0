"""Lion: the sign of a mean gradient, one state tensor in place of AdamW's two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from forgekit.inputs import check_numbers
from forgekit.optim.device_skip import (
    call_closure,
    gradients_of,
    is_skipped,
    keep_or_write,
    with_gradient,
)
from forgekit.optim.parameter_groups import check_betas, decay_groups
from forgekit.optim.shards import local, wide


def lion(
    model: nn.Module,
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 1.0,
) -> Lion:
    """Build Lion over a model's trainable parameters, with decay groups.

    Every value moves by the learning rate, so rates are 3 to 10 times smaller than AdamW's, and
    the decay as many times larger.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        lr: Learning rate until a step's schedule sets it.
        betas: How much of the mean gradient is kept, for the sign and for the next mean.
        weight_decay: Decoupled decay of matrices; see ``decay_groups`` for what does not decay.

    Returns:
        An optimizer that skips a bad step on the device.

    References:
        https://arxiv.org/abs/2302.06675
    """
    return Lion(decay_groups(model, weight_decay), lr=lr, betas=betas)


class Lion(Optimizer):
    """Lion over parameters of any shape and layout; ``lion`` makes one of a model.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: See ``lion``.
        weight_decay: Decoupled decay, of groups that do not say.

    Raises:
        ValueError: If a number is out of range.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_numbers(lr=(lr, 0), weight_decay=(weight_decay, 0))
        check_betas(betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters.

        Args:
            closure: Computes the loss again; called once.

        Returns:
            What the closure returned, else None.
        """
        loss, skip = call_closure(closure), is_skipped(self)
        for group in self.param_groups:
            parameters = with_gradient(group)
            gradients = gradients_of(self, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._step_one(group, parameter, gradient, skip)
        return loss

    def _step_one(
        self,
        group: dict[str, Any],
        parameter: nn.Parameter,
        gradient: torch.Tensor,
        skip: torch.Tensor | None,
    ) -> None:
        entries, (kept, kept_on) = self.state[parameter], group["betas"]
        if "exp_avg" not in entries:
            entries["exp_avg"] = torch.zeros_like(parameter, dtype=wide(parameter.dtype))
        shard, mean = local(parameter), local(entries["exp_avg"])
        sign = (kept * mean).add_(gradient, alpha=1 - kept).sign_()
        moved = shard.to(mean.dtype) * (1 - group["lr"] * group["weight_decay"])
        keep_or_write(skip, shard, moved.add_(sign, alpha=-group["lr"]))
        keep_or_write(skip, mean, (kept_on * mean).add_(gradient, alpha=1 - kept_on))
