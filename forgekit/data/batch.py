"""Micro-batches: keys and shapes, and functions that make, pad and slice them.

A micro-batch is a TensorDict, ``batch_size=[b]``, of ``input_ids`` and ``labels``, ``[b s]``
integers, and where they apply ``position_ids`` and ``doc_ids``, ``[b s]``, and ``source``, ``[b]``.
``labels[t]`` is the token that follows ``input_ids[t]``; -100 carries no loss. With a teacher's
rows, ``teacher_ids`` and ``teacher_log_probs`` ``[b s k]`` are its k most likely tokens in place of
``labels[t]``, and their logarithms; an id of -100 leaves the position out.

A sequence is shared by context-parallel ranks. A causal query attends to all positions before it,
so a rank with the last positions would compute far more than one with the first. *Zigzag* balances
this: of twice as many chunks as there are ranks, each takes one from the front and its mirror image
from the back. Masks come from positions and document ids, so documents may start and end anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from forgekit.checks import check_choice, check_rank, nearest_multiples, quoted

Slicing = Literal["zigzag", "contiguous"]

IGNORED = -100
"""The label of a position without a loss."""

PADDING = -1
"""The document id of a position that belongs to no document."""

# A teacher's rows, [b s k].
TEACHER = ("teacher_ids", "teacher_log_probs")

POSITIONS = frozenset(
    {
        *TEACHER,
        *("input_ids", "labels", "position_ids", "doc_ids", "targets", "loss_mask"),
        *("log_probs", "old_log_probs", "reference", "advantages", "rewards", "versions"),
        *("lengths", "empty", "logits", "hidden"),
    }
)
"""Names of tensors ``[b s ...]`` whose positions ranks share under context parallelism."""

FILL = MappingProxyType({"labels": IGNORED, "doc_ids": PADDING, "teacher_ids": IGNORED})
"""Padding values other than 0."""


def check_batch(batch: TensorDict) -> None:
    """Raise unless a micro-batch has the keys, shapes and integers that a step relies on.

    Args:
        batch: What a loader yields.

    Raises:
        TypeError: If it is no TensorDict with one batch dimension, a tensor does not hold integers,
            or labels are unsigned.
        ValueError: If a key is missing, or a tensor has another shape.

    Examples:
        >>> check_batch(TensorDict({"input_ids": torch.ones(2, 4)}, batch_size=[2]))
        Traceback (most recent call last):
        ValueError: batch has no "labels"; it has "input_ids". forgekit.shift_labels adds them.
    """
    if not isinstance(batch, TensorDict) or len(batch.batch_size) != 1:
        raise TypeError(
            f"batch is a {type(batch).__name__}; it must be a TensorDict with batch_size=[rows]."
        )
    shape = ids_shape(batch)
    check_has(batch, "labels")
    for key in ("input_ids", "labels", "position_ids", "doc_ids", "source"):
        if key in batch:
            _check_tensor(key, batch[key], shape[:1] if key == "source" else shape)
    _check_signed(batch)


def shift_labels(batch: TensorDict) -> TensorDict:
    """Split rows of ``s + 1`` tokens into inputs and labels.

    With ``doc_ids`` no label crosses from one document into the next, nor into padding.

    Args:
        batch: ``input_ids`` ``[b s+1]``; other tensors of that shape lose their last position.

    Returns:
        A new TensorDict of ``input_ids`` and ``labels``, ``[b s]``, and the other keys. Labels have
        the dtype of the ids, int64 if that is unsigned.

    Raises:
        ValueError: If labels are there already (shifting twice trains on wrong tokens), or rows
            hold fewer than two tokens.

    Examples:
        >>> rows = TensorDict({"input_ids": torch.tensor([[5, 6, 7]])}, batch_size=[1])
        >>> shift_labels(rows)["labels"]
        tensor([[6, 7]])
    """
    if "labels" in batch:
        raise ValueError(
            'batch has "labels" already; shifting them again would train on wrong tokens.'
        )
    ids = batch["input_ids"]
    if ids.ndim != 2 or ids.shape[1] < 2:  # a loss over no position would be NaN
        raise ValueError(
            f'"input_ids" has shape {tuple(ids.shape)}; shifting needs [b s+1] with s at least 1.'
        )
    # Token files hold unsigned ids; labels must hold -100.
    labels = ids[:, 1:].clone() if ids.dtype.is_signed else ids[:, 1:].long()
    if "doc_ids" in batch:
        documents = batch["doc_ids"]
        crosses = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] == PADDING)
        labels[crosses] = IGNORED
    shifted = {
        key: tensor[:, :-1].clone() if tensor.shape[:2] == ids.shape else tensor
        for key, tensor in batch.items()
    }
    return TensorDict({**shifted, "labels": labels}, batch_size=batch.batch_size)


def mask_batch(batch: TensorDict) -> TensorDict:
    """Copy a micro-batch with all labels masked: padding for the end of the data.

    Every rank must bring the same number of micro-batches to a step; a masked one costs a forward
    and a backward pass and changes nothing.

    Args:
        batch: Any micro-batch with ``labels``.

    Returns:
        A new TensorDict with labels of -100 and, if it has them, document ids of -1 and a teacher's
        ids of -100.

    Examples:
        >>> batch = TensorDict({"labels": torch.tensor([[6, 7]])}, batch_size=[1])
        >>> mask_batch(batch)["labels"]
        tensor([[-100, -100]])
    """
    return mask_rows(batch, keep=0)


def mask_rows(batch: TensorDict, keep: int) -> TensorDict:
    """Copy a micro-batch with all labels masked but those of its first ``keep`` rows."""
    _check_signed(batch)
    masked = batch.clone()
    for key in FILL.keys() & masked.keys():
        masked[key][keep:] = FILL[key]
    return masked


def ids_shape(batch: Any) -> tuple[int, ...]:
    """Return ``(b, s)``, the shape of a micro-batch's token ids.

    Raises:
        ValueError: If there are none, or they have another number of dimensions.
    """
    check_has(batch, "input_ids")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2:
        raise ValueError(
            f'"input_ids" has shape {shape}; it must be [b s]. forgekit.data.collate stacks rows.'
        )
    return shape


def _check_tensor(key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f'"{key}" has shape {tuple(tensor.shape)}; it must be {shape}.')
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f'"{key}" is {tensor.dtype}, not integers; .to(dtype) casts ids as well.')


def _check_signed(batch: TensorDict) -> None:
    if not (dtype := batch["labels"].dtype).is_signed:
        raise TypeError(
            f'"labels" is {dtype}, which cannot store {IGNORED}, so masking would add targets; '
            "convert them with .long()."
        )


def pad_positions(
    batch: TensorDict, positions: int | None = None, *, multiple: int = 1, token: int = 0
) -> TensorDict:
    """Pad rows on the right: labels -100, document ids -1, position ids 0.

    As a transform of single rows it gives them one length; of a micro-batch, a length that context
    parallelism can shard.

    Args:
        batch: A row or a micro-batch with ``input_ids`` ``[... s]``; padded are tensors of this
            shape and ``[... s k]`` ones under the names of ``POSITIONS``.
        positions: The new ``s``; None for that of the rows.
        multiple: The new ``s`` is rounded up to a multiple of it.
        token: The id on padding.

    Returns:
        A new TensorDict.

    Raises:
        ValueError: If there are no labels yet, or rows are longer.

    Examples:
        >>> row = TensorDict({"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([6, 7])})
        >>> pad_positions(row, 3)["labels"]
        tensor([   6,    7, -100])
    """
    check_has(batch, "labels")  # labels made later from padded ids would train on padding
    shape = batch["input_ids"].shape
    length = -(-(shape[-1] if positions is None else positions) // multiple) * multiple
    if length < shape[-1]:  # torch would truncate the row
        raise ValueError(
            f"a row has {shape[-1]} positions, more than {length}; truncate, drop or pack it."
        )
    padded: dict[str, Any] = dict(batch.items())
    for key, tensor in padded.items():
        inner = tensor.ndim - len(shape)
        if tensor.shape[: len(shape)] == shape and (not inner or key in POSITIONS):
            room = (*(0, 0) * inner, 0, length - shape[-1])
            padded[key] = F.pad(tensor, room, value=FILL.get(key, 0))
    padded["input_ids"][..., shape[-1] :] = token
    return TensorDict(padded, batch.batch_size)


def collate(samples: Sequence[TensorDict]) -> TensorDict:
    """Stack samples into a micro-batch, key by key: six times faster than stacking TensorDicts.

    Args:
        samples: TensorDicts, or dicts, of tensors of the same keys and shapes.

    Returns:
        A TensorDict with ``batch_size=[b]``.

    Raises:
        ValueError: If they differ in keys, shapes or dtypes: stacking would cast some of them.

    Examples:
        >>> rows = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 4])}]
        >>> collate(rows)["input_ids"].tolist()
        [[1, 2], [3, 4]]
    """
    rows: list[dict[Any, Any]] = [dict(sample.items()) for sample in samples]
    check_alike({f"sample {number}": row for number, row in enumerate(rows)})
    columns = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return TensorDict(columns, batch_size=[len(rows)])


def read_rows(dataset: Any, rows: Sequence[int]) -> TensorDict:
    """Build the micro-batch of these rows of a map-style dataset.

    Args:
        dataset: Has ``[row]``, or ``__getitems__(rows)``, which returns a micro-batch or its rows.
        rows: The row numbers.

    Returns:
        A TensorDict with ``batch_size=[b]``.
    """
    if not hasattr(dataset, "__getitems__"):
        return collate([dataset[row] for row in rows])
    batch = dataset.__getitems__(rows)
    return batch if isinstance(batch, TensorDict) else collate(batch)


def check_alike(parts: Mapping[str, Mapping[Any, Any]], dim: int = 0) -> None:
    """Raise if samples or micro-batches cannot be joined.

    Args:
        parts: Dicts of tensors, by the name of each in messages.
        dim: Dimensions from this one on must be equal.

    Raises:
        ValueError: If they differ in keys, dtypes or shapes.
    """
    kinds = {
        name: {key: (tensor.dtype, list(tensor.shape[dim:])) for key, tensor in part.items()}
        for name, part in parts.items()
    }
    (first, expected), *others = kinds.items()
    for name, kind in others:
        if kind != expected:
            raise ValueError(f"{name} has {kind}, but {first} {expected}; they must agree.")


def check_has(batch: Any, key: str) -> None:
    """Raise if a batch lacks a key.

    Raises:
        ValueError: Says how to add it.
    """
    if key not in batch:
        remedy = "forgekit.shift_labels adds them." if key == "labels" else "Name the token ids so."
        raise ValueError(f'batch has no "{key}"; it has {quoted(batch.keys())}. {remedy}')


def apply_transforms(batch: TensorDict, transforms: Iterable[Any]) -> TensorDict:
    """Apply functions to a micro-batch, one after another.

    Raises:
        ValueError: If one returns no TensorDict, or changes the number of rows, since rows count
            samples.
    """
    for transform in transforms:
        after: Any = transform(batch)
        if not isinstance(after, TensorDict) or after.batch_size != batch.batch_size:
            name = getattr(transform, "__name__", repr(transform))
            raise ValueError(
                f"the transform {name} must return a TensorDict with {batch.batch_size}, since "
                "rows count samples. Mask rows with labels of -100 instead."
            )
        batch = after
    return batch


def shard_sequence(
    batch: TensorDict, *, rank: int, world: int, method: Slicing = "zigzag"
) -> TensorDict:
    """Slice a micro-batch of whole sequences to one rank's positions.

    Args:
        batch: ``input_ids`` ``[b s]``. Sliced are ``[b s ...]`` tensors under the names of
            ``POSITIONS`` and all in nested TensorDicts of ``batch_size=[b, s]``; tensors of other
            shapes (``source``) are kept.
        rank: This rank among those that share the sequence.
        world: Number of ranks that share it.
        method: ``"zigzag"``: of ``2 * world`` chunks, ``rank`` and its mirror image
            ``2 * world - 1 - rank``, for a ring. ``"contiguous"``: of ``world`` chunks, ``rank``,
            for Ulysses.

    Returns:
        A new TensorDict with ``[b s/world]`` tensors.

    Raises:
        ValueError: If there are no ``input_ids``, the method is unknown, the rank is out of range,
            the positions do not divide into equal chunks, or a ``[b s ...]`` tensor of another name
            does not say whether it has positions.

    Examples:
        >>> batch = TensorDict({"input_ids": torch.arange(8)[None]}, batch_size=[1])
        >>> [shard_sequence(batch, rank=r, world=2)["input_ids"].tolist() for r in range(2)]
        [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]

    References:
        Ring attention, https://arxiv.org/abs/2310.01889; striped, for the balance of causal
        masks, https://arxiv.org/abs/2311.09431
    """
    mine = partial(slice_positions, rank=rank, world=world, method=method, dim=1)
    return _map_positions(mine, ids_shape(batch), batch, declared=world == 1)


def unshard_sequence(slices: Sequence[TensorDict], *, method: Slicing = "zigzag") -> TensorDict:
    """Join the slices of all ranks, the inverse of ``shard_sequence``.

    Args:
        slices: One TensorDict for each rank, in rank order.
        method: How they were sharded.

    Returns:
        A new TensorDict with ``[b s]`` tensors; tensors without positions are the first rank's.

    Raises:
        ValueError: If they differ in keys, dtypes or shapes.
    """
    check_choice("method", method, get_args(Slicing))
    check_alike({f"slice {number}": part for number, part in enumerate(slices)})

    def join(*parts: Tensor) -> Tensor:
        return join_positions(parts, method=method, dim=1)

    return _map_positions(join, ids_shape(slices[0]), *slices)


def slice_positions(
    tensor: Tensor, *, rank: int, world: int, method: Slicing = "zigzag", dim: int = 0
) -> Tensor:
    """Slice a tensor to one rank's positions along a dimension.

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
    positions = tensor.shape[dim]
    chunks = 2 * world if method == "zigzag" and world > 1 else world
    if positions % chunks:
        raise ValueError(
            f"{positions} positions cannot be sharded {method} over {world} ranks: they must be "
            f"divisible by {chunks}; {nearest_multiples(positions, chunks)}."
        )
    if chunks == world:
        return tensor.chunk(world, dim)[rank]
    # world 4, chunks 0-7: rank 0 has 0 7, rank 1 has 1 6, rank 2 has 2 5, rank 3 has 3 4.
    parts = tensor.chunk(chunks, dim)
    return torch.cat((parts[rank], parts[-1 - rank]), dim)


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


