"""Which rank owns which whole matrix, how shards travel to owners and back, and sums over shards.

What needs whole matrices runs on one rank for each: ranks exchange shards so that each gets some of
the matrices whole, and send the results back. No matrix is computed twice, and none is gathered
where it is not needed. Dimensions of a mesh are undone one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forgekit.optim.shards import Split, splits_of

CACHED = 2**18
"""Elements of matrices that a CPU iterates at once: copies of more do not stay in its caches."""


@attrs.frozen
class Leg:
    """One exchange: a dimension of the mesh is undone.

    Attributes:
        split: What the dimension does to a matrix.
        counts: How many matrices each of its ranks gets.
        group: Its ranks.
    """

    split: Split
    counts: list[int]
    group: dist.ProcessGroup


@attrs.frozen
class Route:
    """The way of some matrices to their owners.

    Attributes:
        legs: The exchanges, in order.
        begin: Number of the first matrix that this rank owns; the others follow.
        count: How many it owns.
    """

    legs: list[Leg]
    begin: int
    count: int


@attrs.frozen
class Bundle:
    """Parameters of one shape and layout, whose matrices travel together.

    Attributes:
        parameters: Matrices ``[o i]``, or stacks of them ``[e o i]``.
        route: Of all their matrices that this rank has shards of, in their order.
        each: How many those are for each parameter.
        first: Number of the first of them in its stack.
    """

    parameters: list[Tensor]
    route: Route
    each: int
    first: int

    def owned(self) -> list[tuple[Tensor, int]]:
        """List the matrices that this rank owns: the parameter, and the number in its stack."""
        numbers = range(self.route.begin, self.route.begin + self.route.count)
        return [(self.parameters[n // self.each], self.first + n % self.each) for n in numbers]


def bundles(parameters: Sequence[Tensor], start: int = 0) -> Iterator[Bundle]:
    """Group parameters by shape and layout, and choose the owner of each matrix.

    The owners depend on the parameters alone, so that their state stays where it is.

    Args:
        parameters: All of an optimizer's group.
        start: Number of matrices before, so that not all groups begin with the same rank.
    """
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        alike.setdefault(_kind(parameter), []).append(parameter)
    for all_alike in alike.values():
        like = all_alike[0]
        # As many at once as the caches of a CPU hold; elsewhere, and shared among ranks, all.
        is_cached = like.device.type == "cpu" and not isinstance(like, DTensor)
        size = max(1, CACHED // max(1, like.numel())) if is_cached else len(all_alike)
        splits = splits_of(like)
        stacks = [split for split in splits if split.dim is not None and split.dim < -2]
        each, first = (like.shape[0] if like.ndim > 2 else 1), 0
        for split in stacks:  # in the order in which they split
            first += sum(split.sizes[: split.rank])
            each = split.sizes[split.rank]
        # Ranks that hold whole matrices of a stack have nothing to exchange for that.
        rest = [split for split in splits if split not in stacks]
        for begin in range(0, len(all_alike), size):
            some = all_alike[begin : begin + size]
            yield Bundle(some, _route(like, len(some) * each, rest, start), each, first)
            start += len(some)


def _kind(parameter: Tensor) -> Any:
    if isinstance(parameter, DTensor):
        return parameter.shape, parameter.dtype, parameter.device_mesh, parameter.placements
    return parameter.shape, parameter.dtype, parameter.device


def _route(like: Tensor, count: int, splits: Sequence[Split], start: int) -> Route:
    legs, begin = [], 0
    # Copies first: they share the matrices without sending anything.
    copies = [split for split in splits if split.dim is None]
    for split in copies + [s for s in reversed(splits) if s.dim is not None]:
        assert isinstance(like, DTensor)
        mesh = like.device_mesh
        each, left = divmod(count, mesh.size(split.mesh_dim))
        ranks = range(mesh.size(split.mesh_dim))
        # The first of those that are left over goes to `start`.
        counts = [each + ((rank - start) % len(ranks) < left) for rank in ranks]
        legs.append(Leg(split, counts, mesh.get_group(split.mesh_dim)))
        begin += sum(counts[: split.rank])
        count = counts[split.rank]
    return Route(legs, begin, count)


def to_owners(shards: Tensor, route: Route) -> Tensor:
    """Exchange shards ``[n o' i']`` for this rank's matrices ``[m o i]``; all ranks call it."""
    for leg in route.legs:
        if leg.split.dim is None:
            shards = shards.split(leg.counts)[leg.split.rank]
            continue
        count = leg.counts[leg.split.rank]
        shapes = [_resized((count, *shards.shape[1:]), leg.split.dim, s) for s in leg.split.sizes]
        lengths = [math.prod(shape) for shape in shapes]
        received = _exchange([*shards.split(leg.counts)], lengths, leg.group)
        pieces = [part.view(shape) for part, shape in zip(received, shapes, strict=True)]
        shards = torch.cat(pieces, dim=leg.split.dim)
    return shards


def from_owners(matrices: Tensor, route: Route, shape: Sequence[int]) -> Tensor:
    """Exchange this rank's matrices ``[m o i]`` for shards of all, of the shape ``[n o' i']``."""
    shapes = [tuple(shape)]
    for leg in route.legs:
        whole = (leg.counts[leg.split.rank], *shapes[-1][1:])
        dim = leg.split.dim
        shapes.append(whole if dim is None else _resized(whole, dim, sum(leg.split.sizes)))
    for leg, here in zip(reversed(route.legs), reversed(shapes[:-1]), strict=True):
        if leg.split.dim is None:
            parts = [matrices] * len(leg.counts)
        else:
            parts = [*matrices.split(list(leg.split.sizes), dim=leg.split.dim)]
        lengths = [math.prod(here[1:]) * count for count in leg.counts]
        matrices = torch.cat(_exchange(parts, lengths, leg.group)).view(here)
    return matrices


def total_over_shards(parameters: Sequence[Tensor], numbers: Sequence[Tensor]) -> list[Tensor]:
    """Add up a number of each parameter over the ranks that share it.

    Args:
        parameters: Sharded or not.
        numbers: One for each, ``[]`` or all of one shape: of this rank's shard.

    Returns:
        The sums, one collective for each dimension of a mesh on which parameters are sharded.
    """
    sums, sharded = [*numbers], {}
    for number, parameter in enumerate(parameters):
        for split in splits_of(parameter):
            if split.dim is not None:
                assert isinstance(parameter, DTensor)
                group = parameter.device_mesh.get_group(split.mesh_dim)
                device = parameter.device_mesh.device_type
                sharded.setdefault(group, (device, []))[1].append(number)
    for group, (device, which) in sharded.items():
        part = torch.stack([sums[number] for number in which]).to(device)
        dist.all_reduce(part, group=group)
        for number, value in zip(which, part, strict=True):
            sums[number] = value.to(numbers[number].device)
    return sums


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if n == dim % len(shape) else length for n, length in enumerate(shape))


def _exchange(parts: list[Tensor], lengths: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Send a part to each rank of a group, and receive one of a given length from each."""
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(lengths))
    dist.all_to_all_single(received, sent, lengths, [p.numel() for p in parts], group=group)
    return [*received.split(lengths)]
