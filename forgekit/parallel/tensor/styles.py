"""What tensor parallelism does to one module: its parameters become DTensors, its forward local.

torch's own styles compute with DTensors, whose bookkeeping costs more than a small matrix product.
The ones here compute with this rank's plain tensors, so that any module's ``forward`` works, fused
kernels included, and say by placements what the gradients of its parameters are on each rank: the
same everywhere, its own rows or columns, or parts of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute

from forgekit.checks import nearest_multiples
from forgekit.model.lora import WHOLE_FACTORS, LoraLinear
from forgekit.parallel.layout import full
from forgekit.parallel.module_forward import to_local, with_local_parameters, wrap_forward

Forward = Callable[..., Any]

POSITIONS = Shard(1)
"""Activations are ``[b s d]``."""

EVERYWHERE = Replicate()
"""What all ranks have alike."""


def apply_alike(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let every rank compute the same, in place: plain activations in and out.

    Args:
        module: Any module; its own parameters become replicated DTensors, not its children's.
        mesh: The ranks, a mesh of one dimension.
    """
    _distribute(module, mesh, Replicate())
    # It takes its child's weight itself instead of calling the child.
    readers = [module, *(module.children() if isinstance(module, nn.MultiheadAttention) else ())]
    wrap_forward(module, partial(_alike, readers))


def apply_colwise(module: nn.Linear, mesh: DeviceMesh, *, is_logits: bool) -> None:
    """Shard a projection by its outputs, in place: all channels in, this rank's out.

    Args:
        module: A projection of ``d`` to ``e`` channels.
        mesh: The ranks, a mesh of one dimension whose size divides ``e``.
        is_logits: Whether the output is a DTensor, for what stands after it in the model.
    """
    _distribute(module, mesh, Shard(0))
    wrap_forward(module, partial(_project_out, module, mesh, is_logits))


def apply_rowwise(module: nn.Linear, mesh: DeviceMesh, output: Placement) -> None:
    """Shard a projection by its inputs, in place: this rank's channels in, sums over ranks out.

    Args:
        module: A projection of ``d`` to ``e`` channels.
        mesh: The ranks, a mesh of one dimension whose size divides ``d``.
        output: ``POSITIONS`` for this rank's ``[b s/tp e]``, or ``EVERYWHERE`` for all of them.
    """
    bias = module.bias
    # A bias is added once, to the sum: it stays whole, or each rank would add it.
    module.bias = None  # pyright: ignore[reportAttributeAccessIssue]
    _distribute(module, mesh, Shard(1))
    module.bias = _shard(bias, mesh, Replicate()) if bias is not None else bias
    if isinstance(module, LoraLinear):
        module.add_up, module.drop = partial(_sum_parts, mesh), partial(_drop_channels, mesh)
    wrap_forward(module, partial(_project_in, module, mesh, output))


