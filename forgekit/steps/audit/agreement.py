"""What the ranks compare before they add anything up: by ``audit``, and at a run's first step.

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
from typing import Any, Literal, get_args

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forgekit.parallel.agreement import Difference, check_same, exchange, find_difference
from forgekit.parallel.layout import shard_and_owners, size_of, world_of
from forgekit.state import AgreedNames, TrainState
from forgekit.tensors import full

DRIFT, NOISE = 1e-6, 1e-3
"""Relative differences that replicas may have: of parameters, and of gradients."""

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "tp": "a module between split projections that the plan does not name, or other random "
        "numbers on each rank",
        "cp": "a module that uses positions inside the rank's slice, not those of the sequence",
    }
)
OUTSIDE = "an update outside of the step, or a gradient that was changed on one rank"
BUFFER = (
    "a buffer that each rank updates from its own rows, as BatchNorm does. Use LayerNorm, "
    "GroupNorm or torch.nn.SyncBatchNorm (on accelerators), or keep it in evaluation mode"
)
REPLICA = (
    "ranks {x} and {y} hold the same part of {name!r}, but its {part} differ ({a:.6g} and {b:.6g}) "
    "along {dims}. Likely cause: {cause}. Nothing was updated."
)
SENTENCES = MappingProxyType(
    {
        "sums": "rank {y} reports other sums than rank {x}: {difference}. Report the same metrics "
        "on every rank; use (0.0, 0) without observations.",
        "samples": "rank {y} counts {b} samples in a step, rank {x} {a}; every rank must have the "
        "same number of rows. Pad with rows whose labels are -100.",
        "rows": "ranks {x} and {y} differ along {dims} only, so they must have the same rows, but "
        "got different ones. Choose rows by rank, world = forgekit.data_ranks(mesh).",
        "values": REPLICA,
        "buffer": REPLICA,
        "gradients": REPLICA,
    }
)
"""What ranks compare, and what is said of a difference. A key is ``(kind, name, shard)``."""

SHOWN = 4
"""Names that an error lists."""

RankGroup = Literal["tp", "cp", "world"]
RANK_GROUPS: tuple[RankGroup, ...] = get_args(RankGroup)
"""Ranks that run a module together: those that share matrices, those that share sequences, all."""


class UnreducedError(RuntimeError):
    """Gradients that were never added up over the ranks, so that each would train its own model."""

    def __init__(self, names: Sequence[str], *, where: str = "") -> None:
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        super().__init__(
            f"FSDP never reduced the gradients of {len(names)} parameters{where} ({shown}); "
            "nothing was updated. Call the model for every micro-batch, return tensors, tuples, "
            "lists, dicts or dataclasses from modules, not a distribution or namespace, and read "
            "parameters in forward (head=), not by full_tensor() or to_local() in loss_fn."
        )


class ModulesError(ValueError):
    """Ranks that run a module together were not all at it; raised on all of them."""


@attrs.frozen
class Report:
    """What one rank is about to do.

    Attributes:
        stated: Values by ``(kind, name, shard)``; a kind of ``SENTENCES``.
        coordinate: Of the rank, on each dimension of the mesh that has several.
        settings: What has to be the same everywhere, as text.
        unreduced: Parameters whose gradients FSDP holds back.
        problem: Why a loss of its cannot be trained on.
        parameters: Names of its parameters; empty where another rank has the same.
    """

    stated: Mapping[Any, Any]
    coordinate: Mapping[str, int]
    settings: Mapping[str, str] = attrs.field(factory=dict)
    unreduced: Sequence[str] = ()
    problem: str | None = None
    parameters: tuple[str, ...] = ()


def agree(report: Report, state: TrainState, settings: Mapping[str, Any]) -> AgreedNames:
    """Exchange what the ranks are about to do and refuse it together; a collective of objects.

    Args:
        report: This rank's sums and samples.
        state: The state, its gradients as ``accumulate`` left them.
        settings: What has to be the same on all ranks.

    Returns:
        What all ranks add up from here on.

    Raises:
        UnreducedError: On every rank, if FSDP held gradients back on one of them.
        ValueError: On every rank, if they differ.
    """
    is_first = not any(at for name, at in report.coordinate.items() if name != "pp")
    names = tuple(name for name, _ in state.model.named_parameters()) if is_first else ()
    shown = {name: repr(value) for name, value in settings.items()}
    reports = exchange(attrs.evolve(report, parameters=names, settings=shown), world_of(state.mesh))
    sums = compare(reports)
    every_name = dict.fromkeys(name for one in reports for name in one.parameters)
    return AgreedNames(tuple(sums), tuple(every_name))


def check_replicas(state: TrainState) -> None:
    """Raise if copies of a parameter or buffer differ between ranks; a small collective.

    For occasional use between steps; the first step compares anyway. Reads values on the host.

    Args:
        state: The state; nothing in it changes.

    Raises:
        ValueError: On every rank, with the parameter, the mesh dimension and the likely cause.
    """
    stated = replicas_of(state, gradients=False)
    compare(exchange(Report(stated, coordinate_of(state)), world_of(state.mesh)))


def compare(reports: Sequence[Report]) -> list[Any]:
    """Raise unless ranks that state the same key state the same value; return the names of sums."""
    for rank, one in enumerate(reports):
        if one.unreduced:
            raise UnreducedError(one.unreduced, where=f" on rank {rank}" if reports[1:] else "")
    check_same([one.settings for one in reports])
    for rank, one in enumerate(reports):
        if one.problem is not None:
            raise ValueError(f"rank {rank} {one.problem}")
    norms = [v[0] for one in reports for k, v in one.stated.items() if k[0] == "gradients"]
    largest = max(norms, default=0.0)
    for kind in SENTENCES:
        stated = [{k: v for k, v in one.stated.items() if k[0] == kind} for one in reports]
        if (mismatch := find_difference(stated, partial(_is_same, kind, largest))) is not None:
            raise ValueError(_explain(reports, kind, mismatch))
    return next((r.stated["sums", "", ()] for r in reports if ("sums", "", ()) in r.stated), [])


def _explain(reports: Sequence[Report], kind: str, mismatch: Difference) -> str:
    """Say what two ranks state of one thing, and what the likely cause is."""
    key, sentence = mismatch.key, SENTENCES[kind]
    first, other = reports[mismatch.first], reports[mismatch.other]
    a, b = first.stated[key], other.stated[key]
    dims = [dim for dim, at in first.coordinate.items() if at != other.coordinate[dim]]
    causes = [BUFFER] if kind == "buffer" else [CAUSES[dim] for dim in dims if dim in CAUSES]
    values: dict[str, Any] = {"x": mismatch.first, "y": mismatch.other, "name": key[1]}
    if kind == "sums":
        values["difference"] = difference(a, b)
    elif sentence == REPLICA:
        a, b = next((m, n) for m, n in zip(a, b, strict=True) if m != n)
        values["part"] = "gradients" if kind == "gradients" else "values"
        values["cause"] = "; ".join(causes) or OUTSIDE
    return sentence.format(a=a, b=b, dims=" and ".join(dims), **values)


def compare_modules(
    mesh: DeviceMesh | None, name: str = "the end of loss_fn", group: RankGroup = "world", *_: Any
) -> None:
    """Raise on every rank if ranks that run a module together are not all at it.

    By small collectives: each group compares before the next one, so that ranks at different
    modules never wait in different groups. A difference is passed on to the last group, all ranks.

    Args:
        mesh: All ranks.
        name: The module.
        group: Ranks that run it together; others may run it more often, or not at all.
    """
    problem: str | None = None
    for one in RANK_GROUPS:
        if one == "world" or size_of(mesh, one) > 1:
            ranks = None if one == "world" or mesh is None else mesh.get_group(one)
            reports = exchange((dist.get_rank(), name, problem), group=ranks)
            problem = next((p for *_, p in reports if p), None) or _find_apart(reports)
        if one == group and problem is None:
            return
    raise ModulesError(problem)


def _find_apart(reports: Sequence[tuple[int, str, str | None]]) -> str | None:
    rank, name, _ = reports[0]
    other, at = next(((r, one) for r, one, _ in reports if one != name), (rank, name))
    if at == name:
        return None
    return (
        f"ranks run different modules: rank {rank} is at {name} and rank {other} at {at}. Their "
        "collectives pair by order alone, so gradients would be wrong. Draw blocks to skip from a "
        "torch.Generator with one seed for all ranks."
    )


def difference(known: Iterable[Any], new: Iterable[Any]) -> str:
    """Which names are missing and which are new, for an error."""
    before, now = (
        {k if isinstance(k, str) else ".".join(k) for k in each} for each in (known, new)
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


def coordinate_of(state: TrainState) -> dict[str, int]:
    """This rank's coordinate on each dimension of the mesh that has several."""
    mesh = state.mesh
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return {name: mesh.get_local_rank(name) for name in names if mesh and size_of(mesh, name) > 1}


