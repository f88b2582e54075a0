"""The part of a tensor that a rank holds: how each mesh dimension splits it.

Derived from the placements of a DTensor alone, so that it is valid for every layout: rows over
``dp_shard``, rows or columns over ``tp`` and the rest over ``dp_shard``, experts over ``ep`` and
their rows over the rest. Shards may be uneven, and empty.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from forgekit.tensors import box_of, local


@attrs.frozen
class Split:
    """How one mesh dimension splits a tensor.

    Attributes:
        group: The ranks of the mesh dimension.
        rank: This rank's position among them.
        dim: The tensor's dimension that is split, counted from its end; None where every rank has
            a copy.
        sizes: Length of each rank's part along ``dim``.
    """

    group: dist.ProcessGroup
    rank: int
    dim: int | None
    sizes: list[int]


def splits_of(tensor: Tensor) -> list[Split]:
    """List the splits of a tensor, in the order in which they apply.

    Args:
        tensor: A DTensor; for a plain tensor the list is empty.

    Returns:
        A ``Split`` for each dimension of the mesh with more than one rank.
    """
    if not isinstance(tensor, DTensor):
        return []
    mesh, splits = tensor.device_mesh, []
    shape = list(tensor.shape)
    # FSDP splits after tensor parallelism, although its mesh dimension comes first.
    late = [isinstance(placement, _StridedShard) for placement in tensor.placements]
    for mesh_dim in sorted(range(mesh.ndim), key=late.__getitem__):
        ranks, rank = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
        if ranks == 1:
            continue
        placement: Any = tensor.placements[mesh_dim]
        dim = (
            None if isinstance(placement, Replicate) else placement.dim % tensor.ndim - tensor.ndim
        )
        sizes = _chunk_sizes(shape[dim], ranks) if dim is not None else []
        if dim is not None:
            shape[dim] = sizes[rank]
        splits.append(Split(mesh.get_group(mesh_dim), rank, dim, sizes))
    return splits


def global_indices(tensor: Tensor) -> list[Tensor]:
    """Return where this rank's part lies in the whole tensor.

    Args:
        tensor: A tensor, sharded or not, ``[n0 n1 ...]``.

    Returns:
        For each dimension the indices of the local part, int64 on its device.
    """
    device, (starts, sizes) = local(tensor).device, box_of(tensor)
    return [torch.arange(a, a + n, device=device) for a, n in zip(starts, sizes, strict=True)]


def _chunk_sizes(length: int, ranks: int) -> list[int]:
    """Lengths as ``torch.chunk`` and DTensor have them: equal ones, a shorter one, empty ones."""
    chunk = -(-length // ranks)
    return [min(chunk, max(length - rank * chunk, 0)) for rank in range(ranks)]
