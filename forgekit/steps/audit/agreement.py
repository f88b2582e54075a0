"""What the ranks compare at a run's first step, before they add anything up.

A collective adds whatever it is given. Ranks that bring other names, rows or settings, replicas
that have drifted apart, and gradients that never crossed the ranks all give a number, and the loss
curve hides that it is wrong. So each rank states what it is about to do, as values by key, and
ranks that state the same key must state the same value.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from forgekit.mesh import DATA_DIMENSIONS
from forgekit.parallel.agreement import Difference, check_same, exchange, find_difference
from forgekit.parallel.layout import full, shard_and_owners, size_of, world_of
from forgekit.state import Agreement, TrainState

DRIFT, NOISE = 1e-6, 1e-3
"""Relative differences that replicas may have: of parameters, and of gradients."""

CAUSES = MappingProxyType(
    {
        "tp": "a module between split projections that the plan does not name, or random numbers "
        "that differ between tensor-parallel ranks",
        "cp": "a module that uses positions inside the rank's slice in place of those of the "
        "sequence",
        "dp_replicate": "an update outside of the step, or a gradient that was changed on one rank",
    }
)
BUFFER = (
    "a buffer that each rank updates from its own rows, as the running statistics of a BatchNorm, "
    "so that every rank trains and saves another model. Use a norm without them (LayerNorm, "
    "GroupNorm), one that adds them up (torch.nn.SyncBatchNorm, on accelerators), or keep the "
    "module in evaluation mode"
)
SHOWN = 4
"""Names that an error lists."""


class UnreducedError(RuntimeError):
    """Gradients that were never added up over the ranks, so that each would train its own model."""

    def __init__(self, names: Sequence[str], *, where: str = "") -> None:
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        super().__init__(
            f"FSDP never reduced the gradients of {len(names)} parameters{where} ({shown}); "
            "nothing was updated. It reduces a module's gradients when backward passes through "
            "what the module returned, and sees tensors, tuples, lists, dicts and dataclasses of "
            "them: return those, not a distribution, a namespace or a function. Call the model "
            "for every micro-batch, with or without targets. Read parameters in the model's own "
            "forward (head= gives it the output weight), not by full_tensor() or to_local() in "
            "loss_fn; for an L2 term use the optimizer's weight decay."
        )


@attrs.frozen(kw_only=True)
class Claim:
    """What one rank is about to do.

    Attributes:
        sums: Names of the sums that it adds up.
        samples: Rows that it counts globally.
        knows_names: Whether it computes losses; stages of a pipeline before the last do not.
        settings: What has to be the same everywhere, as text.
        unreduced: Parameters whose gradients FSDP holds back.
        problem: Why a loss of its cannot be trained on.
        parameters: Names of its parameters; empty where another rank has the same.
        position: Its coordinate on each dimension of the mesh.
        rows: Digest of the first micro-batch; ranks that share rows must bring the same.
        replicas: Norm and sum of the values and gradients of shards that other ranks hold too.
    """

    sums: list[Any]
    samples: int
    knows_names: bool
    settings: Mapping[str, str] = attrs.field(factory=dict)
    unreduced: tuple[str, ...] = ()
    problem: str | None = None
    parameters: tuple[str, ...] = ()
    position: Mapping[str, int] = attrs.field(factory=dict)
    rows: str = ""
    replicas: Mapping[Replica, tuple[float, float]] = attrs.field(factory=dict)


class Replica(NamedTuple):
    """A shard of which several ranks hold the same: its values, its gradient, or a buffer."""

    name: str
    part: str
    shard: tuple[Any, ...]


def agree(
    claim: Claim, state: TrainState, *, audit: bool, settings: Mapping[str, Any]
) -> Agreement:
    """Exchange what the ranks are about to do and refuse it together; a collective of objects.

    Args:
        claim: This rank's sums and samples.
        state: The state, its gradients as ``accumulate`` left them.
        audit: Whether replicas, rows and settings are compared too.
        settings: What has to be the same on all ranks.

    Returns:
        What all ranks add up from here on.

    Raises:
        UnreducedError: On every rank, if FSDP held gradients back on one of them.
        ValueError: On every rank, if they differ.
    """
    world = world_of(state.mesh)
    position = _position(state)
    is_first = not any(at for name, at in position.items() if name != "pp")
    names = tuple(name for name, _ in state.model.named_parameters()) if is_first else ()
    claim = attrs.evolve(claim, position=position, parameters=names)
    if audit and world > 1:
        shown = {name: repr(value) for name, value in settings.items()}
        claim = attrs.evolve(claim, settings=shown, replicas=_replicas(state, gradients=True))
    claims = exchange(claim, world)
    for rank, one in enumerate(claims):
        if one.unreduced:
            raise UnreducedError(one.unreduced, where=f" on rank {rank}" if world > 1 else "")
    _check_losses(claims)
    check_same([one.settings for one in claims])
    if audit:
        _check_rows(claims)
    sums = _check_sums(claims)
    _check_replicas(claims)
    every_name = dict.fromkeys(name for one in claims for name in one.parameters)
    return Agreement(tuple(sums), tuple(every_name))


def compare_sums(claim: Claim, state: TrainState) -> list[Any]:
    """Exchange the names and rows of an evaluation; return the names that all ranks add up."""
    claims = exchange(claim, world_of(state.mesh))
    _check_losses(claims)
    return _check_sums(claims)


def check_replicas(state: TrainState) -> None:
    """Raise if copies of a parameter or buffer differ between ranks; a small collective.

    For now and then between steps: the first step compares by itself. Reads values on the host.

    Args:
        state: The state; nothing in it changes.

    Raises:
        ValueError: On every rank, with the parameter, the mesh dimension and the likely cause.
    """
    replicas, position = _replicas(state, gradients=False), _position(state)
    claim = Claim(sums=[], samples=0, knows_names=False, position=position, replicas=replicas)
    _check_replicas(exchange(claim, world_of(state.mesh)))


def difference(known: Iterable[Any], new: Iterable[Any]) -> str:
    """Which names are missing and which are new, for an error."""
    before, now = (
        {key if isinstance(key, str) else ".".join(key) for key in keys} for keys in (known, new)
    )
    return f"missing {sorted(before - now)}, new {sorted(now - before)}"


def digest_rows(batch: TensorDictBase) -> str:
    """Digest a micro-batch, so that ranks can tell whether they have the same; reads all of it."""
    digest = hashlib.blake2b(digest_size=8)
    leaves = batch.items(include_nested=True, leaves_only=True)
    for key, value in sorted(leaves, key=lambda item: str(item[0])):
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            digest.update(f"{key} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check_losses(claims: Sequence[Claim]) -> None:
    for rank, one in enumerate(claims):
        if one.problem is not None:
            raise ValueError(f"rank {rank} {one.problem}")


def _check_sums(claims: Sequence[Claim]) -> list[Any]:
    """Raise if names of sums or numbers of samples differ; return the names."""
    if apart := find_difference([{"": one.sums} if one.knows_names else {} for one in claims]):
        first, other = claims[apart.first], claims[apart.other]
        raise ValueError(
            f"rank {apart.other} reports other sums than rank {apart.first}: "
            f"{difference(first.sums, other.sums)}. "
            "Report the same metrics on every rank; use (0.0, 0) without observations."
        )
    if apart := find_difference([{"": one.samples} for one in claims]):
        first, other = claims[apart.first], claims[apart.other]
        raise ValueError(
            f"rank {apart.other} counts {other.samples} samples in a step and rank {apart.first} "
            f"{first.samples}; every rank must bring as many rows. Fill up with rows whose labels "
            "are -100."
        )
    return next(one.sums for one in claims if one.knows_names)


def _check_rows(claims: Sequence[Claim]) -> None:
    """Raise if ranks that share rows, by their data-parallel rank, brought different ones."""
    shared = [tuple(one.position.get(name, 0) for name in DATA_DIMENSIONS) for one in claims]
    stated = [{data: one.rows} for data, one in zip(shared, claims, strict=True)]
    if apart := find_difference(stated):
        raise ValueError(
            f"ranks {apart.first} and {apart.other} differ along {_along(claims, apart)} only, so "
            "they share rows, and they brought different ones. Choose rows by data-parallel rank: "
            "rank, world = forgekit.data_ranks(mesh)."
        )


def _check_replicas(claims: Sequence[Claim]) -> None:
    """Raise if ranks hold different values of one parameter or buffer, or different gradients."""
    norms = [v[0] for one in claims for k, v in one.replicas.items() if k.part == "gradients"]
    bounds = {
        "values": (DRIFT, 0.0),
        "buffer": (DRIFT, 0.0),
        "gradients": (NOISE, DRIFT * max(norms, default=0.0)),
    }
    for part, bound in bounds.items():
        stated = [{k: v for k, v in one.replicas.items() if k.part == part} for one in claims]
        if apart := find_difference(stated, partial(_is_close, *bound)):
            raise ValueError(_describe(claims, apart, part))


def _describe(claims: Sequence[Claim], apart: Difference, part: str) -> str:
    along = _along(claims, apart)
    first, other = (claims[rank].replicas[apart.key] for rank in (apart.first, apart.other))
    a, b = next((a, b) for a, b in zip(first, other, strict=True) if a != b)
    of = "values" if part == "buffer" else part
    causes = [CAUSES[name] for name in along.split(" and ") if name in CAUSES]
    cause = "; ".join(causes) or "an update outside of the step"
    return (
        f"ranks {apart.first} and {apart.other} hold the same part of {apart.key.name!r}, but its "
        f"{of} differ ({a:.6g} and {b:.6g}) along {along}. Likely cause: "
        f"{BUFFER if part == 'buffer' else cause}. Nothing was updated."
    )


def _is_close(share: float, rest: float, a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    # A step that is not finite is a bad one on all ranks, whatever the replicas hold.
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if math.isfinite(x) and math.isfinite(y)]
    return not any(abs(x - y) > share * a[0] + rest for x, y in pairs)


def _along(claims: Sequence[Claim], apart: Difference) -> str:
    """The dimensions of the mesh on which two ranks differ."""
    here, there = claims[apart.first].position, claims[apart.other].position
    return " and ".join(name for name in here if here[name] != there[name])


def _position(state: TrainState) -> dict[str, int]:
    mesh = state.mesh
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return {name: mesh.get_local_rank(name) for name in names if mesh and size_of(mesh, name) > 1}


def _replicas(state: TrainState, *, gradients: bool) -> dict[Replica, tuple[float, float]]:
    """Measure each shard that other ranks hold too, and the buffers that a checkpoint keeps."""
    # The ranks of other pipeline stages hold other parameters, never the same shard.
    world = world_of(state.mesh) // size_of(state.mesh, "pp")
    tensors = {Replica(name, "buffer", ()): buffer for name, buffer in _buffers(state.model)}
    for name, parameter in state.model.named_parameters():
        shard, owners = shard_and_owners(parameter.detach(), world)
        if owners > 1:
            at = _shard_of(parameter)
            tensors[Replica(name, "values", at)] = shard
            if gradients and parameter.grad is not None:
                tensors[Replica(name, "gradients", at)] = shard_and_owners(parameter.grad, world)[0]
    return dict(zip(tensors, _measure([*tensors.values()]), strict=True))


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that a checkpoint keeps; others, such as tables of angles, follow from it."""
    return [
        (f"{name}.{leaf}".lstrip("."), full(buffer))
        for name, module in model.named_modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if leaf not in module._non_persistent_buffers_set
    ]


def _measure(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Norm of each and sum of every other number, in float64: no two agree in both by chance.

    Of every other one, as all together are 0 where softmax made the gradient, whatever its sign.
    """
    if not tensors:
        return []
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    # Of whole numbers, such as a packed weight's, the sum stands for the norm.
    real = [t if t.is_floating_point() else t.sum(dtype=torch.float64) for t in tensors]
    norms = torch._foreach_norm(real, 2, dtype=torch.float64)
    halves = [t.reshape(-1)[::2].sum(dtype=torch.float64) for t in tensors]
    return [*zip(torch.stack(norms).tolist(), torch.stack(halves).tolist(), strict=True)]


def _shard_of(parameter: Tensor) -> tuple[Any, ...]:
    """Which piece of a parameter this rank holds: its coordinates where it is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    placed = zip(names, mesh.get_coordinate() or (), parameter.placements, strict=True)
    return tuple((name, at) for name, at, placement in placed if not placement.is_replicate())
