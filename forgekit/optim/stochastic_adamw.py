"""AdamW for bfloat16 parameters without float32 masters, rounded stochastically."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgekit.optim.device_skip import (
    call_closure,
    gradients_of,
    is_skipped,
    keep_or_write,
    with_gradient,
)
from forgekit.optim.shards import global_indices, local, wide
from forgekit.optim.stochastic_rounding import key_of, round_stochastically


class StochasticAdamW(Optimizer):
    """AdamW that computes in float32 and rounds bfloat16 parameters stochastically.

    Moments are float32. The rounding is a function of the seed, the number of good steps, a
    parameter's name and a value's index in it, so it does not depend on the layout, and a resumed
    run goes on to the bit. Parameters of other dtypes are stepped as by AdamW.

    Args:
        params: Groups.
        names: Names by parameter.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        seed: Seed of the rounding.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: list[dict[str, Any]],
        names: dict[nn.Parameter, str],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float],
        eps: float,
        seed: int,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}
        keyed = [
            {**group, "keys": [key_of(seed, names[p]) for p in group["params"]]} for group in params
        ]
        super().__init__(keyed, defaults)

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
            keys = dict(zip(group["params"], group["keys"], strict=True))
            gradients = gradients_of(self, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._step_one(group, parameter, keys[parameter], gradient, skip)
        return loss

    def _step_one(
        self,
        group: dict[str, Any],
        parameter: nn.Parameter,
        key: int,
        gradient: Tensor,
        skip: Tensor | None,
    ) -> None:
        entries = self._entries(parameter)
        (beta1, beta2), lr = group["betas"], group["lr"]
        shard, mean, squares = (
            local(t) for t in (parameter, entries["exp_avg"], entries["exp_avg_sq"])
        )
        step = entries["step"] + 1
        new_mean = torch.lerp(mean, gradient, 1 - beta1)
        new_squares = (beta2 * squares).addcmul_(gradient, gradient, value=1 - beta2)
        root = (new_squares / (1 - beta2**step)).sqrt_().add_(group["eps"])
        moved = shard.to(mean.dtype) * (1 - lr * group["weight_decay"])
        moved -= lr / (1 - beta1**step) * (new_mean / root)
        if shard.dtype == torch.bfloat16:
            moved = round_stochastically(moved, global_indices(parameter), key, step)
        keep_or_write(skip, shard, moved)
        keep_or_write(skip, mean, new_mean)
        keep_or_write(skip, squares, new_squares)
        keep_or_write(skip, entries["step"], step)

    def _entries(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        entries, dtype = self.state[parameter], wide(parameter.dtype)
        device = local(parameter).device
        if not entries:
            entries["step"] = torch.zeros((), dtype=torch.float64)
            entries["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            entries["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        entries["step"] = entries["step"].to(device)
        return entries
