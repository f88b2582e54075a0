"""Split a model into pipeline stages: contiguous runs of blocks, balanced by cost.

A stage is a shallow copy of the model in which the parts of other stages are ``Absent``, so the
model's own ``forward`` runs every stage. Positions in lists stay: every parameter keeps its name.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from forgekit.parallel.pipeline.stage import Absent, Stage


@attrs.frozen(eq=False)
class SplitModel:
    """A split model on one rank.

    Attributes:
        stages: The rank's, in order.
        copies: Modules above the parts, each with its copy in one of the stages.
        shared: Modules that more than one stage runs, or holds.
        last_blocks: Name of the last block of each stage of all ranks.
    """

    stages: list[Stage]
    copies: list[tuple[nn.Module, nn.Module]]
    shared: set[nn.Module]
    last_blocks: list[str]


@attrs.define(eq=False)
class _Part:
    """A part of the model; ``stage`` is None if every stage has it.

    Before the split the stage is the number of a block, -1 before the blocks, and after them their
    number.
    """

    parent: nn.Module
    child: str
    name: str
    module: nn.Module
    stage: int | None


def split_model(model: nn.Module, blocks: str, stages: int, mine: Sequence[int]) -> SplitModel:
    """Split a model in place: keep what this rank's stages need and make a copy for each of them.

    What is registered before the list of blocks goes to the first stage, what follows it to the
    last. Modules without parameters run in every stage (a rotary embedding, an activation between
    blocks), except dropout, which each stage would draw on its own.

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
    names = blocks.split(".")
    path = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
    parts = list(_parts(path, names))
    bounds = _assign(parts, path[-1], blocks, stages)
    _check_held(model, path)
    _check_tied(model, parts)
    owners = _owners(parts, nn.Module.modules)
    block_names = [part.name for part in parts if part.parent is path[-1]]
    last_blocks = [block_names[end - 1] for end in bounds[1:]]
    holders = {part.name: part.stage for part in parts if part.stage is not None}
    # Modules above the parts: their code runs in every stage.
    frame = list(dict.fromkeys([*path, *(part.parent for part in parts)]))
    held, copies = [], []
    for number in mine:
        twins = _copy_frame(frame)
        its_parts = {part.name: part.module for part in parts if part.stage == number}
        held.append(Stage(number, twins[model], its_parts, holders, last_blocks))
        for part in parts:
            if part.stage not in (None, number):
                twins[part.parent]._modules[part.child] = Absent(part.module, part.name, held[-1])
        copies += twins.items()
    # The model itself keeps the parts of this rank's stages.
    for part in parts:
        if part.stage not in (None, *mine):
            part.parent._modules[part.child] = Absent(part.module, part.name)
            part.module.register_forward_pre_hook(partial(_refuse_left_out, part.name))
    shared = {module for module, of in owners.items() if None in of or len(of) > 1}
    return SplitModel(held, copies, shared | {twin for _, twin in copies}, last_blocks)


def _assign(parts: list[_Part], blocks: nn.Module, name: str, stages: int) -> list[int]:
    """Assign parts to stages, in place; return the first block of each stage, and their number."""
    costs = [cost_of(block) for _, block in _children(blocks)]
    if len(costs) < stages:
        raise ValueError(
            f"{name!r} has {len(costs)} blocks for {stages} pipeline stages. Use at least "
            f"{stages} blocks, or a mesh and pipeline_schedule with at most {len(costs)} stages."
        )
    ends = ([cost_of(p.module) for p in parts if p.stage == end] for end in (-1, len(costs)))
    # Embedding and output count: with a large vocabulary the last stage gets fewer blocks.
    bounds = balance(costs, stages, *map(sum, ends))
    for part in parts:
        if part.stage is not None:
            part.stage = min(max(bisect.bisect(bounds, part.stage) - 1, 0), stages - 1)
    return bounds


