"""The output of a model: a head on its hidden states, or full logits on every rank.

A ``Transformer`` takes ``head=``, a function of the last hidden states and the output weight. Any
other model takes it too once its projection is named, so that a loss in chunks never holds logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from forgekit.model.lora import LoraLinear, weight_of
from forgekit.model.nf4 import is_packed
from forgekit.parallel.module_forward import wrap_forward
from forgekit.tensors import full, wide

Head = Callable[[Tensor, Tensor], Any]


def find_head(model: nn.Module, name: str) -> nn.Linear:
    """Find the module that projects to logits.

    Raises:
        ValueError: If there is none of the name, or it is more than one product with a weight.
    """
    module = dict(model.named_modules()).get(name)
    computes = getattr(getattr(module, "forward", None), "__func__", None)
    is_product = computes in (nn.Linear.forward, LoraLinear.forward)
    adapters = module.adapters.values() if isinstance(module, LoraLinear) else ()
    if (
        not isinstance(module, nn.Linear)
        or not is_product
        or module.bias is not None
        or is_packed(module.weight)
        or any(adapter.dropout for adapter in adapters)
    ):
        raise ValueError(
            f"head={name!r} is {module}; it must name the nn.Linear that returns the logits, such "
            "as 'lm_head', without bias, packed weight or dropout in its adapter."
        )
    return module


def take_head(roots: Iterable[nn.Module], module: nn.Linear) -> None:
    """Make the ``forward`` of a model, or of its stages, accept ``head=``, in place.

    ``model(..., head=head)`` then returns ``head(hidden, weight)``, computed where the projection
    would be: there FSDP has gathered the weight. Without ``head=`` all stays as it was.

    Args:
        roots: The model, or this rank's pipeline stages, before FSDP wraps them.
        module: What ``find_head`` found; another stage may hold it.
    """
    for root in roots:
        wrap_forward(root, partial(_run, module if module in root.modules() else None))


def gather_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Gather vocabulary-sharded logits in a model's output, by a forward hook.

    A loss then works with plain tensors. torch's operators on shards are not safe: some are wrong
    without an error (the backward pass of a mean ``mse_loss``, the value of ``norm(dim=-1)``).
    """
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(output) if f.init}
        whole = {name: gather_output(_module, _args, value) for name, value in fields.items()}
        return dataclasses.replace(output, **whole)
    return tree_map(full, output)


def _run(
    module: nn.Linear | None,
    forward: Callable[..., Any],
    *args: Any,
    head: Head | None = None,
    **keywords: Any,
) -> Any:
    if head is None or module is None:  # None: a later stage computes the output
        return forward(*args, **keywords)
    results: list[Any] = []
    placeholders: list[Tensor] = []

    def project(hidden: Tensor) -> Tensor:
        results.append(head(hidden, weight_of(module)))
        empty = torch.empty(*hidden.shape[:-1], 0, dtype=wide(hidden.dtype), device=hidden.device)
        placeholders.append(empty)
        return empty

    before = vars(module).get("forward")
    vars(module)["forward"] = project
    try:
        output = forward(*args, **keywords)
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before
    # A model that changes its logits (scale, soft cap) returns another tensor or version.
    if [p._version for p in placeholders] != [0] or not _holds(output, placeholders[0]):
        raise ValueError(
            f"head= replaces one projection, but it ran {len(results)} times, or the model changes "
            "its output (a scale, a soft cap). Compute the loss from the model's logits instead."
        )
    return results[0]


def _holds(output: Any, tensor: Tensor) -> bool:
    is_record = dataclasses.is_dataclass(output) and not isinstance(output, type)
    parts = [getattr(output, f.name) for f in dataclasses.fields(output)] if is_record else output
    return any(leaf is tensor for leaf in tree_leaves(parts))
