"""Initial weights, each parameter from ``(seed, name)`` alone.

A parameter's values depend neither on the order in which modules are built nor on how many ranks
share it: the full tensor is generated wherever a piece of it is needed, and cut. (Filling shards
in place would give every rank the same numbers.) Nor do they depend on the device: they are drawn
in host memory, since each kind of device has random numbers of its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, distribute_tensor

from forgekit.model.nf4 import is_packed, pack
from forgekit.tensors import local


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, *, only: Collection[str] | None = None) -> None:
    """Fill a model's parameters in place, each from ``(seed, name)``.

    A module with ``initial_std(name) -> float | None`` (as ``Transformer``) has its parameters
    drawn from a normal distribution of that width, or set to one where it answers None. Foreign
    modules are filled by their own ``reset_parameters`` under a generator seeded by their name,
    those of transformers that have none by their model.
    Adapters are filled from the seed that ``add_lora`` got.

    Args:
        model: A model, sharded or not. Bitwise the same full tensors come out in every layout.
        seed: Seed.
        only: Names of the parameters to fill; all if None.

    Raises:
        ValueError: If a parameter belongs to a module that has neither ``initial_std`` above it
            nor ``reset_parameters``.
    """
    # A shared parameter is filled under the first of its names only.
    names = {name for name, _ in model.named_parameters() if only is None or name in only}
    foreign: Reset | None = getattr(model, "_init_weights", None)  # transformers' name
    for name, parameter, full in _initial_values(model, "", seed, None, foreign):
        # In a dry run parameters have no values.
        if name in names and not isinstance(local(parameter), FakeTensor):
            copy_full(parameter, full())


Values = Iterator[tuple[str, nn.Parameter, Callable[[], Tensor]]]
Std = Callable[[str], float | None]
Reset = Callable[[nn.Module], object]


def _initial_values(
    module: nn.Module, prefix: str, seed: int, std: Std | None, foreign: Reset | None
) -> Values:
    """Yield every parameter below ``module`` with a function that makes its full initial value."""
    std = getattr(module, "initial_std", None) or std
    adapters: dict[str, Callable[[], Tensor]] = getattr(module, "initial_adapters", dict)()
    own_parameters = dict(module.named_parameters(recurse=False))
    parameters = {leaf: p for leaf, p in own_parameters.items() if leaf not in adapters}
    if std is not None:
        for leaf, parameter in parameters.items():
            name, shape = prefix + leaf, _full_shape(module, parameter)
            yield name, parameter, partial(_draw, shape, name, seed, std(name))
    elif parameters:
        yield from _reset_values(module, prefix, seed, parameters, foreign)
    # After the weights, whose row lengths they need.
    yield from ((prefix + leaf, own_parameters[leaf], full) for leaf, full in adapters.items())
    for name, child in module.named_children():
        yield from _initial_values(child, f"{prefix}{name}.", seed, std, foreign)


def _full_shape(module: nn.Module, parameter: Tensor) -> tuple[int, ...]:
    """Return a parameter's full shape; for a packed one its matrix's."""
    if is_packed(parameter) and isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return tuple(parameter.shape)


def _draw(shape: tuple[int, ...], name: str, seed: int, std: float | None) -> Tensor:
    if not std:
        return torch.full(shape, 1.0 if std is None else 0.0, device="cpu")
    generator = torch.Generator("cpu").manual_seed(seed_of(seed, name))
    return torch.randn(shape, generator=generator, device="cpu") * std


def _reset_values(
    module: nn.Module,
    prefix: str,
    seed: int,
    parameters: dict[str, nn.Parameter],
    foreign: Reset | None,
) -> Values:
    """Return a foreign module's values, by ``reset_parameters`` of a full-size twin."""
    reset: Reset | None = getattr(type(module), "reset_parameters", foreign)
    if reset is None:
        raise ValueError(
            f"{prefix.rstrip('.') or type(module).__name__!r} ({type(module).__name__}) has the "
            f"parameters {list(parameters)}, but no reset_parameters() to fill them. Add that "
            "method, or initial_std(name) to the model."
        )
    twin, empty = copy.copy(module), dict[str, nn.Parameter]()
    for leaf, parameter in parameters.items():
        dtype = torch.float32 if is_packed(parameter) else parameter.dtype
        shape = _full_shape(module, parameter)
        empty[leaf] = nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu"))
    twin._parameters = {**module._parameters, **empty}  # an absent bias is there as None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, prefix))
        reset(twin)
    for leaf, parameter in parameters.items():
        yield prefix + leaf, parameter, lambda leaf=leaf: empty[leaf]


def copy_full(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's part of a full tensor into a parameter, in place; pack it if needed."""
    full = pack(full) if is_packed(parameter) else full.to(parameter.dtype)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None))
    else:
        parameter.copy_(full)


def seed_of(seed: int, name: str) -> int:
    """Derive a 63-bit seed from seed and name; Python's string hash differs between processes."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