def _is_same(kind: str, largest: float, a: Any, b: Any) -> bool:
    if SENTENCES[kind] != REPLICA:
        return a == b
    # Softmax makes some gradients zero but for rounding: those are held to the largest norm.
    bound = NOISE * a[0] + DRIFT * largest if kind == "gradients" else DRIFT * a[0]
    # A step that is not finite is a bad one on all ranks, whatever the replicas hold.
    pairs = [(m, n) for m, n in zip(a, b, strict=True) if math.isfinite(m) and math.isfinite(n)]
    return not any(abs(m - n) > bound for m, n in pairs)


def replicas_of(state: TrainState, *, gradients: bool) -> dict[Any, tuple[float, float]]:
    """Measure each shard that other ranks hold too, and the buffers that a checkpoint keeps.

    By norm and by the sum of every other number, in float64: no two agree in both by chance. Of
    every other one, as all together are 0 where softmax made the gradient, whatever its sign.
    """
    # The ranks of other pipeline stages hold other parameters, never the same shard.
    world = world_of(state.mesh) // size_of(state.mesh, "pp")
    held: dict[Any, Tensor] = {
        ("buffer", f"{name}.{leaf}".lstrip("."), ()): full(buffer)
        for name, module in state.model.named_modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        # Others, such as tables of angles, follow from the model.
        if leaf not in module._non_persistent_buffers_set
    }
    for name, parameter in state.model.named_parameters():
        shard, owners = shard_and_owners(parameter.detach(), world)
        if owners > 1:
            at = _shard_of(parameter)
            held["values", name, at] = shard
            if gradients and parameter.grad is not None:
                held["gradients", name, at] = shard_and_owners(parameter.grad, world)[0]
    if not held:
        return {}
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in held.values()]
    # Of whole numbers, such as a packed weight's, the sum stands for the norm.
    real = [t if t.is_floating_point() else t.sum(dtype=torch.float64) for t in tensors]
    norms = torch.stack(torch._foreach_norm(real, 2, dtype=torch.float64))
    halves = torch.stack([t.reshape(-1)[::2].sum(dtype=torch.float64) for t in tensors])
    return dict(zip(held, zip(norms.tolist(), halves.tolist(), strict=True), strict=True))


def _shard_of(parameter: Tensor) -> tuple[Any, ...]:
    """Which piece of a parameter this rank holds: its coordinates where it is sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    placed = zip(names, mesh.get_coordinate() or (), parameter.placements, strict=True)
    return tuple((name, at) for name, at, placement in placed if not placement.is_replicate())
