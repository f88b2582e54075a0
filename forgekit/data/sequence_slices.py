"""The positions of a sequence that each context-parallel rank holds, and the inverse.

A causal query attends to all positions before it, so a rank with the last positions would compute
far more than one with the first. *Zigzag* balances this: the sequence is split into twice as many
chunks as there are ranks, and each rank takes one from the front and its mirror image from the
back. Masks come from positions and document ids, so documents may start and end anywhere, without
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeGuard, get_args

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from forgekit.data.batch import check_alike, ids_shape
from forgekit.inputs import check_choice, check_rank, nearest_multiples

Slicing = Literal["zigzag", "contiguous"]


def shard_sequence(
    batch: TensorDict, *, rank: int, world: int, method: Slicing = "zigzag"
) -> TensorDict:
    """Take one rank's positions of a micro-batch of whole sequences.

    Args:
        batch: ``input_ids`` ``[b s]``; tensors whose first dimensions are ``b`` and ``s`` are
            sliced, in nested TensorDicts too; all others (``source``) are kept.
        rank: This rank among those that share the sequence.
        world: Number of ranks that share it.
        method: ``"zigzag"``: of ``2 * world`` chunks, ``rank`` and its mirror image
            ``2 * world - 1 - rank``, for a ring. ``"contiguous"``: of ``world`` chunks, ``rank``,
            for Ulysses.

    Returns:
        A new TensorDict with ``[b s/world]`` tensors.

    Raises:
        ValueError: If there are no ``input_ids``, the method is unknown, the rank is out of range,
            or the positions do not divide into equal chunks.

    Examples:
        >>> batch = TensorDict({"input_ids": torch.arange(8)[None]}, batch_size=[1])
        >>> [shard_sequence(batch, rank=r, world=2)["input_ids"].tolist() for r in range(2)]
        [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]

    References:
        Ring attention, https://arxiv.org/abs/2310.01889; striped, for the balance of causal
        masks, https://arxiv.org/abs/2311.09431
    """
    shape = ids_shape(batch)
    mine = partial(slice_positions, rank=rank, world=world, method=method, dim=1)
    sliced = {key: _each(mine, value, shape) for key, value in batch.items()}
    return TensorDict(sliced, batch_size=batch.batch_size)


def unshard_sequence(slices: Sequence[TensorDict], *, method: Slicing = "zigzag") -> TensorDict:
    """Join the slices of all ranks, the inverse of ``shard_sequence``.

    Args:
        slices: One TensorDict for each rank, in rank order.
        method: How they were sharded.

    Returns:
        A new TensorDict with ``[b s]`` tensors; tensors without positions are the first rank's.

    Raises:
        ValueError: If there is no slice, or they differ in keys, dtypes or shapes.
    """
    slices = list(slices)
    if not slices:
        raise ValueError("there are no slices to join; give one TensorDict for each rank.")
    check_choice("method", method, get_args(Slicing))
    shape = ids_shape(slices[0])
    check_alike({f"slice {number}": part for number, part in enumerate(slices)})
    join = partial(join_positions, method=method, dim=1)
    joined = {key: _join(join, [part[key] for part in slices], shape) for key in slices[0].keys()}  # noqa: SIM118
    return TensorDict(joined, batch_size=slices[0].batch_size)


def slice_positions(
    tensor: Tensor, *, rank: int, world: int, method: Slicing = "zigzag", dim: int = 0
) -> Tensor:
    """Take one rank's positions along one dimension of a tensor.

    Args:
        tensor: ``[... s ...]``.
        rank: This rank among those that share the positions.
        world: Number of ranks that share them.
        method: As for ``shard_sequence``.
        dim: The dimension of the positions.

    Returns:
        ``[... s/world ...]``, a view if the positions are contiguous.

    Raises:
        ValueError: As for ``shard_sequence``.

    Examples:
        >>> slice_positions(torch.arange(8), rank=1, world=4)
        tensor([1, 6])
    """
    check_choice("method", method, get_args(Slicing))
    check_rank(rank, world)
    _check_divisible(tensor.shape[dim], world, method)
    if method == "contiguous" or world == 1:
        return tensor.chunk(world, dim)[rank]
    # world 4, chunks 0-7: rank 0 has 0 7, rank 1 has 1 6, rank 2 has 2 5, rank 3 has 3 4.
    chunks = tensor.chunk(2 * world, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def join_positions(parts: Sequence[Tensor], *, method: Slicing = "zigzag", dim: int = 0) -> Tensor:
    """Join the positions of all ranks, in rank order; the inverse of slicing.

    Examples:
        >>> join_positions([torch.tensor([0, 3]), torch.tensor([1, 2])])
        tensor([0, 1, 2, 3])
    """
    if method == "zigzag" and len(parts) > 1:
        # Front halves in rank order, then back halves from the last rank: chunks 0-3, then 4-7.
        halves = [part.chunk(2, dim) for part in parts]
        parts = [first for first, _ in halves] + [last for _, last in reversed(halves)]
    return torch.cat(list(parts), dim)


def _each(mine: Callable[[Tensor], Tensor], value: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(value, TensorDictBase):
        sliced = {key: _each(mine, inner, shape) for key, inner in value.items()}
        return TensorDict(sliced, batch_size=value.batch_size[:1])
    return mine(value) if _has_positions(value, shape) else value


def _join(join: Callable[[list[Any]], Tensor], parts: list[Any], shape: tuple[int, ...]) -> Any:
    first = parts[0]
    if isinstance(first, TensorDictBase):
        joined = {key: _join(join, [part[key] for part in parts], shape) for key in first.keys()}  # noqa: SIM118
        return TensorDict(joined, batch_size=first.batch_size[:1])
    return join(parts) if _has_positions(first, shape) else first


def _has_positions(value: Any, shape: tuple[int, ...]) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _check_divisible(positions: int, world: int, method: str) -> None:
    chunks = 2 * world if method == "zigzag" and world > 1 else world
    if positions % chunks:
        rule = f"2 * world = {chunks}" if chunks > world else f"world = {chunks}"
        raise ValueError(
            f"{positions} positions must be divisible by {rule} to be sharded {method}; "
            f"{nearest_multiples(positions, chunks)}."
        )
