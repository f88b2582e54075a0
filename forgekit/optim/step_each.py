"""An optimizer as one pure function of a parameter's values, its gradient and its state.

What is a direction is a chain of transforms (``transforms.py``); a rule is for what needs more, as
schedule-free AdamW. To add one, write it and a class whose ``step`` hands it to ``step_each``, and
a row in ``tests/optim/optimizers.py``, where the contract of all optimizers is: layouts, skipped
steps, resuming. No other file changes.

``update`` leaves two 0-d tensors on an optimizer: ``grad_scale``, by which gradients are divided,
and ``found_inf``, 1.0 where the step is bad. Nothing is read on the host: new values are computed
in either case, and old ones kept where the step is bad, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgekit.tensors import local, wide

State = dict[str, Tensor]

Rule = Callable[[Tensor, Tensor, State, dict[str, Any]], tuple[Tensor, State]]
"""``rule(values, gradient, state, group) -> values, state``: one parameter's next values.

All tensors are this rank's parts, values and gradient in float32 or wider. They may be the
optimizer's own memory, so a rule changes none of them in place; it is elementwise, since a rank
sees only its part. Entries of the state that are not returned stay as they are.
"""

Init = Callable[[nn.Parameter], dict[str, Any]]
"""The state of a parameter before its first step, sharded as the parameter is."""


def step_each(
    optimizer: Optimizer, rule: Rule, init: Init, closure: Callable[[], Any] | None = None
) -> Any:
    """Step every parameter that has a gradient, in place; a bad step changes nothing.

    Args:
        optimizer: What is stepped; it has ``_step_supports_amp_scaling = True``.
        rule: Computes new values.
        init: Makes a parameter's state.
        closure: Computes the loss again; called once.

    Returns:
        What the closure returned, else None.
    """
    loss, skip = call_closure(closure), is_skipped(optimizer)
    for group in optimizer.param_groups:
        for parameter in (p for p in group["params"] if p.grad is not None):
            entries, shard = optimizer.state[parameter], local(parameter)
            if not entries:
                entries.update(init(parameter))
            for name, entry in entries.items():
                if isinstance(entry, Tensor) and not entry.ndim:
                    entries[name] = entry.to(shard.device)  # a checkpoint may bring it on the host
            state = {name: local(t) for name, t in entries.items() if isinstance(t, Tensor)}
            gradient = scaled_gradient(optimizer, parameter)
            values, changed = rule(shard.to(gradient.dtype), gradient, state, group)
            keep_or_write(skip, shard, values)
            for name, value in changed.items():
                keep_or_write(skip, state[name], value)
    return loss


def zeros(*names: str) -> Init:
    """Make a state of zeros, each entry shaped as the parameter, in float32 or wider."""
    return lambda parameter: {
        name: torch.zeros_like(parameter, dtype=wide(parameter.dtype)) for name in names
    }


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Compute the loss again, as ``Optimizer.step`` is asked to; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def scaled_gradient(optimizer: Optimizer, parameter: Tensor) -> Tensor:
    """Return this rank's part of a gradient in float32 or wider, divided by ``grad_scale``.

    Without a gradient it is zeros: a step of a model gives them to parameters that nothing used.
    """
    part = torch.zeros_like(local(parameter)) if parameter.grad is None else local(parameter.grad)
    part, scale = part.to(wide(part.dtype)), vars(optimizer).get("grad_scale")
    return part if scale is None else part / scale.to(part.dtype)


def is_skipped(optimizer: Optimizer) -> Tensor | None:
    """Return whether the step is bad, ``[]`` bool on the device; None if nobody asked."""
    found_inf = vars(optimizer).get("found_inf")
    return None if found_inf is None else found_inf != 0


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