def apply_part(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Let a module work on this rank's channels or heads, in place; it treats each by itself.

    Args:
        module: A norm of a head, an activation with one weight, a factor for each channel.
        mesh: The ranks, a mesh of one dimension.
        placement: Of its own parameters: ``Shard(0)``, like the channels or heads that they
            multiply, or ``EVERYWHERE``, with the sum of the ranks' gradients.
    """
    _distribute(module, mesh, placement)
    wrap_forward(module, partial(with_local_parameters, [module], None))


def apply_routed(module: Any, mesh: DeviceMesh, output: Placement) -> None:
    """Let each rank compute a part of every expert's sum, in place; routers see all positions.

    So counts, capacity and terms are those of one process, on each rank. Those of the first rank
    are counted and enter gradients, which are summed over the ranks.

    Args:
        module: A layer with a ``router``, ``experts`` with ``widths``, and a ``reduce`` socket.
        mesh: The ranks, a mesh of one dimension.
        output: ``POSITIONS`` for this rank's ``[b s/tp d]``, or ``EVERYWHERE`` for all of them.
    """
    # All ranks route alike, and each gives a part of the gradient: that of its widths.
    router, experts = module.router, module.experts
    _distribute(router, mesh, Replicate())
    wrap_forward(router, partial(_choose_alike, router, mesh))
    for leaf, dim in experts.widths.items():
        placed = Replicate() if dim is None else Shard(dim)
        experts.register_parameter(leaf, _shard(experts.get_parameter(leaf), mesh, placed))
    wrap_forward(experts, partial(with_local_parameters, [experts], None))
    module.reduce = partial(_add_up, mesh, output)


def apply_grouped(module: Any, mesh: DeviceMesh) -> None:
    """Let each rank compute some experts of a module of transformers, in place; sums out.

    While it computes, the module counts this rank's experts, and passes over pairs beyond them.

    Args:
        module: Experts ``[e ...]``, called with ``[n d]`` tokens, and ``[n k]`` numbers of experts
            and their weights.
        mesh: The ranks, a mesh of one dimension whose size divides ``e``.
    """
    _distribute(module, mesh, Shard(0))
    wrap_forward(module, partial(_compute_some, module, mesh))


def apply_sequence(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a norm, or dropout, work on this rank's positions, in place.

    A norm returns those of all ranks: what follows (queries, keys and values) shares the one
    gathered DTensor, and in backward the one reduce-scatter of their summed gradients. For dropout
    every rank draws the whole mask from the same generator and keeps its slice: a mask of the
    slice's size would repeat over the slices.
    """
    if isinstance(module, nn.Dropout):
        wrap_forward(module, partial(_drop, module, mesh))
        return
    _distribute(module, mesh, Replicate())
    wrap_forward(module, partial(_gathered, module, mesh))


def apply_embedding(module: nn.Embedding, mesh: DeviceMesh, output: Placement) -> None:
    """Shard an embedding by vocabulary rows, in place.

    Not ``RowwiseParallel``: its backward builds the gradient of all rows on every rank, and it
    looks for ``padding_idx`` among this rank's rows.

    Args:
        module: An embedding ``[v d]``.
        mesh: The ranks, a mesh of one dimension whose size divides ``v``.
        output: ``POSITIONS`` for this rank's ``[b s/tp d]``, or ``EVERYWHERE`` for all of them.
    """
    _distribute(module, mesh, Shard(0))
    wrap_forward(module, partial(_embed, module, mesh, output))


def take_whole(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Take what all ranks compute with, a plain tensor to whose gradient each adds a part.

    Args:
        x: ``[... d]``; if it is plain, the same on all ranks.
        mesh: The ranks, a mesh of one dimension.
    """
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    # Where nothing is to be moved, the backward of `redistribute` would sum the parts up too early.
    elif not x.placements[0].is_replicate():
        x = x.redistribute(placements=(Replicate(),))
    return x.to_local(grad_placements=(Partial(),))


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make DTensors of a module's own parameters; ranks keep their part and send nothing."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placed = Replicate() if _is_whole(name, placement) else placement
        module.register_parameter(name, _shard(parameter, mesh, placed))


def _is_whole(leaf: str, placement: Placement) -> bool:
    """Whether a factor of an adapter is the same on all ranks beside a sharded weight."""
    return isinstance(placement, Shard) and leaf in WHOLE_FACTORS[placement.dim]


def _gradient(placement: Placement, leaf: str) -> Placement:
    """What the gradient of a projection's parameter is: a shard, or of a whole factor a part."""
    return Partial() if _is_whole(leaf, placement) else placement


def _shard(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    sharded = distribute(parameter, mesh, [placement], src_data_rank=None)
    return nn.Parameter(sharded, parameter.requires_grad)


def _alike(modules: list[nn.Module], forward: Forward, *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: full(value) for name, value in kwargs.items()}
    return with_local_parameters(modules, Replicate(), forward, *map(full, args), **kwargs)


def _project_out(
    module: nn.Linear, mesh: DeviceMesh, is_logits: bool, forward: Forward, x: Tensor
) -> Tensor:
    """``[... d]`` -> ``[... e/tp]``."""
    # All ranks see the same input, and each gives the part of its gradient that its rows find.
    gradient = partial(_gradient, Shard(0))
    out = with_local_parameters([module], gradient, forward, take_whole(x, mesh))
    return DTensor.from_local(out, mesh, (Shard(-1),), run_check=False) if is_logits else out


def _project_in(
    module: nn.Linear, mesh: DeviceMesh, output: Placement, forward: Forward, x: Tensor
) -> Tensor:
    """``[b s d/tp]`` -> ``[b s e]``, or this rank's positions of it."""
    if isinstance(x, DTensor):
        x = x.redistribute(placements=(Shard(-1),)).to_local()
    sharded, bias = module._parameters, module._parameters.get("bias")
    module._parameters = {**sharded, "bias": None}  # it is added once, not on every rank
    try:
        out = with_local_parameters([module], partial(_gradient, Shard(1)), forward, x)
    finally:
        module._parameters = sharded
    out = _sum_parts(mesh, out, output)
    bias = to_local(bias, Partial() if output == POSITIONS else Replicate())
    return out if bias is None else out + bias


def _choose_alike(
    module: nn.Module, mesh: DeviceMesh, forward: Forward, x: Tensor, routing: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    weights, choice, term = with_local_parameters([module], Partial(), forward, x, routing)
    if mesh.get_local_rank() == 0:
        return weights, choice, term
    notes = routing.notes.get(module.layer, {})
    # The range of the bias stays: it is divided by the number of calls on all ranks.
    notes.update({name: n.new_zeros(n.shape) for name, n in notes.items() if name != "bias_range"})
    return weights, choice, None


def _compute_some(
    module: Any, mesh: DeviceMesh, forward: Forward, x: Tensor, expert_ids: Tensor, weights: Tensor
) -> Tensor:
    """``[n d]`` -> ``[n d]``; another rank's experts have the number ``count``, and weight 0."""
    # Experts of transformers skip the number `num_experts` if they are told to be parallel.
    before = module.num_experts, module._is_expert_parallel
    count = module.num_experts // mesh.size()
    expert_ids = full(expert_ids) - mesh.get_local_rank() * count
    is_here = (expert_ids >= 0) & (expert_ids < count)
    expert_ids = torch.where(is_here, expert_ids, count)
    weights = torch.where(is_here, take_whole(weights, mesh), 0.0)
    x = take_whole(x, mesh)
    module.num_experts, module._is_expert_parallel = count, True
    try:
        parts = with_local_parameters([module], Shard(0), forward, x, expert_ids, weights)
    finally:
        module.num_experts, module._is_expert_parallel = before
    return _sum_parts(mesh, parts)


def _add_up(mesh: DeviceMesh, output: Placement, compute: Forward, x: Tensor) -> Tensor:
    """``[b s d]`` -> ``[b s d]``, or this rank's positions of it."""
    return _sum_parts(mesh, compute(take_whole(x, mesh)), output)


def _gathered(module: nn.Module, mesh: DeviceMesh, forward: Forward, x: Tensor) -> DTensor:
    """``[b s/tp d]`` -> ``[b s d]``."""
    out = with_local_parameters([module], Partial(), forward, x)
    # One DTensor for all that follows: its gradients are summed before they are scattered.
    shards = DTensor.from_local(out, mesh, (POSITIONS,), run_check=False)
    return shards.redistribute(placements=(Replicate(),))


def _drop(module: nn.Dropout, mesh: DeviceMesh, forward: Forward, x: Tensor) -> Tensor:
    """``[b s/tp d]`` -> ``[b s/tp d]``."""
    if not module.training or module.p == 0:
        return x
    return x * _mask_here(mesh, x, forward)


def _drop_channels(mesh: DeviceMesh, x: Tensor, p: float) -> Tensor:
    """``[n d/tp]`` -> the same."""
    return x * _mask_here(mesh, x, partial(F.dropout, p=p))


def _mask_here(mesh: DeviceMesh, x: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """Draw the whole mask, from the generator that tp ranks share, and take this rank's slice."""
    whole = x.new_ones(x.shape[0], x.shape[1] * mesh.size(), *x.shape[2:])
    # A copy, so that backward does not keep the whole mask.
    return drop(whole).chunk(mesh.size(), 1)[mesh.get_local_rank()].clone()


def _sum_parts(mesh: DeviceMesh, parts: Tensor, output: Placement = EVERYWHERE) -> Tensor:
    """Add up parts: reduced where all positions are wanted, scattered where this rank's are."""
    sums = DTensor.from_local(parts, mesh, (Partial(),), run_check=False)
    return sums.redistribute(placements=(output,)).to_local()


def _embed(
    module: nn.Embedding, mesh: DeviceMesh, output: Placement, forward: Forward, ids: Tensor
) -> Tensor:
    """``[b s]`` -> ``[b s d]``, or this rank's positions of it."""
    if output == POSITIONS and ids.shape[1] % mesh.size():  # else a gather would hang
        raise ValueError(
            f"input_ids has {ids.shape[1]} positions, which tp {mesh.size()} must divide; "
            f"{nearest_multiples(ids.shape[1], mesh.size())}. Pad them (labels -100)."
        )
    rows = module.num_embeddings // mesh.size()
    first = mesh.get_local_rank() * rows
    is_here = (ids >= first) & (ids < first + rows)
    # Ids outside the vocabulary are not masked, so that they fail as in one process.
    is_elsewhere = ~is_here & (ids >= 0) & (ids < module.num_embeddings)
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - first if first <= padding < first + rows else None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        x = with_local_parameters(
            [module], Shard(0), forward, torch.where(is_elsewhere, 0, ids - first)
        )
    finally:
        module.padding_idx = padding
    # `where`, not a product: weights may be infinite.
    return _sum_parts(mesh, torch.where(is_here[..., None], x, 0.0), output)
