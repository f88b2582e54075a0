"""The places of a sequence that each context-parallel rank holds, and back to the whole.

A causal query sees all places before it, so a rank with the last places would have far more to
do than one with the first. *Zigzag* evens this out: the sequence is cut in twice as many chunks as
there are ranks, and each rank takes one from the front and its mirror image from the back. Masks
come from places and document ids, so documents may start and end anywhere, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeGuard, get_args

import torch
from tensordict import TensorDict
from torch import Tensor

from forgekit.inputs import nearest_multiples

__all__ = ["Slicing", "join_places", "shard_sequence", "slice_places", "unshard_sequence"]

Slicing = Literal["zigzag", "contiguous"]


def shard_sequence(
    batch: TensorDict, *, rank: int, world: int, method: Slicing = "zigzag"
) -> TensorDict:
    """Take one rank's places of a micro-batch of whole sequences.

    Args:
        batch: ``input_ids`` ``[b s]``; tensors whose first dimensions are ``b`` and ``s`` are
            sliced, all others (``source``) stay.
        rank: This rank among those that share the sequence.
        world: Number of ranks that share it.
        method: ``"zigzag"``: of ``2 * world`` chunks, ``rank`` and its mirror image
            ``2 * world - 1 - rank``, for a ring. ``"contiguous"``: of ``world`` chunks, ``rank``,
            for Ulysses.

    Returns:
        A new TensorDict with ``[b s/world]`` tensors.

    Raises:
        ValueError: If there are no ``input_ids``, the method is unknown, the rank is not there, or
            the places do not divide into equal chunks.

    Examples:
        >>> batch = TensorDict({"input_ids": torch.arange(8)[None]}, batch_size=[1])
        >>> [shard_sequence(batch, rank=r, world=2)["input_ids"].tolist() for r in range(2)]
        [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]

    References:
        Ring attention, https://arxiv.org/abs/2310.01889; striped, for the balance of causal
        masks, https://arxiv.org/abs/2311.09431
    """
    shape = _shape(batch)
    _check_slicing(shape[1], rank, world, method)
    cut = partial(slice_places, rank=rank, world=world, method=method, dim=1)
    sliced = {
        key: cut(value) if _is_placed(value, shape) else value for key, value in batch.items()
    }
    return TensorDict(sliced, batch_size=batch.batch_size)


def unshard_sequence(slices: Sequence[TensorDict], *, method: Slicing = "zigzag") -> TensorDict:
    """Put the slices of all ranks together again, the inverse of ``shard_sequence``.

    Args:
        slices: One TensorDict for each rank, in rank order.
        method: How they were cut.

    Returns:
        A new TensorDict with ``[b s]`` tensors; what has no places is the first rank's.

    Raises:
        ValueError: If there is no slice, or they differ in keys or shapes.
    """
    slices = list(slices)
    if not slices:
        raise ValueError("there are no slices to join; give one TensorDict for each rank.")
    _check_method(method)
    shape = _shape(slices[0])
    for number, part in enumerate(slices):
        _check_alike(part, slices[0], number)
    joined = {
        key: join_places([part[key] for part in slices], method=method, dim=1)
        if _is_placed(value, shape)
        else value
        for key, value in slices[0].items()
    }
    return TensorDict(joined, batch_size=slices[0].batch_size)


def slice_places(
    tensor: Tensor, *, rank: int, world: int, method: Slicing = "zigzag", dim: int = 0
) -> Tensor:
    """Take one rank's places along one dimension of a tensor.

    Args:
        tensor: ``[... s ...]``.
        rank: This rank among those that share the places.
        world: Number of ranks that share them.
        method: As for ``shard_sequence``.
        dim: The dimension of the places.

    Returns:
        ``[... s/world ...]``, a view where the places are next to each other.

    Raises:
        ValueError: As for ``shard_sequence``.

    Examples:
        >>> slice_places(torch.arange(8), rank=1, world=4)
        tensor([1, 6])
    """
    _check_slicing(tensor.shape[dim], rank, world, method)
    if method == "contiguous" or world == 1:
        return tensor.chunk(world, dim)[rank]
    chunks = tensor.chunk(2 * world, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def join_places(parts: Sequence[Tensor], *, method: Slicing = "zigzag", dim: int = 0) -> Tensor:
    """Put the places of all ranks, in rank order, together again; the inverse of slicing.

    Examples:
        >>> join_places([torch.tensor([0, 3]), torch.tensor([1, 2])])
        tensor([0, 1, 2, 3])
    """
    if method == "zigzag" and len(parts) > 1:
        halves = [part.chunk(2, dim) for part in parts]
        parts = [first for first, _ in halves] + [last for _, last in reversed(halves)]
    return torch.cat(list(parts), dim)


def _shape(batch: TensorDict) -> torch.Size:
    if "input_ids" not in batch:
        there = ", ".join(f'"{key}"' for key in batch.keys()) or "no keys"  # noqa: SIM118
        raise ValueError(
            f'batch has no "input_ids"; it has {there}. Their [b s] says what has places.'
        )
    shape = batch["input_ids"].shape
    if len(shape) != 2:
        raise ValueError(f'"input_ids" has shape {tuple(shape)}; it must be [b s].')
    return shape


def _is_placed(value: Any, shape: torch.Size) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.shape[:2] == shape


def _check_slicing(places: int, rank: int, world: int, method: str) -> None:
    _check_method(method)
    if world < 1:
        raise ValueError(f"world is {world}; at least 1 rank holds a sequence.")
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank}; with world {world} it is one of 0 to {world - 1}.")
    chunks = 2 * world if method == "zigzag" and world > 1 else world
    if places % chunks:
        nearest = nearest_multiples(places, chunks)
        rule = f"2 * world = {chunks}" if chunks > world else f"world = {chunks}"
        raise ValueError(
            f"{places} places must be divisible by {rule} to be cut {method}; the nearest are "
            f"{nearest}."
        )


def _check_method(method: str) -> None:
    if method not in get_args(Slicing):
        known = ", ".join(map(repr, get_args(Slicing)))
        raise ValueError(f"method is {method!r}; it is one of {known}.")


def _check_alike(part: TensorDict, first: TensorDict, number: int) -> None:
    for key in dict.fromkeys([*first.keys(), *part.keys()]):
        if key not in part or key not in first:
            raise ValueError(f'slice {number} and slice 0 do not both have "{key}"; join equals.')
        if part[key].shape != first[key].shape:
            raise ValueError(
                f'"{key}" of slice {number} has shape {tuple(part[key].shape)}, of slice 0 '
                f"{tuple(first[key].shape)}; the slices of one batch are of one size."
            )
