"""Sizes and views of a mesh, and owners of a tensor's shards."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forgekit.mesh import DIMENSIONS, mesh_of

EXPERT = "expert"
"""Style of modules of experts in a plan; they are sharded over a mesh of their own."""


def size_of(mesh: DeviceMesh | None, name: str) -> int:
    """Return the size of a mesh dimension; 1 if the mesh lacks it."""
    names = (mesh and mesh.mesh_dim_names) or ()
    return mesh.size(names.index(name)) if mesh is not None and name in names else 1


def world_of(mesh: DeviceMesh | None) -> int:
    """Return the number of ranks of a mesh; 1 for one process."""
    return 1 if mesh is None else mesh.size()


def match_plan(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Match a plan's patterns with modules; the last matching pattern counts.

    Args:
        model: The whole model.
        plan: Patterns of module names to styles.

    Returns:
        Styles by module name; a module that has several names is known by the first of them.

    Raises:
        ValueError: If a pattern matches nothing.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    first = {module: name for name, module in model.named_modules()}
    styles: dict[str, Any] = {}
    for pattern, style in plan.items():
        matched = [first[module] for name, module in names.items() if fnmatchcase(name, pattern)]
        if not matched:
            nearest = difflib.get_close_matches(pattern, filter(None, names), n=3, cutoff=0.0)
            raise ValueError(
                f"the plan's pattern {pattern!r} matches no module; the nearest names are "
                f"{', '.join(map(repr, nearest))}."
            )
        styles |= dict.fromkeys(matched, style)
    return styles


def shard_and_owners(tensor: Tensor, world: int) -> tuple[Tensor, int]:
    """Return the local shard of a parameter or gradient, and the number of ranks that hold it.

    Args:
        tensor: A plain tensor, which every rank holds, or a DTensor.
        world: Number of ranks that hold the same model parts.

    Returns:
        The local piece, and the number of ranks with the same piece.
    """
    if not isinstance(tensor, DTensor):
        return tensor, world
    mesh = tensor.device_mesh
    # Copies are on ranks outside the tensor's mesh and along its replicated dimensions.
    owners = world // mesh.size()
    for size, placement in zip(mesh.shape, tensor.placements, strict=True):
        owners *= size if placement.is_replicate() else 1
    return tensor.to_local(), owners


def arrange(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the meshes over which parameters are sharded: ``dp_shard * cp`` and ``tp``.

    Ranks that share a sequence hold different positions of it, so their gradients add up like those
    of ranks with different rows: FSDP does it for both at once. The two meshes come from one
    root, as tensors that are sharded over both need.

    Args:
        mesh: What ``build_mesh`` returned.

    Returns:
        The mesh over which FSDP shards, after ``dp_replicate`` where that is above 1 (HSDP), and
        the one over which tensor parallelism does, or None for a single rank.
    """
    shard = "dp_shard"
    if size_of(mesh, "cp") > 1:
        pp, replicate, shards, context, tensor = (size_of(mesh, name) for name in DIMENSIONS)
        ranks = mesh.mesh.reshape(pp, replicate, shards * context, tensor)
        shard = "dp_shard_cp"
        names = ("pp", "dp_replicate", shard, "tp")
        mesh = mesh_of(mesh.device_type, ranks, names)
    is_replicated = size_of(mesh, "dp_replicate") > 1
    data = mesh["dp_replicate", shard] if is_replicated else mesh[shard]
    return data, mesh["tp"] if size_of(mesh, "tp") > 1 else None
