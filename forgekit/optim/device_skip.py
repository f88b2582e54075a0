"""A step that a device may skip: what torch's fused optimizers do in their kernels.

``update`` leaves two 0-d tensors on an optimizer: ``grad_scale``, by which gradients are divided,
and ``found_inf``, 1.0 where the step is bad. Nothing is read on the host: new values are computed
in either case, and old ones kept where the step is bad, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgekit.optim.shards import local, wide


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Compute the loss again, as ``Optimizer.step`` is asked to; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradient(group: dict[str, Any]) -> list[nn.Parameter]:
    """Return the parameters of a group that a step moves."""
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def gradients_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's parts of gradients in float32 or wider, divided by ``grad_scale``."""
    parts = [local(p.grad) for p in parameters if p.grad is not None]
    parts = [part.to(wide(part.dtype)) for part in parts]
    scale = vars(optimizer).get("grad_scale")
    return parts if scale is None else [part / scale.to(part.dtype) for part in parts]


def is_skipped(optimizer: Optimizer) -> Tensor | None:
    """Return whether the step is bad, ``[]`` bool on the device; None if nobody asked."""
    found = vars(optimizer).get("found_inf")
    return None if found is None else found != 0


def keep_or_write(skip: Tensor | None, old: Tensor, new: Tensor) -> None:
    """Write a new value, or keep the old one where the step is bad, in place.

    Args:
        skip: What ``is_skipped`` returned.
        old: This rank's part of a parameter or of its state.
        new: ``[...]`` as ``old``; rounded to its dtype.
    """
    if skip is None:
        old.copy_(new)
    else:
        torch.where(skip, old, new.to(old.dtype), out=old)
