"""Copies of a module's inputs, weights and buffers, for a pass of it beside the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._pytree import tree_map

from forgekit.tensors import full, wide


@attrs.define(eq=False)
class Inputs:
    """What a module is given: copies to differentiate for, and where a graph goes on around it."""

    is_inner: bool
    taken: list[Tensor] = attrs.field(factory=list)
    given: list[Tensor] = attrs.field(factory=list)

    def take(self, tensor: Tensor) -> Tensor:
        """Detach and widen; the first of a block are hidden states, with a gradient in any case."""
        if not tensor.is_floating_point():
            return tensor
        is_hidden = self.is_inner and not self.taken
        copy = widen(tensor.detach()).requires_grad_(tensor.requires_grad or is_hidden)
        self.taken.append(copy)
        self.given.append(tensor)
        return copy

    def leave(self, tensor: Tensor) -> Tensor:
        """Detach; around the module the gradient passes to an input of the same shape as it is."""
        out = full(tensor.detach()) if not self.is_inner else tensor.detach()
        if not self.is_inner or not tensor.requires_grad:
            return out
        like = (g for g in self.given if g.requires_grad and g.shape == out.shape)
        through = next(like, None)
        return out.requires_grad_() if through is None else out + (through - through.detach())


def tensors_of(
    module: nn.Module, units: set[nn.Module], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of a module by name, without those of the units in it."""
    yield from module.named_parameters(prefix, recurse=False)
    yield from module.named_buffers(prefix, recurse=False)
    for name, child in module.named_children():
        if child not in units:
            yield from tensors_of(child, units, f"{prefix}.{name}".lstrip("."))


def gather_parameter(parameter: Tensor) -> Tensor:
    """All of a parameter: first over the ranks of FSDP, or torch warns that it takes two steps."""
    if not isinstance(parameter, DTensor):
        return parameter
    names = parameter.device_mesh.mesh_dim_names or ()
    of_parts = [
        placement if name in ("ep", "tp") else Replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    ]
    return parameter.redistribute(placements=of_parts).full_tensor()


def placement_of(parameter: Tensor) -> Placement | None:
    """How tensor parallelism shards a parameter; None if it does not."""
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    return parameter.placements[names.index("tp")] if "tp" in names else None


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in containers and dataclasses."""
    if isinstance(value, Tensor):
        return function(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changes = {name: map_tensors(function, getattr(value, name)) for name in names}
        return dataclasses.replace(value, **changes)
    if isinstance(value, list | tuple | dict):
        return tree_map(partial(map_tensors, function), value, is_leaf=lambda one: one is not value)
    return value


def floating_tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in a value, full ones."""
    tensors: list[Tensor] = []
    map_tensors(tensors.append, value)
    return [full(tensor) for tensor in tensors if tensor.is_floating_point()]


def widen(tensor: Tensor) -> Tensor:
    """Convert floats to float32 or wider."""
    return tensor.to(wide(tensor.dtype)) if tensor.is_floating_point() else tensor


def normal(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Normal numbers, the same on every rank."""
    generator = torch.Generator(like.device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


@contextmanager
def with_attributes(module: nn.Module, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give a module other attributes for a while."""
    before = {name: vars(module)[name] for name in attributes if name in vars(module)}
    vars(module).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(module).pop(name)
        vars(module).update(before)


@contextmanager
def keeping_buffers(roots: list[nn.Module]) -> Iterator[None]:
    """Give modules copies of their buffers for a while."""
    with ExitStack() as stack:
        for module in (module for root in roots for module in root.modules()):
            buffers = {n: b if b is None else b.clone() for n, b in module._buffers.items()}
            stack.enter_context(with_attributes(module, {"_buffers": buffers}))
        yield
