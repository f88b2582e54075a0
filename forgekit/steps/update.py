"""Apply a step's correction and move the parameters, or leave everything as it was."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from forgekit.optim.average import average_of
from forgekit.optim.chain import Chained
from forgekit.parallel.fsdp import fsdp_modules, release
from forgekit.ranges import ranged
from forgekit.state import TrainState, donate
from forgekit.steps.clip import Correction, is_finite
from forgekit.steps.experts import rebalance
from forgekit.steps.totals import Totals, parameters_of
from forgekit.tensors import local, wide

StateT = TypeVar("StateT", bound=TrainState)

GROWTH_INTERVAL = 2000
"""Good steps in a row after which a dynamic loss scale is doubled."""

SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**24
"""Bounds of a dynamic loss scale. What overflows below is not a matter of range."""


@ranged
def update(
    state: StateT,
    correction: Correction,
    *,
    lr: float,
    totals: Totals,
    growth_interval: int = GROWTH_INTERVAL,
    total: int | None = None,
) -> StateT:
    """Correct the gradients, step the optimizer in place, and return the state after the step.

    A bad step (no targets, a loss or gradient that is not finite, or a spike) leaves parameters,
    moments, averages, the balance of experts and the optimizer's own step count bitwise untouched.
    Fused optimizers take the factor and the skip inside their kernel; others cost one pass over the
    local gradients and one host read of ``correction.finite``. Parameters that live in host memory
    beside an accelerator cost one too.

    In float16 the loss scale is halved after an overflow and doubled after ``growth_interval`` good
    steps; a step without targets, and a spike, change neither it nor the count.

    Args:
        state: The state whose gradients ``accumulate`` left; consumed.
        correction: What ``clip`` returned.
        lr: Learning rate; a group's own is ``lr * group.get("lr_scale", 1.0)``.
        totals: Reduced totals; reads ``targets``, ``samples`` and ``checked``.
        growth_interval: Good steps in a row after which a dynamic loss scale is doubled.
        total: Number of steps of the run, for a ``bias_rate`` of experts that depends on it.

    Returns:
        The state with ``step``, ``samples``, ``targets`` and ``skipped`` advanced, and in float16
        ``loss_scale`` and ``good_steps``.

    Raises:
        ValueError: If ``lr`` is negative or not finite, before anything is changed.

    References:
        Mixed precision training, https://arxiv.org/abs/1710.03740
    """
    if not 0 <= lr < math.inf:
        raise ValueError(
            f"the learning rate of step {state.step} is {lr}; it must be finite and not negative."
        )
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
        if "state_step" in group:  # periods of transforms follow the run, resumed or not
            group["state_step"] = state.step
    _step_optimizer(state.optimizer, correction)
    sums = dict(totals.sums.items())
    rebalance(state.model, sums, correction.finite, state.step, total)
    if state.mesh is not None:  # what is gathered is old now
        release(fsdp_modules(*state.layout.roots(state.model)))
    finite = correction.finite
    if (average := average_of(state)) is not None:
        average.advance(finite, state.step)
    trained = sums["targets"].to(torch.int64)  # an integer first: NaN times 0 is NaN
    return donate(
        state,
        step=state.step + 1,
        samples=state.samples + totals.samples,
        targets=state.targets.addcmul(trained, finite),
        skipped=(state.skipped + 1).masked_fill_(finite, 0),
        bad_since=state.bad_since.masked_fill(state.skipped == 0, state.samples),
        agreed_names=totals.checked.agreed_names or state.agreed_names,
        **_rescale(state, correction, totals, growth_interval),
    )


def _rescale(
    state: TrainState, correction: Correction, totals: Totals, growth_interval: int
) -> dict[str, Tensor]:
    """The next loss scale, a power of two again, and the good steps behind it."""
    if not state.layout.dynamic_loss_scale:
        return {}
    scale, finite = state.loss_scale, correction.finite
    has_targets = totals["targets"] > 0
    overflow = has_targets & ~is_finite(totals)
    good = state.good_steps + finite.to(torch.int64)
    grows = good >= growth_interval
    # A scale that was chosen beyond the bounds stays there.
    halved = (scale / 2).clamp(min=SMALLEST_SCALE).minimum(scale)
    doubled = (scale * 2).clamp(max=LARGEST_SCALE).maximum(scale)
    return {
        "loss_scale": torch.where(overflow, halved, torch.where(grows, doubled, scale)),
        "good_steps": torch.where(overflow | grows, 0, good),
    }


def _step_optimizer(optimizer: Optimizer, correction: Correction) -> None:
    parameters = parameters_of(optimizer)
    device, dtype = parameters[0].device, parameters[0].dtype
    if correction.finite.device != device:
        # The host's optimizer cannot read the accelerator's memory: with CPU offload this waits.
        correction = Correction(*(value.to(device) for value in correction))
    if not skips_on_device(optimizer):
        if bool(correction.finite):
            _multiply_gradients(parameters, correction.factor)
            optimizer.step()
        return
    factor, found_inf = correction.factor, correction.factor.new_empty((), dtype=torch.float32)
    optimizer.found_inf = torch.logical_not(correction.finite, out=found_inf)  # pyright: ignore[reportAttributeAccessIssue]
    if dtype == torch.float64:  # a float32 grad_scale would round the factor more than gradients
        _multiply_gradients(parameters, factor)
    else:  # the kernel divides by it; where the step is bad the factor is 0 and nothing is read
        optimizer.grad_scale = torch.reciprocal(factor, out=torch.empty_like(found_inf))  # pyright: ignore[reportAttributeAccessIssue]
    try:
        optimizer.step()
    finally:
        optimizer.grad_scale = optimizer.found_inf = None  # pyright: ignore[reportAttributeAccessIssue]


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernel takes ``grad_scale`` and ``found_inf`` and skips bad steps.

    True for the fused implementations of torch, which mark themselves, and for optimizers that
    set ``_step_supports_amp_scaling``; foreach ones would assert, Muon would ignore it silently.
    True for a chain of such optimizers.
    """
    if isinstance(optimizer, Chained):
        return all(map(skips_on_device, optimizer.members))
    marked = getattr(optimizer, "_step_supports_amp_scaling", False)
    fused = bool(marked) and all(group.get("fused", True) for group in optimizer.param_groups)
    return fused and not _lacks_momentum(optimizer)


def _lacks_momentum(optimizer: Optimizer) -> bool:
    """Whether fused SGD is about to make its momentum: from memory that a skip leaves unwritten."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["momentum"] and optimizer.state[parameter].get("momentum_buffer") is None
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def _multiply_gradients(parameters: list[Tensor], factor: Tensor) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            by_dtype.setdefault(gradient.dtype, []).append(local(gradient))
    for dtype, gradients in by_dtype.items():
        # At least float32: a factor near 1 in bfloat16 is 1.
        torch._foreach_mul_(gradients, factor.to(wide(dtype)))
