"""Schedule-free AdamW: an average of the weights in place of a learning-rate decay.

Two points share the parameters' memory. Gradients are computed at the *training* point ``y``; the
model is evaluated at ``x``, an average of all ``z`` so far. With ``z``, kept in the state, each
follows from the other: ``y = (1 - beta1) z + beta1 x``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgekit.optim.groups import decay_groups
from forgekit.optim.step_chain import keep_or_write, step_chain
from forgekit.optim.transforms import (
    At,
    State,
    Tensors,
    Transform,
    check_decay_rates,
    number,
    transform,
)
from forgekit.tensors import local

Point = Literal["train", "evaluate"]


def schedule_free(
    model: nn.Module,
    *,
    lr: float = 2.5e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    r: float = 0.0,
    weight_lr_power: float = 2.0,
) -> ScheduleFree:
    """Build schedule-free AdamW over a model's trainable parameters, with decay groups.

    Give ``make_step`` a constant rate, optionally with a warm-up:
    ``forgekit.optim.warmup(forgekit.constant(2.5e-3), 100)``. Evaluate inside
    ``with forgekit.averaged(state):``, which puts the evaluation point in place of the weights.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        lr: Learning rate until a step's schedule sets it.
        betas: Weight of the average in the training point, above 0; decay rate of the second
            moment.
        eps: Added to the root of the second moment.
        weight_decay: Decay of matrices at the training point; see ``decay_groups``.
        r: Power of the step number in a step's weight in the average.
        weight_lr_power: Power of the largest learning rate so far in that weight.

    Returns:
        An optimizer at its training point that skips a bad step on the device.

    References:
        The road less scheduled, https://arxiv.org/abs/2405.15682
    """
    groups = decay_groups(model, weight_decay)
    options = {"lr": lr, "betas": betas, "eps": eps, "r": r, "weight_lr_power": weight_lr_power}
    return ScheduleFree(groups, **options)


class ScheduleFree(Optimizer):
    """Schedule-free AdamW over parameters of any layout; ``schedule_free`` creates one for a model.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        betas: See ``schedule_free``, as for all below.
        eps: Added to the root of the second moment.
        weight_decay: Decay at the training point, for groups without their own.
        r: Power of the step number in the average.
        weight_lr_power: Power of the learning rate in the average.

    Raises:
        ValueError: If ``betas[0]`` is 0.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        *,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
    ) -> None:
        check_decay_rates(*betas)
        if betas[0] == 0:
            raise ValueError("betas[0] is 0; it must be above 0, or no average could be computed.")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"r": r, "weight_lr_power": weight_lr_power, "point": "train"}
        super().__init__(params, defaults)

    @property
    def point(self) -> Point:
        """Where the parameters are: ``"train"`` or ``"evaluate"``; a checkpoint keeps it."""
        # After a resume the entries say where the parameters are; before a first step the group.
        parameters = (p for group in self.param_groups for p in group["params"])
        points = (self.state[p].get("point", "train") for p in parameters if self.state.get(p))
        return next(points, self.param_groups[0]["point"])

    def train(self) -> None:
        """Move the parameters to the training point, in place; no effect if they are there."""
        self._move("train", lambda beta: 1 - beta)

    def eval(self) -> None:
        """Move the parameters to the evaluation point, in place; no effect if they are there."""
        self._move("evaluate", lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def averages(self) -> dict[nn.Parameter, Tensor]:
        """Compute this rank's shards of the evaluation point without moving the parameters.

        Returns:
            By parameter, without those that were never stepped; empty at the evaluation point.
        """
        if self.point == "evaluate":
            return {}
        betas = {p: group["betas"][0] for group in self.param_groups for p in group["params"]}
        return {p: self._moved(p, 1 - 1 / b) for p, b in betas.items() if self.state.get(p)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters, from the training point to the next one.

        Args:
            closure: Recomputes the loss; called once.

        Returns:
            What the closure returned, else None.

        Raises:
            RuntimeError: If the parameters are at the evaluation point.
        """
        if (point := self.point) != "train":
            raise RuntimeError(
                f"ScheduleFree's parameters are at the point {point!r}, where gradients are "
                "meaningless to it. Call optimizer.train() before the forward pass; to evaluate, "
                "use `with forgekit.averaged(state):`, which restores the training point."
            )
        return step_chain(self, _interpolation, closure, reads={"step"}, moves=False)

    def _move(self, point: Point, weight: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                entries = self.state.get(parameter)
                if entries and entries.get("point", "train") != point:
                    moved = self._moved(parameter, weight(group["betas"][0]))
                    keep_or_write(None, local(parameter.detach()), moved)
                    entries["point"] = point
            group["point"] = point

    def _moved(self, parameter: nn.Parameter, weight: float) -> Tensor:
        z = local(self.state[parameter]["z"])
        return torch.lerp(local(parameter.detach()).to(z.dtype), z, weight)


def _interpolation(group: dict[str, Any]) -> list[Transform]:
    """The next training point, and the values it is computed from."""
    (beta1, beta2), lr, power = group["betas"], group["lr"], group["weight_lr_power"]

    def one(at: At, g: Tensor, y: Tensor, z: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        squares, total, largest = state
        largest = largest.clamp(min=lr)
        weight = at.step ** group["r"] * largest**power
        total = total + weight
        share = torch.where(total > 0, weight / total, 0.0)  # of the new z in the average
        squares = (beta2 * squares).addcmul_(g, g, value=1 - beta2)
        update = g / (squares / (1 - beta2**at.step)).sqrt_().add_(group["eps"])
        update = update.add_(y, alpha=at.weight_decay)
        moved = y + share * (z - y) + lr * (beta1 * (1 - share) - 1) * update
        return moved, z - lr * update, squares, total, largest

    def apply(d: Tensors, state: State, at: At) -> tuple[Tensors, State]:
        each = zip(d, at.values, *state.values(), strict=True)
        moved, *new = zip(*(one(at, *its) for its in each), strict=True)
        return moved, dict(zip(state, new, strict=True))

    # The sum of the weights in the average, and the largest rate, are numbers.
    state = {"z": lambda w: w, "exp_avg_sq": torch.zeros_like, "weight_sum": number}
    return [transform(apply, state | {"lr_max": number}, name="interpolation")]
