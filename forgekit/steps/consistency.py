"""What the ranks compare at a run's first step, before they add anything up.

A collective adds whatever it is given. Ranks that bring other names, rows or settings, replicas
that have drifted apart, and gradients that never crossed the ranks all give a number, and the loss
curve hides that it is wrong. So the ranks exchange what they are about to do, once, and refuse it
together.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed.tensor import DTensor

from forgekit.mesh import DATA_DIMENSIONS
from forgekit.parallel.layout import shard_and_owners, size_of, world_of
from forgekit.parallel.rank_agreement import check_same, exchange
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
SHOWN = 4
"""Names that an error lists."""

Fingerprint = tuple[float, float, float, float]


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
        parameters: Names of its parameters; empty where another rank has the same.
        position: Its coordinate on each dimension of the mesh.
        rows: Digest of the first micro-batch; ranks that share rows must bring the same.
        replicas: Fingerprints of the shards that other ranks hold too.
    """

    sums: list[Any]
    samples: int
    knows_names: bool
    settings: Mapping[str, str] = attrs.field(factory=dict)
    unreduced: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    position: Mapping[str, int] = attrs.field(factory=dict)
    rows: str = ""
    replicas: Mapping[tuple[Any, ...], Fingerprint] = attrs.field(factory=dict)


def agree(
    claim: Claim, state: TrainState, *, audit: bool, settings: Mapping[str, Any]
) -> Agreement:
    """Exchange what the ranks are about to do and refuse it together; a collective of objects.

    Args:
        claim: This rank's sums and samples.
        state: The state, its gradients as ``accumulate`` left them.
        audit: Whether replicas and settings are compared too.
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
        claim = attrs.evolve(claim, settings=shown, replicas=_fingerprints(state, gradients=True))
    everyone = exchange(claim, world)
    _check_reduced(everyone)
    check_same([theirs.settings for theirs in everyone])
    if audit:
        _check_rows(everyone)
    sums = _check_sums(everyone)
    _check_fingerprints([(c.position, c.replicas) for c in everyone])
    every_name = dict.fromkeys(name for theirs in everyone for name in theirs.parameters)
    return Agreement(tuple(sums), tuple(every_name))


def compare_sums(claim: Claim, state: TrainState) -> list[Any]:
    """Exchange the names and rows of an evaluation; return the names that all ranks add up."""
    return _check_sums(exchange(claim, world_of(state.mesh)))


def check_replicas(state: TrainState) -> None:
    """Raise if copies of one parameter differ between the ranks that hold it; a small collective.

    For now and then between steps: the first step compares by itself. Reads values on the host.

    Args:
        state: The state; nothing in it changes.

    Raises:
        ValueError: On every rank, with the parameter, the mesh dimension and the likely cause.
    """
    mine = _position(state), _fingerprints(state, gradients=False)
    _check_fingerprints(exchange(mine, world_of(state.mesh)))


def difference(known: Iterable[Any], new: Iterable[Any]) -> str:
    """Which names are missing and which are new, for an error."""
    before, now = {_name(key) for key in known}, {_name(key) for key in new}
    return f"missing {sorted(before - now)}, new {sorted(now - before)}"


def _check_reduced(everyone: list[Claim]) -> None:
    for rank, theirs in enumerate(everyone):
        if theirs.unreduced:
            where = f" on rank {rank}" if len(everyone) > 1 else ""
            raise UnreducedError(theirs.unreduced, where=where)


def _check_sums(everyone: list[Claim]) -> list[Any]:
    first = next(rank for rank, theirs in enumerate(everyone) if theirs.knows_names)
    expected = everyone[first].sums
    for rank, theirs in enumerate(everyone):
        if theirs.knows_names and theirs.sums != expected:
            raise ValueError(
                f"rank {rank} reports other sums than rank {first}: "
                f"{difference(expected, theirs.sums)}. "
                "Report the same metrics on every rank; use (0.0, 0) without observations."
            )
        if theirs.samples != everyone[0].samples:
            raise ValueError(
                f"rank {rank} counts {theirs.samples} samples in a step and rank 0 "
                f"{everyone[0].samples}; every rank must bring as many rows. Fill up with rows "
                "whose labels are -100."
            )
    return expected


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


def _check_rows(everyone: list[Claim]) -> None:
    """Raise if ranks that share rows, by their data-parallel rank, brought different ones."""
    first: dict[tuple[int, ...], int] = {}
    for rank, theirs in enumerate(everyone):
        shared = tuple(theirs.position.get(name, 0) for name in DATA_DIMENSIONS)
        other = first.setdefault(shared, rank)
        if theirs.rows != everyone[other].rows:
            here, there = everyone[other].position, theirs.position
            dimensions = [name for name in here if here[name] != there[name]]
            raise ValueError(
                f"ranks {other} and {rank} differ along {' and '.join(dimensions)} only, so they "
                "share rows, and they brought different ones. Choose rows by data-parallel rank: "
                "rank, world = forgekit.data_ranks(mesh)."
            )


def _position(state: TrainState) -> dict[str, int]:
    mesh = state.mesh
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return {name: mesh.get_local_rank(name) for name in names if mesh and size_of(mesh, name) > 1}


def _fingerprints(state: TrainState, *, gradients: bool) -> dict[tuple[Any, ...], Fingerprint]:
    """Norms and sums of every shard that other ranks hold too; by name and shard."""
    # The ranks of other pipeline stages hold other parameters, never the same shard.
    world = world_of(state.mesh) // size_of(state.mesh, "pp")
    shards: dict[tuple[Any, ...], tuple[Tensor, Tensor | None]] = {}
    for name, parameter in state.model.named_parameters():
        shard, owners = shard_and_owners(parameter.detach(), world)
        if owners > 1:
            grad = parameter.grad if gradients else None
            local = None if grad is None else shard_and_owners(grad, world)[0]
            shards[name, *_shard_of(parameter)] = shard, local
    if not shards:
        return {}
    values = _measure([shard for shard, _ in shards.values()])
    zero = values[0][0].new_zeros(())
    slopes = _measure([zero if grad is None else grad for _, grad in shards.values()])
    table = torch.stack([torch.stack([*v, *g]) for v, g in zip(values, slopes, strict=True)])
    return dict(zip(shards, map(tuple, table.tolist()), strict=True))


def _measure(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Norm of each and sum of every other number, in float64: no two agree in both by chance.

    Of every other one, as all together are 0 where softmax made the gradient, whatever its sign.
    """
    # Of whole numbers, such as a packed weight's, the sum stands for the norm.
    real = [t if t.is_floating_point() else t.sum(dtype=torch.float64) for t in tensors]
    norms = torch._foreach_norm(real, 2, dtype=torch.float64)
    halves = [t.reshape(-1)[::2].sum(dtype=torch.float64) for t in tensors]
    return list(zip(norms, halves, strict=True))


