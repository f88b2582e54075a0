"""Wrappers around a module's ``forward``.

``forward`` is replaced on the instance, at set-up. A wrapper module would put a prefix before the
names of parameters, and a hook can neither repeat what ``forward`` computes nor leave it early.
What wraps a module later (recomputation, compilation, FSDP) finds one like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement


def wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Replace a module's ``forward``, in place, by a function of the original.

    Args:
        module: The module.
        around: ``around(forward, *args, **keywords)``, called where ``forward`` was.
    """
    module.forward = partial(around, module.forward)


def with_local_parameters(
    modules: Iterable[nn.Module],
    gradient: Placement | Callable[[str], Placement] | None,
    forward: Callable[..., Any],
    *args: Any,
    **keywords: Any,
) -> Any:
    """Call ``forward`` with the parameters of modules replaced by this rank's plain tensors.

    Any module's ``forward`` then works on shards, fused kernels included.

    Args:
        modules: The modules; not their children.
        gradient: What the gradients of plain tensors are: shards, parts of a sum, or whole; a
            function of a parameter's name; or None: sharded as the parameter is, and parts of a
            sum where ranks hold it whole.
        forward: Computes with the modules.
        *args: What it is given.
        **keywords: What it is given by name.

    Returns:
        What ``forward`` returns.
    """
    sharded = [(module, module._parameters) for module in modules]
    for module, parameters in sharded:
        # Replaced, not modified: the DTensors are restored, whatever forward does.
        plain: dict[str, Any] = {
            name: to_local(p, gradient(name) if callable(gradient) else gradient)
            for name, p in parameters.items()
        }
        module._parameters = plain
    try:
        return forward(*args, **keywords)
    finally:  # even if recomputation stops early by an exception
        for module, parameters in sharded:
            module._parameters = parameters


def to_local(parameter: Tensor | None, gradient: Placement | None) -> Tensor | None:
    """Return this rank's shard of a parameter; None and plain tensors pass."""
    if not isinstance(parameter, DTensor):
        return parameter
    if gradient is not None:
        return parameter.to_local(grad_placements=(gradient,))
    placements = [Partial() if p.is_replicate() else p for p in parameter.placements]
    return parameter.to_local(grad_placements=placements)
