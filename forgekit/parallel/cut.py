"""Cut one model into pipeline stages: contiguous runs of its blocks, as even as they can be.

A stage is a shallow copy of the model in which the parts of other stages are ``Absent``: they pass
on what they are given, so the model's own ``forward`` runs every stage. Positions in lists stay,
so every parameter keeps its name.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

__all__ = ["Absent", "Cut", "balance", "cost_of", "cut"]


class Absent(nn.Module):
    """Stands where a part of another stage would be, and returns its first argument.

    Reads of the part's plain settings (numbers, strings) are answered as the part would; its
    ``weight`` and ``bias`` are None.
    """

    weight = None
    bias = None

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        for name, value in vars(of).items():
            if name not in self.__dict__ and isinstance(value, int | float | str):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return args[0] if args else next(iter(kwargs.values()))


@attrs.frozen(eq=False)
class Cut:
    """A model after its cut, as one rank holds it.

    Attributes:
        modules: The rank's stages, in order.
        copies: Modules above the list of blocks, each with its copy in one of the stages.
        hollow: The model with all its parts absent; gives its input back, if nothing but the
            parts works on it.
        bounds: First block of each stage, and the number of blocks.
    """

    modules: list[nn.Module]
    copies: list[tuple[nn.Module, nn.Module]]
    hollow: nn.Module
    bounds: list[int]


@attrs.frozen(eq=False)
class _Part:
    """A child of a module on the way to the blocks; ``stage`` is None if every stage has it."""

    parent: nn.Module
    name: str
    module: nn.Module
    stage: int | None


def cut(model: nn.Module, blocks: str, stages: int, mine: Sequence[int]) -> Cut:
    """Cut a model in place: keep what this rank's stages need and make a copy for each of them.

    What is registered before the list of blocks goes to the first stage, what follows it to the
    last. Modules without parameters stay everywhere (a rotary embedding serves all blocks), except
    those of ``torch.nn`` (a dropout works on what travels).

    Args:
        model: The model, on meta or filled; keeps exactly the parts of this rank's stages.
        blocks: Name of its list of repeated layers.
        stages: Number of stages.
        mine: This rank's stages.

    Returns:
        The stages, which share their parts with ``model``.

    Raises:
        ValueError: If there are fewer blocks than stages, parameters are held by the model itself,
            or are shared between stages.
    """
    path = _path(model, blocks)
    costs = [cost_of(block) for _, block in _children(path[-1])]
    _check_enough(blocks, len(costs), stages)
    edges = [(p.stage, cost_of(p.module)) for p in _parts(path, blocks, [0, len(costs)])]
    first = sum(cost for stage, cost in edges if stage == -1)
    last = sum(cost for stage, cost in edges if stage == 1)
    bounds = balance(costs, stages, first, last)
    parts = [
        attrs.evolve(p, stage=None if p.stage is None else min(max(p.stage, 0), stages - 1))
        for p in _parts(path, blocks, bounds)
    ]
    _check_held(model, path)
    _check_tied(model, parts)
    copies: list[tuple[nn.Module, nn.Module]] = []
    modules = [_copy(path, blocks, parts, {None, stage}, copies) for stage in mine]
    hollow = _copy(path, blocks, parts, {None}, copies)
    for part in parts:
        if part.stage not in (None, *mine):
            part.parent._modules[part.name] = Absent(part.module)
    return Cut(modules, copies, hollow, bounds)


def cost_of(module: nn.Module) -> float:
    """Cost of a module per place: the elements of its matrices, two operations on each.

    A lookup reads one row, so an embedding costs its width. Attention's own cost, the same in
    every block, and vectors are left out; all experts of a layer count.
    """
    cost = 0.0
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            cost += part.embedding_dim
        else:
            own = part.parameters(recurse=False)
            cost += sum(parameter.numel() for parameter in own if parameter.ndim > 1)
    return cost


def balance(costs: Sequence[float], stages: int, first: float = 0, last: float = 0) -> list[int]:
    """Cut a row of blocks so that the most expensive stage is as cheap as possible.

    Args:
        costs: Cost of each block.
        stages: Number of stages, each of at least one block.
        first: Cost that the first stage has besides, the embedding.
        last: Cost that the last stage has besides, the output projection.

    Returns:
        First block of each stage, and at the end the number of blocks. Among cuts with the same
        largest stage, one with a small sum of squares.

    Examples:
        >>> balance([1.0] * 8, stages=2, last=3.0)
        [0, 5, 8]
    """
    sums = [0.0, *itertools.accumulate(costs)]
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
    for stage in range(stages):
        extra = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
        best = {
            end: min(
                (max(top, cost), squares + cost**2, [*bounds, end])
                for start, (top, squares, bounds) in best.items()
                if start < end
                for cost in [sums[end] - sums[start] + extra]
            )
            for end in range(stage + 1, len(costs) - (stages - 1 - stage) + 1)
        }
    return best[len(costs)][2]


def _path(model: nn.Module, blocks: str) -> list[nn.Module]:
    """The modules from the model down to its list of blocks."""
    path = [model]
    for name in blocks.split("."):
        path.append(path[-1].get_submodule(name))
    return path


def _parts(path: list[nn.Module], blocks: str, bounds: list[int]) -> Iterator[_Part]:
    """The children of all modules on the path; those before the blocks have stage -1."""
    names = blocks.split(".")
    stages = len(bounds) - 1
    for parent, inner in zip(path[:-1], names, strict=True):
        stage = -1
        for name, module in _children(parent):
            if name == inner:
                stage = stages
            else:
                yield _Part(parent, name, module, None if _serves_all(module) else stage)
    for index, (name, module) in enumerate(_children(path[-1])):
        stage = next(k for k in range(stages) if index < bounds[k + 1])
        yield _Part(path[-1], name, module, stage)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Children by name; one that is used twice appears twice, unlike in ``named_children``."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _serves_all(module: nn.Module) -> bool:
    if next(module.parameters(), None) is not None:
        return False
    has_buffers = next(module.buffers(), None) is not None
    return has_buffers or not type(module).__module__.startswith("torch.nn.")


def _copy(
    path: list[nn.Module],
    blocks: str,
    parts: list[_Part],
    stages: set[int | None],
    copies: list[tuple[nn.Module, nn.Module]],
) -> nn.Module:
    """Copy the modules on the path, with the parts of some stages in them."""
    by_original = {module: _shallow(module) for module in path}
    for parent, name, module in zip(path[:-1], blocks.split("."), path[1:], strict=True):
        by_original[parent]._modules[name] = by_original[module]
    for part in parts:
        if part.stage not in stages:
            by_original[part.parent]._modules[part.name] = Absent(part.module)
    copies.extend(by_original.items())
    return by_original[path[0]]


def _shallow(module: nn.Module) -> nn.Module:
    """Copy a module that shares its parts and buffers, but neither its list of parts nor hooks."""
    twin = copy.copy(module)
    for name in vars(nn.Module()):
        value = getattr(twin, name)
        if isinstance(value, dict) and name != "_buffers":  # buffers move with the original
            setattr(twin, name, value.copy())
    return twin


def _check_enough(blocks: str, count: int, stages: int) -> None:
    if count < stages:
        raise ValueError(
            f"{blocks!r} has {count} blocks for {stages} pipeline stages; each stage needs at "
            f"least one. Use at least {stages} blocks, or a mesh or pipeline_schedule with at "
            f"most {count} stages."
        )


def _check_held(model: nn.Module, path: list[nn.Module]) -> None:
    names = {module: name for name, module in model.named_modules()}
    for module in path:
        if held := [name for name, _ in module.named_parameters(recurse=False)]:
            where = f"its part {names[module]!r}" if names[module] else "itself"
            raise ValueError(
                f"{type(model).__name__} holds the parameters {held} in {where}, around the list "
                "of blocks, so no single pipeline stage could own them. Move them into a module "
                "before or after the blocks."
            )


def _check_tied(model: nn.Module, parts: list[_Part]) -> None:
    owners: dict[Tensor, set[int | None]] = {}
    for part in parts:
        for parameter in part.module.parameters():
            owners.setdefault(parameter, set()).add(part.stage)
    every_name = model.named_parameters(remove_duplicate=False)
    shared = [name for name, parameter in every_name if len(owners[parameter]) > 1]
    if getattr(getattr(model, "spec", None), "tied", False):
        shared = ["embedding.weight", "output.weight"]
    if shared:
        raise ValueError(
            f"{' and '.join(shared)} are one tensor, which stages on different ranks would each "
            "train on their own. Untie them (TransformerSpec(tied=False)), or use pp=1."
        )
