"""What a step has to know of how ``parallelize`` laid a model out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forgekit.mesh import DIMENSIONS

if TYPE_CHECKING:
    from forgekit.parallel.pipeline import Stages

__all__ = [
    "Layout",
    "arrange",
    "layout_of",
    "set_layout",
    "shard_and_owners",
    "size_of",
    "world_of",
]

_ATTRIBUTE = "_forgekit_layout"


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """How a model was laid out, as seen from one rank.

    Attributes:
        ring: Ranks over which a sequence goes round in ring attention.
        ulysses: Ranks that exchange places for heads; ``ring * ulysses`` is the size of ``cp``.
        context_rank: This rank's place on ``cp``, ``ring_rank * ulysses + ulysses_rank``.
        tensor: Ranks that share each matrix.
        sequence: Ranks over which tensor parallelism spreads the places of the residual stream.
        longest: Most places of a whole sequence that the model takes; None if it does not say.
        owns_loss: Whether this rank's losses and counts enter the step's sums: every slice of a
            batch is counted on one tensor-parallel rank of the last stage.
        stages: This rank's pipeline stages; None where it holds the whole model.
        dynamic_loss_scale: Whether the loss scale follows overflows (float16).
    """

    ring: int = 1
    ulysses: int = 1
    context_rank: int = 0
    tensor: int = 1
    sequence: int = 1
    longest: int | None = None
    owns_loss: bool = True
    stages: Stages | None = None
    dynamic_loss_scale: bool = False

    @property
    def context(self) -> int:
        """Ranks that share a sequence."""
        return self.ring * self.ulysses

    @property
    def places_multiple(self) -> int:
        """What the places of a sequence must be divisible by, so that every rank has as many."""
        chunks = 2 * self.ring if self.ring > 1 else 1  # zigzag gives each rank two
        return chunks * self.ulysses * self.sequence


def layout_of(model: nn.Module) -> Layout:
    """Return how a model was laid out; one rank holds all of it if ``parallelize`` never saw it."""
    return getattr(model, _ATTRIBUTE, None) or Layout()


def set_layout(model: nn.Module, layout: Layout) -> None:
    """Note how a model was laid out, on the model itself."""
    setattr(model, _ATTRIBUTE, layout)


def size_of(mesh: DeviceMesh | None, name: str) -> int:
    """Size of a mesh dimension; 1 where the mesh does not have it."""
    names = (mesh and mesh.mesh_dim_names) or ()
    return mesh.size(names.index(name)) if mesh is not None and name in names else 1


def world_of(mesh: DeviceMesh | None) -> int:
    """Number of ranks on a mesh; 1 for one process."""
    return 1 if mesh is None else mesh.size()


def shard_and_owners(tensor: Tensor, world: int) -> tuple[Tensor, int]:
    """Take the local piece of a parameter or gradient, and count who holds the same.

    Args:
        tensor: A plain tensor, which every rank holds, or a DTensor.
        world: Number of ranks that hold the same model parts.

    Returns:
        The local piece, and the number of ranks with the same piece.
    """
    if not isinstance(tensor, DTensor):
        return tensor, world
    mesh = tensor.device_mesh
    owners = world // mesh.size()
    for size, placement in zip(mesh.shape, tensor.placements, strict=True):
        owners *= size if placement.is_replicate() else 1
    return tensor.to_local(), owners


def arrange(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Arrange the ranks for sharding: parameters over ``dp_shard * cp`` and over ``tp``.

    Ranks that share a sequence hold different places of it, so their gradients add up like those
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
        mesh = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)
    is_replicated = size_of(mesh, "dp_replicate") > 1
    data = mesh["dp_replicate", shard] if is_replicated else mesh[shard]
    return data, mesh["tp"] if size_of(mesh, "tp") > 1 else None
