"""Tensor-parallel styles of a module: parameters become DTensors, forward computes locally.

torch's own styles compute with DTensors, whose bookkeeping costs more than a small matrix product.
The ones here compute with this rank's plain tensors, so that any module's ``forward`` works, fused
kernels included, and say by placements what the gradients of its parameters are on each rank: the
same everywhere, its own rows or columns, or parts of a sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute

from forgekit.checks import nearest_multiples
from forgekit.model.lora import WHOLE_FACTORS, LoraLinear
from forgekit.parallel.module_forward import to_local, with_local_parameters, wrap_forward
from forgekit.tensors import full

Forward = Callable[..., Any]

POSITIONS = Shard(1)
"""Activations are ``[b s d]``."""

EVERYWHERE = Replicate()
"""Values that all ranks hold."""


PARAMETER_LISTS = nn.ParameterList, nn.ParameterDict
"""Modules that are not called: their parent uses their parameters."""


class Region(NamedTuple):
    """The context in which a plan is applied.

    Attributes:
        mesh: The ranks, a mesh of one dimension.
        stream: Placement of the residual stream: ``POSITIONS`` or ``EVERYWHERE``.
        logits: Projections whose output is a DTensor, for the code after them in the model.
    """

    mesh: DeviceMesh
    stream: Placement
    logits: Collection[nn.Module]


class StyleRecord(NamedTuple):
    """A style.

    Attributes:
        of: The modules that it is for, in words.
        fits: Whether a module is one.
        apply: Applies it to a module, in place.
        sharded: Of a module, the parameters that ranks share, and the dimension of each.
    """

    of: str
    fits: Callable[[Any], bool]
    apply: Callable[[Any, Region], None]
    sharded: Callable[[Any], Mapping[str, int | None]] = lambda _: {}


def _apply(placement: Placement, run: Callable[..., Any], module: Any, region: Region) -> None:
    """Distribute a module's parameters and let ``run`` call its forward, in place."""
    _distribute(module, region, placement)
    wrap_forward(module, partial(run, module, region))


def _apply_rowwise(project: Forward, module: nn.Linear, region: Region) -> None:
    """Shard a projection by inputs: this rank's channels, or all, in; sums over ranks out."""
    if isinstance(module, LoraLinear):
        module.add_up = partial(_sum_parts, region.mesh)
        module.drop = partial(_drop_channels, region)
    _apply(Shard(1), project, module, region)


def _apply_routed(module: Any, region: Region) -> None:
    """Compute a part of every expert's sum on each rank; routers see all positions.

    So counts, capacity and terms are those of one process, on each rank. Those of the first rank
    are counted and enter gradients, which are summed over the ranks.
    """
    # All ranks route alike; each has the part of the gradient of its widths.
    router, experts = module.router, module.experts
    _apply(EVERYWHERE, _choose_alike, router, region)
    for leaf, dim in experts.widths.items():
        placed = EVERYWHERE if dim is None else Shard(dim)
        experts.register_parameter(leaf, _shard(experts.get_parameter(leaf), region, placed))
    wrap_forward(experts, partial(with_local_parameters, [experts], None))
    module.reduce = partial(_add_up, region)