def _shard_of(parameter: Tensor) -> tuple[Any, ...]:
    """Which piece of a parameter this rank holds: its coordinates where it is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate() or ()
    names = mesh.mesh_dim_names or range(mesh.ndim)
    placed = zip(names, coordinate, parameter.placements, strict=True)
    return tuple((name, at) for name, at, placement in placed if not placement.is_replicate())


def _check_fingerprints(
    everyone: list[tuple[Mapping[str, int], Mapping[tuple[Any, ...], Fingerprint]]],
) -> None:
    largest = max((f[2] for _, theirs in everyone for f in theirs.values()), default=0.0)
    first: dict[tuple[Any, ...], int] = {}
    for rank, (there, theirs) in enumerate(everyone):
        for key, found in theirs.items():
            other = first.setdefault(key, rank)
            here, known = everyone[other]
            if what := _differing(known[key], found, largest):
                dimensions = [name for name in here if here[name] != there[name]]
                causes = [CAUSES[name] for name in dimensions if name in CAUSES]
                raise ValueError(
                    f"ranks {other} and {rank} hold the same part of {key[0]!r}, but its {what} "
                    f"along {' and '.join(dimensions)}. Likely cause: "
                    f"{'; '.join(causes) or 'an update outside of the step'}. Nothing was updated."
                )


def _differing(known: Fingerprint, found: Fingerprint, largest: float) -> str | None:
    """What two ranks disagree on, with the numbers; None if they agree."""
    bounds = (DRIFT * known[0], NOISE * known[2] + DRIFT * largest)
    for what, start, bound in zip(("values", "gradients"), (0, 2), bounds, strict=True):
        for a, b in zip(known[start : start + 2], found[start : start + 2], strict=True):
            # A step that is not finite is a bad one on all ranks, whatever the replicas hold.
            if math.isfinite(a) and math.isfinite(b) and abs(a - b) > bound:
                return f"{what} differ ({a:.6g} and {b:.6g})"
    return None


def _name(key: str | tuple[str, ...]) -> str:
    return key if isinstance(key, str) else ".".join(key)
