"""Owners of whole matrices: assignment, exchange of shards with them, and sums over shards.

Transforms of a whole matrix run on one rank, its owner: ranks exchange shards so that each owner
has its matrices whole, and receive the results. No matrix is computed twice, and none is gathered
on a rank that does not need it. Mesh dimensions are undone one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forgekit.optim.shards import Split, splits_of

CACHED = 2**18
"""Maximum number of elements that a CPU iterates at once: copies of more exceed its caches."""

Legs = list[tuple[Split, list[int]]]
"""Exchanges in order: the split that each undoes, and how many matrices each rank gets."""


@attrs.frozen
class Bundle:
    """Parameters of one shape and layout, whose matrices are sent to their owners together.

    Attributes:
        parameters: Matrices ``[o i]``, or stacks of them ``[e o i]``.
        legs: The exchanges from shards to owners.
        owned: The matrices that this rank owns: the parameter, and the number in its stack.
    """

    parameters: list[Tensor]
    legs: Legs
    owned: list[tuple[Tensor, int]]


def bundles(parameters: Sequence[Tensor]) -> Iterator[Bundle]:
    """Group parameters by shape and layout, and choose the owner of each matrix.

    Owners depend on the parameters alone, so that state never moves.

    Args:
        parameters: All parameters of an optimizer's group.
    """
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        is_sharded = isinstance(parameter, DTensor)
        layout = (parameter.device_mesh, parameter.placements) if is_sharded else parameter.device
        alike.setdefault((parameter.shape, parameter.dtype, layout), []).append(parameter)
    start = 0
    for all_alike in alike.values():
        like = all_alike[0]
        # As many at once as fit the caches of a CPU; on other devices, and if sharded, all.
        is_cached = like.device.type == "cpu" and not isinstance(like, DTensor)
        size = max(1, CACHED // max(1, like.numel())) if is_cached else len(all_alike)
        splits = splits_of(like)
        stacks = [split for split in splits if split.dim is not None and split.dim < -2]
        each, first = (like.shape[0] if like.ndim > 2 else 1), 0
        for split in stacks:  # in the order in which they split
            first += sum(split.sizes[: split.rank])
            each = split.sizes[split.rank]
        # A split of the stack leaves matrices whole, so there is nothing to exchange.
        rest = [split for split in splits if split not in stacks]
        for begin in range(0, len(all_alike), size):
            some = all_alike[begin : begin + size]
            legs, numbers = _route(len(some) * each, rest, start)
            owned = [(some[number // each], first + number % each) for number in numbers]
            yield Bundle(some, legs, owned)
            start += len(some)  # so that owners start at different ranks


def _route(count: int, splits: Sequence[Split], start: int) -> tuple[Legs, range]:
    """Assign matrices to ranks; return the exchanges and the numbers of this rank's matrices."""
    legs, begin = Legs(), 0
    # Replicas first: they divide the matrices without communication.
    copies = [split for split in splits if split.dim is None]
    for split in copies + [s for s in reversed(splits) if s.dim is not None]:
        ranks = split.group.size()
        each, left = divmod(count, ranks)
        # The remainder is assigned from rank `start` on.
        counts = [each + ((rank - start) % ranks < left) for rank in range(ranks)]
        legs.append((split, counts))
        begin += sum(counts[: split.rank])
        count = counts[split.rank]
    return legs, range(begin, begin + count)


def to_owners(shards: Tensor, legs: Legs) -> Tensor:
    """Exchange shards ``[n o' i']`` for this rank's matrices ``[m o i]``; all ranks call it."""
    for split, counts in legs:
        if split.dim is None:
            shards = shards.split(counts)[split.rank]
            continue
        rows = shards.movedim(split.dim, 0)  # [o' n i'], or [i' n o'] where columns are split
        shape = (sum(split.sizes), counts[split.rank], rows.shape[-1])
        lengths = [size * shape[1] * shape[2] for size in split.sizes]
        received = _exchange(rows.split(counts, dim=1), lengths, split.group)
        shards = received.view(shape).movedim(0, split.dim).contiguous()
    return shards


def from_owners(matrices: Tensor, legs: Legs) -> Tensor:
    """Exchange this rank's matrices ``[m o i]`` for shards of all of them ``[n o' i']``."""
    for split, counts in reversed(legs):
        if split.dim is None:
            shape = matrices.shape[1:]
            lengths = [count * shape.numel() for count in counts]
            received = _exchange([matrices] * len(counts), lengths, split.group)
            matrices = received.view(sum(counts), *shape)
            continue
        rows = matrices.movedim(split.dim, 0)  # [o m i]
        own, columns = split.sizes[split.rank], rows.shape[-1]
        lengths = [own * count * columns for count in counts]
        received = _exchange(rows.split(split.sizes), lengths, split.group).split(lengths)
        parts = [p.view(own, c, columns) for p, c in zip(received, counts, strict=True)]
        matrices = torch.cat(parts, dim=1).movedim(0, split.dim)
    return matrices


def total_over_shards(parameters: Sequence[Tensor], numbers: Sequence[Tensor]) -> list[Tensor]:
    """Sum one number per parameter over the parameter's shards.

    Args:
        parameters: Sharded or not.
        numbers: One per parameter, of this rank's shard; ``[]`` or all of one shape.

    Returns:
        The sums; they cost one all-reduce for each mesh dimension that shards.
    """
    sums = [*numbers]
    sharded: dict[dist.ProcessGroup, list[int]] = {}
    for number, parameter in enumerate(parameters):
        for split in splits_of(parameter):
            if split.dim is not None:
                sharded.setdefault(split.group, []).append(number)
    for group, which in sharded.items():
        device = parameters[which[0]].device_mesh.device_type  # pyright: ignore[reportAttributeAccessIssue]
        part = torch.stack([sums[number] for number in which]).to(device)
        dist.all_reduce(part, group=group)
        for number, value in zip(which, part, strict=True):
            sums[number] = value.to(numbers[number].device)
    return sums


def _exchange(parts: Sequence[Tensor], lengths: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send a part to each rank of a group; return the received values, flat."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(lengths))
    dist.all_to_all_single(received, sent, lengths, [p.numel() for p in parts], group=group)
    return received
