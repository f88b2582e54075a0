"""Apply a step's correction and move the parameters, or leave everything as it was."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from forgekit.state import TrainState, donate
from forgekit.steps.clip import Correction
from forgekit.steps.totals import Totals

__all__ = ["skips_on_device", "update"]

StateT = TypeVar("StateT", bound=TrainState)


def update(state: StateT, correction: Correction, *, lr: float, totals: Totals) -> StateT:
    """Correct the gradients, step the optimizer in place, and return the state after the step.

    A bad step (no targets, or a loss or gradient that is not finite) leaves parameters, moments
    and the optimizer's own step count bitwise untouched. Fused optimizers take the factor and the
    skip inside their kernel; others cost one pass over the local gradients and one host read of
    ``correction.finite``.

    Args:
        state: The state whose gradients ``accumulate`` left; consumed.
        correction: What ``clip`` returned.
        lr: Learning rate; a group's own is ``lr * group.get("lr_scale", 1.0)``.
        totals: Reduced totals; reads ``targets`` and ``samples``.

    Returns:
        The state with ``step``, ``samples``, ``targets`` and ``skipped`` advanced.

    Raises:
        ValueError: If ``lr`` is negative or not finite, before anything is changed.
    """
    if not 0 <= lr < math.inf:
        raise ValueError(
            f"the learning rate of step {state.step} is {lr}; it must be finite and not negative."
        )
    for group in state.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    if skips_on_device(state.optimizer):
        _step_fused(state.optimizer, correction)
    elif bool(correction.finite):
        _multiply_gradients(state.optimizer, correction.factor)
        state.optimizer.step()
    trained = torch.where(correction.finite, totals["targets"], 0.0).to(torch.int64)
    return donate(
        state,
        step=state.step + 1,
        samples=state.samples + totals.samples,
        targets=state.targets + trained,
        skipped=torch.where(correction.finite, 0, state.skipped + 1),
    )


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer's kernel takes ``grad_scale`` and ``found_inf`` and skips by itself.

    True for the fused implementations of torch, which mark themselves, and for optimizers that
    set ``_step_supports_amp_scaling``; foreach ones would assert, Muon would ignore it silently.
    """
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


def _step_fused(optimizer: Optimizer, correction: Correction) -> None:
    # The kernel divides by grad_scale. Where the step is bad the factor is 0 and nothing is read.
    optimizer.found_inf = (~correction.finite).to(torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
    if _is_double(optimizer):
        _multiply_gradients(optimizer, correction.factor)
    else:
        optimizer.grad_scale = correction.factor.reciprocal().to(torch.float32)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        optimizer.step()
    finally:
        optimizer.grad_scale = optimizer.found_inf = None  # pyright: ignore[reportAttributeAccessIssue]


def _is_double(optimizer: Optimizer) -> bool:
    """Whether a float32 ``grad_scale`` would round the factor more than the gradients."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return next(parameters).dtype == torch.float64


def _multiply_gradients(optimizer: Optimizer, factor: Tensor) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                grad = parameter.grad
                local = grad.to_local() if isinstance(grad, DTensor) else grad
                by_dtype.setdefault(local.dtype, []).append(local)
    for dtype, gradients in by_dtype.items():
        # At least float32: a factor near 1 in bfloat16 is 1.
        torch._foreach_mul_(gradients, factor.to(torch.promote_types(dtype, torch.float32)))