def take_whole(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated parameter as a plain tensor; each rank adds a part to its gradient.

    Args:
        x: ``[... d]``; if it is plain, the same on all ranks.
        mesh: The ranks, a mesh of one dimension.
    """
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    # With nothing to move, the backward of `redistribute` would sum the parts too early.
    elif not x.placements[0].is_replicate():
        x = x.redistribute(placements=(Replicate(),))
    return x.to_local(grad_placements=(Partial(),))


def _distribute(module: nn.Module, region: Region, placement: Placement) -> None:
    """Make DTensors of a module's own parameters; ranks keep their shard and send nothing."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placed = EVERYWHERE if _is_whole(name, placement) else placement
        module.register_parameter(name, _shard(parameter, region, placed))


def _is_whole(leaf: str, placement: Placement) -> bool:
    """Whether a parameter is replicated beside a sharded weight: some factors of adapters.

    And the bias of a matrix that is sharded by inputs, which is added once, to the sum.
    """
    if not isinstance(placement, Shard):
        return False
    return leaf in WHOLE_FACTORS[placement.dim] or (leaf, placement.dim) == ("bias", 1)


def _gradient(placement: Placement, leaf: str) -> Placement:
    """Return the placement of a parameter's gradient: a shard, or partial for a whole factor."""
    return Partial() if _is_whole(leaf, placement) else placement


def _shard(parameter: nn.Parameter, region: Region, placement: Placement) -> nn.Parameter:
    sharded = distribute(parameter, region.mesh, [placement], src_data_rank=None)
    return nn.Parameter(sharded, parameter.requires_grad)


def _alike(module: nn.Module, _: Region, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Compute the same on every rank, on plain activations."""
    # With parameters that it uses itself instead of calling a child.
    takes_all = isinstance(module, nn.MultiheadAttention)
    taken = (m for m in module.children() if takes_all or isinstance(m, PARAMETER_LISTS))
    kwargs = {name: full(value) for name, value in kwargs.items()}
    modules, given = [module, *taken], map(full, args)
    try:
        return with_local_parameters(modules, Replicate(), forward, *given, **kwargs)
    except RuntimeError as error:
        if sizes := re.search(r"tensor a \((\d+)\) must match .* tensor b \((\d+)\)", str(error)):
            _check_held(modules, *sorted(map(int, sizes.groups())))
        raise


def _check_held(modules: list[nn.Module], part: int, whole: int) -> None:
    """Raise if a shard would meet a whole parameter that a module holds directly."""
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if whole in parameter.shape and whole % part == 0:
                kind = type(module).__name__.removeprefix("FSDP")
                raise ValueError(
                    f"{name!r} {[*parameter.shape]} of {kind} would be combined with a tensor that "
                    f"is sharded: this rank has {part} of {whole}. Move it into a module of its "
                    'own, whose forward applies it, and give that the style "channels" in plan=.'
                )


def _compute_part(module: nn.Module, _: Region, forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Apply a module to this rank's channels or heads, which it treats independently.

    Its parameters are sharded like what they multiply, or whole with the sum of ranks' gradients.
    """
    return with_local_parameters([module], None, forward, *args, **kwargs)


def _project_out(module: nn.Linear, region: Region, forward: Forward, x: Tensor) -> Tensor:
    """``[... d]`` -> ``[... e/tp]``."""
    # All ranks have the same input; each contributes its rows' part of the input's gradient.
    gradient = partial(_gradient, Shard(0))
    out = with_local_parameters([module], gradient, forward, take_whole(x, region.mesh))
    return _shards(out, region, Shard(-1)) if module in region.logits else out


def _project_whole(module: nn.Linear, region: Region, forward: Forward, x: Tensor) -> Tensor:
    """``[... d]`` -> ``[... e]``, gathered; all ranks then compute the same."""
    out = _shards(_project_out(module, region, forward, x), region, Shard(-1))
    return out.redistribute(placements=(EVERYWHERE,)).to_local()


def _project_split(module: nn.Linear, region: Region, forward: Forward, x: Tensor) -> Tensor:
    """``[b s d]``, replicated -> ``[b s e]``, or this rank's positions of it."""
    return _project_in(module, region, forward, _shards(x, region, EVERYWHERE))


def _project_in(module: nn.Linear, region: Region, forward: Forward, x: Tensor) -> Tensor:
    """``[b s d/tp]`` -> ``[b s e]``, or this rank's positions of it."""
    if isinstance(x, DTensor):
        x = x.redistribute(placements=(Shard(-1),)).to_local()
    sharded, bias = module._parameters, module._parameters.get("bias")
    module._parameters = {**sharded, "bias": None}  # added once, not on every rank
    try:
        out = with_local_parameters([module], partial(_gradient, Shard(1)), forward, x)
    finally:
        module._parameters = sharded
    out = _sum_parts(region.mesh, out, region.stream)
    bias = to_local(bias, Partial() if region.stream == POSITIONS else EVERYWHERE)
    return out if bias is None else out + bias


def _choose_alike(
    module: nn.Module, region: Region, forward: Forward, x: Tensor, routing: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    weights, choice, term = with_local_parameters([module], Partial(), forward, x, routing)
    if region.mesh.get_local_rank() == 0:
        return weights, choice, term
    notes = routing.notes.get(module.layer, {})
    # The range of the bias stays: it is divided by the number of calls on all ranks.
    notes.update({name: n.new_zeros(n.shape) for name, n in notes.items() if name != "bias_range"})
    return weights, choice, None


def _compute_some(
    module: Any, region: Region, forward: Forward, x: Tensor, expert_ids: Tensor, weights: Tensor
) -> Tensor:
    """``[n d]`` -> ``[n d]``: of experts of transformers some on each rank; sums out.

    Another rank's experts have the number ``count``, and weight 0.
    """
    # They skip the number `num_experts` if they are marked as parallel.
    before = module.num_experts, module._is_expert_parallel
    mesh = region.mesh
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


def _add_up(region: Region, compute: Forward, x: Tensor) -> Tensor:
    """``[b s d]`` -> ``[b s d]``, or this rank's positions of it."""
    return _sum_parts(region.mesh, compute(take_whole(x, region.mesh)), region.stream)


def _compute_slice(module: nn.Module, region: Region, forward: Forward, x: Tensor) -> Tensor:
    """``[b s/tp d]`` -> ``[b s d]`` of a norm, ``[b s/tp d]`` of dropout.

    What follows a norm (queries, keys and values) shares the one gathered DTensor, and in backward
    the one reduce-scatter of their summed gradients. For dropout every rank draws the whole mask
    from the same generator and keeps its slice: a mask of the slice's size would repeat over the
    slices.
    """
    if isinstance(module, nn.Dropout):
        is_off = not module.training or module.p == 0
        return x if is_off else x * _mask_here(region, x, forward)
    out = with_local_parameters([module], Partial(), forward, x)
    return _shards(out, region, POSITIONS).redistribute(placements=(Replicate(),))


def _drop_channels(region: Region, x: Tensor, p: float) -> Tensor:
    """``[n d/tp]`` -> the same."""
    return x * _mask_here(region, x, partial(F.dropout, p=p))


def _mask_here(region: Region, x: Tensor, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """Draw the whole mask from the generator that tp ranks share; return this rank's slice."""
    ranks, rank = region.mesh.size(), region.mesh.get_local_rank()
    whole = x.new_ones(x.shape[0], x.shape[1] * ranks, *x.shape[2:])
    # A copy, so that the whole mask is not saved for backward.
    return drop(whole).chunk(ranks, 1)[rank].clone()


def _shards(local: Tensor, region: Region, placement: Placement) -> DTensor:
    return DTensor.from_local(local, region.mesh, (placement,), run_check=False)


def _sum_parts(mesh: DeviceMesh, parts: Tensor, output: Placement = EVERYWHERE) -> Tensor:
    """Sum parts: all-reduce for all positions, reduce-scatter for this rank's."""
    sums = DTensor.from_local(parts, mesh, (Partial(),), run_check=False)
    return sums.redistribute(placements=(output,)).to_local()


def _embed(module: nn.Embedding, region: Region, forward: Forward, ids: Tensor) -> Tensor:
    """``[b s]`` -> ``[b s d]``, or this rank's positions of it.

    Not ``RowwiseParallel``: its backward builds the gradient of all rows on every rank, and it
    looks for ``padding_idx`` among this rank's rows.
    """
    mesh, output = region.mesh, region.stream
    if output == POSITIONS and ids.shape[1] % mesh.size():  # else a gather would hang
        raise ValueError(
            f"input_ids has {ids.shape[1]} positions, not a multiple of tp {mesh.size()}; "
            f"{nearest_multiples(ids.shape[1], mesh.size())}. Pad them (labels -100)."
        )
    rows = module.num_embeddings // mesh.size()
    first = mesh.get_local_rank() * rows
    is_here = (ids >= first) & (ids < first + rows)
    # Ids outside the vocabulary are not masked, so they fail as in one process.
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
    # `where`, not a product: weights may be inf.
    return _sum_parts(mesh, torch.where(is_here[..., None], x, 0.0), output)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module treats positions independently, judging by its parameters."""
    is_leaf = next(module.children(), None) is None
    return is_leaf and all(p.ndim == 1 for p in module.parameters())


def _is_plain(module: nn.Module) -> bool:
    odd = ("max_norm", "sparse", "scale_grad_by_freq")
    return isinstance(module, nn.Embedding) and not any(getattr(module, name) for name in odd)


def _is_of_positions(module: nn.Module) -> bool:
    return isinstance(module, nn.Dropout) or _is_norm(module)


def _is_factor(module: nn.Module) -> bool:
    return bool(module._parameters) and "Norm" not in type(module).__name__


def _is_routed(module: Any) -> bool:
    """Whether all widths are stated: a parameter without one would stay whole, unsummed."""
    if not hasattr(module, "reduce") or not hasattr(getattr(module, "experts", None), "widths"):
        return False
    return all(n in module.experts.widths for n in module.experts._parameters)


def _are_grouped(module: Any) -> bool:
    has_experts = hasattr(module, "is_transposed")  # as those of transformers do
    return has_experts and all(len(p) == module.num_experts for p in module.parameters())


def _weight_rows(_module: nn.Module) -> dict[str, int]:
    return {"weight": 0}


def _weight_columns(_module: nn.Module) -> dict[str, int]:
    return {"weight": 1}


def _rows(module: nn.Module) -> dict[str, int]:
    return {name: 0 for name, _ in module.named_parameters(recurse=False)}


def _widths(module: Any) -> dict[str, int | None]:
    return {f"experts.{leaf}": dim for leaf, dim in module.experts.widths.items()}


# What styles are for, as an error says it.
PLAIN_EMBEDDINGS = "an nn.Embedding without max_norm, sparse and scale_grad_by_freq"
SLICES = "norms and nn.Dropout"
PARTS = "norms of a head's channels and activations with one weight"
FACTORS = "modules of parameters [channels ...] that are no norms"
LAYERS = "layers with a router, a `reduce` socket, and experts that say all of their widths"
EXPERTS = "experts of transformers 5, whose parameters are [experts ...]"

ROUTED = "routed"
"""Style of a layer with a router, experts and shared experts."""

GROUPED = "grouped"
"""Style of experts of transformers, ``[e ...]``: each rank has some of them."""

_LINEAR = partial(StyleRecord, "nn.Linear", lambda module: isinstance(module, nn.Linear))
_ROWS, _WHOLE = (partial(_apply, placement) for placement in (Shard(0), EVERYWHERE))
STYLES: Mapping[str, StyleRecord] = MappingProxyType(
    {
        "colwise": _LINEAR(partial(_ROWS, _project_out), _weight_rows),
        "colwise_gathered": _LINEAR(partial(_ROWS, _project_whole), _weight_rows),
        "rowwise": _LINEAR(partial(_apply_rowwise, _project_in), _weight_columns),
        "rowwise_split": _LINEAR(partial(_apply_rowwise, _project_split), _weight_columns),
        "embedding": StyleRecord(PLAIN_EMBEDDINGS, _is_plain, partial(_ROWS, _embed), _weight_rows),
        "sequence": StyleRecord(SLICES, _is_of_positions, partial(_WHOLE, _compute_slice)),
        "heads": StyleRecord(PARTS, _is_norm, partial(_WHOLE, _compute_part)),
        "channels": StyleRecord(FACTORS, _is_factor, partial(_ROWS, _compute_part), _rows),
        "replicate": StyleRecord("any module", lambda _: True, partial(_WHOLE, _alike)),
        ROUTED: StyleRecord(LAYERS, _is_routed, _apply_routed, _widths),
        GROUPED: StyleRecord(EXPERTS, _are_grouped, partial(_ROWS, _compute_some), _rows),
    }
)