def _map_positions(
    function: Callable[..., Tensor], shape: tuple[int, ...], *batches: Any, declared: bool = False
) -> TensorDict:
    """Call a function of the tensors that have positions; keep the first batch's others."""
    mapped: dict[str, Any] = {}
    for key, value in batches[0].items():
        is_declared = declared or key in POSITIONS
        if isinstance(value, TensorDictBase):
            is_declared = is_declared or tuple(value.batch_size[:2]) == shape
            parts = [batch[key] for batch in batches]
            mapped[key] = _map_positions(function, shape, *parts, declared=is_declared)
        elif tuple(value.shape[:2]) != shape:
            mapped[key] = value
        elif is_declared:
            mapped[key] = function(*(batch[key] for batch in batches))
        else:
            raise ValueError(
                f'"{key}" has shape {tuple(value.shape)}, but ranks share {shape[1]} positions. If '
                "it has positions, put it into a TensorDict of batch_size [b, s] in the batch; if "
                f"not, give it another shape: {[shape[0], 1, *value.shape[1:]]}."
            )
    sizes = batches[0].batch_size[:1]
    if declared and len(batches[0].batch_size) > 1 and mapped:
        sizes = next(iter(mapped.values())).shape[:2]
    return TensorDict(mapped, batch_size=sizes)
