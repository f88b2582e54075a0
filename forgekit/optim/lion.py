"""Lion: the sign of a mean gradient, one state tensor in place of AdamW's two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from forgekit.optim.groups import check_decay_rates, decay_groups
from forgekit.optim.step_chain import step_chain
from forgekit.optim.transforms import decay, lion_sign


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
    """Lion over parameters of any shape and layout; ``lion`` makes one of a model."""

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_decay_rates(*betas)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters; return what ``closure``, called once, returned."""
        return step_chain(self, lambda group: (lion_sign(*group["betas"]), decay()), closure)
