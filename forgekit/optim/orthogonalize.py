"""The nearest orthogonal matrices, of many at once, shared among the ranks that hold their shards.

A Newton-Schulz iteration needs whole matrices. Ranks exchange shards so that each gets some of the
matrices whole, iterates those, and sends the results back: no matrix is iterated twice, and none
is gathered where it is not needed. Dimensions of a mesh are undone one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forgekit.optim.shards import Split
from forgekit.tensors import wide

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose slope at zero is steep: singular values end between 0.7 and 1.2."""

EPS = 1e-7


def orthogonalize(
    matrices: Tensor,
    *,
    steps: int = 5,
    scales: Sequence[float] = (1.0,),
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Replace each matrix's singular values by about 1, and multiply it by a scale.

    Args:
        matrices: ``[n o i]``, in the dtype of the iteration.
        steps: Newton-Schulz iterations.
        scales: A factor for each part.
        rows: Numbers of rows of the parts that are matrices of their own; None for one part.

    Returns:
        ``[n o i]``.

    References:
        https://kellerjordan.github.io/posts/muon/
    """
    parts = matrices.split([matrices.shape[-2]] if rows is None else list(rows), dim=-2)
    done = [_iterate(part, steps, scale) for part, scale in zip(parts, scales, strict=True)]
    return done[0] if len(done) == 1 else torch.cat(done, dim=-2)


def _iterate(matrices: Tensor, steps: int, scale: float) -> Tensor:
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide(x.dtype))
    x = x / norm.clamp(min=EPS).to(x.dtype)
    for step in range(steps):
        last = scale if step == steps - 1 else 1.0
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a * last, alpha=last)
    return x.mT if is_tall else x


def share_matrices(
    shards: Tensor,
    splits: Sequence[Split],
    mesh: DeviceMesh | None,
    compute: Callable[[Tensor], Tensor],
    start: int = 0,
) -> Tensor:
    """Apply a function of whole matrices to matrices of which each rank holds a shard.

    Every rank of the mesh calls it, with as many matrices.

    Args:
        shards: ``[n o' i']``: this rank's part of ``n`` matrices.
        splits: What splits them, in the order in which it does.
        mesh: The mesh of the splits.
        compute: ``[m o i] -> [m o i]`` on some of the matrices.
        start: The rank that gets one matrix more if they cannot be shared evenly.

    Returns:
        ``[n o' i']``: this rank's part of the results.
    """
    # Copies first: they share the matrices without sending anything.
    last = next((s for s in splits if s.dim is None), splits[-1] if splits else None)
    if last is None or mesh is None:
        return compute(shards)
    rest = [split for split in splits if split is not last]
    group = mesh.get_group(last.mesh_dim)
    counts = _counts(len(shards), mesh.size(last.mesh_dim), start)
    matrices_here = _collect(shards, last, counts, group)
    matrices_here = share_matrices(matrices_here, rest, mesh, compute, start)
    return _return(matrices_here, shards, last, counts, group)


def _counts(matrices: int, ranks: int, start: int) -> list[int]:
    """How many matrices each rank gets; the first of those that are left over goes to ``start``."""
    each, left = divmod(matrices, ranks)
    return [each + ((rank - start) % ranks < left) for rank in range(ranks)]


def _collect(shards: Tensor, split: Split, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send each rank its matrices' shards; return this rank's matrices, joined."""
    if split.dim is None:
        return shards.split(counts)[split.rank]
    count = counts[split.rank]
    shapes = [_resized(shards[:count], split.dim, size) for size in split.sizes]
    received = _exchange([*shards.split(counts)], [shape.numel() for shape in shapes], group)
    pieces = [part.view(shape) for part, shape in zip(received, shapes, strict=True)]
    return torch.cat(pieces, dim=split.dim)


def _return(
    matrices_here: Tensor, shards: Tensor, split: Split, counts: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send each rank its shard of this rank's matrices; return this rank's shards of all."""
    if split.dim is None:
        parts = [matrices_here] * len(counts)
    else:
        parts = [*matrices_here.split(list(split.sizes), dim=split.dim)]
    each = shards[:1].numel()
    return torch.cat(_exchange(parts, [each * count for count in counts], group)).view_as(shards)


def _resized(matrices: Tensor, dim: int, size: int) -> torch.Size:
    shape = list(matrices.shape)
    shape[dim] = size
    return torch.Size(shape)


def _exchange(parts: list[Tensor], lengths: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Send a part to each rank of a group, and receive one of a given length from each."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(lengths))
    dist.all_to_all_single(received, sent, lengths, [p.numel() for p in parts], group=group)
    return [*received.split(lengths)]