def _copy_frame(frame: list[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Copy the modules above the parts, so that each copy holds the copies below it."""
    twins = {module: _shallow(module) for module in frame}
    for module, twin in twins.items():
        twin._modules.update({name: twins[m] for name, m in _children(module) if m in twins})
    return twins


def cost_of(module: nn.Module) -> float:
    """Return a module's cost per position: the number of its matrix elements.

    A lookup reads one row, so an embedding costs its width. Attention's own cost, the same in
    every block, and vectors are left out; all experts of a layer count.
    """
    return sum(
        part.embedding_dim
        if isinstance(part, nn.Embedding)
        else sum(p.numel() for p in part.parameters(recurse=False) if p.ndim > 1)
        for part in module.modules()
    )


def balance(costs: Sequence[float], stages: int, first: float = 0, last: float = 0) -> list[int]:
    """Split a sequence of blocks so that the most expensive stage is as cheap as possible.

    Args:
        costs: Cost of each block.
        stages: Number of stages, each of at least one block.
        first: Cost that the first stage has besides, the embedding.
        last: Cost that the last stage has besides, the output projection.

    Returns:
        First block of each stage, and at the end the number of blocks. Among splits with the same
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


def _parts(path: list[nn.Module], names: list[str]) -> Iterator[_Part]:
    """List the children of all modules above the blocks, and the blocks."""
    blocks = _children(path[-1])
    for depth, (parent, inner) in enumerate(zip(path[:-1], names, strict=True)):
        stage = -1
        for child, module in _children(parent):
            if child == inner:
                stage = len(blocks)
            else:
                yield from _opened(parent, child, ".".join([*names[:depth], child]), module, stage)
    for number, (child, module) in enumerate(blocks):
        yield _Part(path[-1], child, ".".join([*names, child]), module, number)


def _opened(
    parent: nn.Module, child: str, name: str, module: nn.Module, stage: int
) -> Iterator[_Part]:
    """Yield a child as a part; of a list, which is never called itself, its items."""
    if type(module) in (nn.ModuleList, nn.ModuleDict):
        for inner, part in _children(module):
            yield from _opened(module, inner, f"{name}.{inner}", part, stage)
    else:
        serves_all = next(module.parameters(), None) is None and not isinstance(module, _DropoutNd)
        yield _Part(parent, child, name, module, None if serves_all else stage)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return children by name; unlike in ``named_children`` a shared one appears twice."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _owners(
    parts: list[_Part], held_by: Callable[[nn.Module], Iterable[Any]]
) -> dict[Any, set[int | None]]:
    """Map modules or parameters of parts to the stages that have them."""
    owners: dict[Any, set[int | None]] = {}
    for part in parts:
        for held in held_by(part.module):
            owners.setdefault(held, set()).add(part.stage)
    return owners


def _shallow(module: nn.Module) -> nn.Module:
    """Copy a module; children and buffers are shared, the dict of children and hooks are not."""
    twin = copy.copy(module)
    for name in vars(nn.Module()):
        value = getattr(twin, name)
        if isinstance(value, dict) and name != "_buffers":  # buffers move with the original
            setattr(twin, name, value.copy())
    return twin


def _refuse_left_out(name: str, *_given: Any) -> None:
    raise ValueError(
        f"{name} was called on a rank whose pipeline stages do not have it: through a plain list "
        "or a closure. Call it through the model's list of blocks, or use pp=1."
    )


def _check_held(model: nn.Module, path: list[nn.Module]) -> None:
    if held := [name for module in path for name, _ in module.named_parameters(recurse=False)]:
        raise ValueError(
            f"{type(model).__name__} has the parameters {held} outside the modules that one "
            "pipeline stage gets. Move them into a module beside the list of blocks."
        )


def _check_tied(model: nn.Module, parts: list[_Part]) -> None:
    owners = _owners(parts, nn.Module.parameters)
    every_name = model.named_parameters(remove_duplicate=False)
    shared = [name for name, parameter in every_name if len(owners[parameter]) > 1]
    if getattr(getattr(model, "spec", None), "tied", False):
        shared = ["embedding.weight", "output.weight"]
    if shared:
        raise ValueError(
            f"{' and '.join(shared)} are one tensor or module, but each pipeline stage would "
            "train its own copy. Do not share them (TransformerSpec(tied=False)), or use pp=1."
        )
