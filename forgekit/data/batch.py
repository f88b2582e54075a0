"""Micro-batches: their keys and shapes, and the functions that make them of samples.

A micro-batch is a TensorDict, ``batch_size=[b]``, of ``input_ids`` and ``labels``, ``[b s]``
integers, and where they apply ``position_ids`` and ``doc_ids``, ``[b s]``, and ``source``, ``[b]``.
``labels[t]`` is the token that follows ``input_ids[t]``; -100 carries no loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from forgekit.inputs import quoted

IGNORED = -100
"""The label of a position without a loss."""

MOST_ROWS = 2**31
"""Most rows of a micro-batch, and most positions of a row: both are in memory."""

PADDING = -1
"""The document id of a position that belongs to no document."""


def check_batch(batch: TensorDict) -> None:
    """Raise unless a micro-batch has the keys, shapes and integers that a step relies on.

    Args:
        batch: What a loader yields.

    Raises:
        TypeError: If it is no TensorDict, a tensor does not hold integers, or labels are unsigned.
        ValueError: If it has no row dimension, a key is missing, or a tensor has another shape.

    Examples:
        >>> check_batch(TensorDict({"input_ids": torch.ones(2, 4)}, batch_size=[2]))
        Traceback (most recent call last):
        ValueError: batch has no "labels"; it has "input_ids". forgekit.shift_labels adds them.
    """
    _check_rows(batch)
    shape = ids_shape(batch)
    check_has(batch, "labels")
    _check_tensor(batch, "input_ids", shape, "[b s]")
    for key in ("labels", "position_ids", "doc_ids"):
        _check_tensor(batch, key, shape, "[b s] like input_ids")
    _check_signed(batch)
    _check_tensor(batch, "source", shape[:1], "[b]")


def shift_labels(batch: TensorDict) -> TensorDict:
    """Make inputs and labels from rows that hold one token more.

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
    _check_rows(batch)
    check_has(batch, "input_ids")
    if "labels" in batch:
        raise ValueError(
            'batch has "labels" already; shifting again would train on wrong tokens. '
            'Delete them first if they are not shifted: del batch["labels"].'
        )
    ids = batch["input_ids"]
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(
            f'"input_ids" has shape {tuple(ids.shape)}; shifting needs [b s+1] with s at least 1.'
        )
    # Token files hold unsigned ids; labels must hold -100.
    labels = ids[:, 1:].clone() if ids.dtype.is_signed else ids[:, 1:].long()
    if "doc_ids" in batch:
        documents = batch["doc_ids"]
        crosses = (documents[:, 1:] != documents[:, :-1]) | (documents[:, 1:] == PADDING)
        labels[crosses] = IGNORED
    shifted = {key: _drop_last(tensor, ids.shape) for key, tensor in batch.items()}
    return TensorDict({**shifted, "labels": labels}, batch_size=batch.batch_size)


def mask_batch(batch: TensorDict) -> TensorDict:
    """Copy a micro-batch without its loss: padding for the end of the data.

    Every rank must bring the same number of micro-batches to a step; a masked one costs a forward
    and a backward pass and changes nothing.

    Args:
        batch: Any micro-batch with ``labels``.

    Returns:
        A new TensorDict with labels of -100 and, if it has them, document ids of -1.

    Examples:
        >>> batch = TensorDict({"labels": torch.tensor([[6, 7]])}, batch_size=[1])
        >>> mask_batch(batch)["labels"]
        tensor([[-100, -100]])
    """
    _check_rows(batch)
    return mask_rows(batch, keep=0)


def mask_rows(batch: TensorDict, keep: int) -> TensorDict:
    """Copy a micro-batch, with a loss in its first ``keep`` rows only."""
    check_has(batch, "labels")
    _check_signed(batch)
    masked = batch.clone()
    masked["labels"][keep:] = IGNORED
    if "doc_ids" in masked:
        masked["doc_ids"][keep:] = PADDING
    return masked


def _drop_last(tensor: Any, shape: torch.Size) -> Any:
    return tensor[:, :-1].clone() if tensor.shape[:2] == shape else tensor


def _check_rows(batch: Any) -> None:
    if not isinstance(batch, TensorDict):
        raise TypeError(
            f"batch is a {type(batch).__name__}; a micro-batch is a TensorDict: "
            "TensorDict(tensors, batch_size=[rows])."
        )
    if len(batch.batch_size) != 1:
        raise ValueError(
            f"batch has batch_size {list(batch.batch_size)}; a micro-batch has [rows]. "
            "Build it as TensorDict(tensors, batch_size=[rows])."
        )


def ids_shape(batch: Any) -> tuple[int, ...]:
    """Return ``(b, s)``, the shape of a micro-batch's token ids.

    Raises:
        ValueError: If there are none, or they have another number of dimensions.
    """
    check_has(batch, "input_ids")
    shape = tuple(batch["input_ids"].shape)
    if len(shape) != 2:
        raise ValueError(
            f'"input_ids" has shape {shape}; it must be [b s], rows by positions. '
            "forgekit.data.collate stacks samples."
        )
    return shape


def _check_tensor(batch: TensorDict, key: str, shape: tuple[int, ...], rule: str) -> None:
    if key not in batch:
        return
    tensor = batch[key]
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f'"{key}" has shape {tuple(tensor.shape)}; it must be {rule}, here {shape}.'
        )
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(
            f'"{key}" holds {tensor.dtype}; it must hold integers. '
            "Move a batch with .to(device) only: .to(dtype) casts ids too."
        )


def _check_signed(batch: TensorDict) -> None:
    if not (dtype := batch["labels"].dtype).is_signed:
        raise TypeError(
            f'"labels" holds {dtype}, which has no {IGNORED}; masked positions would count as '
            'targets. Convert before masking: batch["labels"] = batch["labels"].long().'
        )


def collate(samples: Sequence[TensorDict]) -> TensorDict:
    """Stack samples into a micro-batch, key by key: six times faster than stacking TensorDicts.

    Args:
        samples: TensorDicts, or dicts, of tensors of the same keys and shapes.

    Returns:
        A TensorDict with ``batch_size=[b]``.

    Raises:
        ValueError: If there are no samples, or they differ in keys, shapes or dtypes: stacking
            would cast some of them.

    Examples:
        >>> rows = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 4])}]
        >>> collate(rows)["input_ids"].tolist()
        [[1, 2], [3, 4]]
    """
    if not samples:
        raise ValueError("there are no samples to collate; a micro-batch has at least one row.")
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
    """Refuse parts of a batch that cannot be joined.

    Args:
        parts: Dicts of tensors, by the name of each in messages.
        dim: Dimensions from this one on must be equal.

    Raises:
        ValueError: If they differ in keys, dtypes or shapes.
    """
    kinds = [_kind(part, dim) for part in parts.values()]
    for name, kind in zip(parts, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"{name} has {_describe(kind)}; {next(iter(parts))} has {_describe(kinds[0])}. "
                "All must have the same keys, dtypes and shapes."
            )


def _kind(part: Mapping[Any, Any], dim: int) -> dict[Any, tuple[torch.dtype, torch.Size]]:
    if not dim:  # slicing a shape takes longer than all the rest
        return {key: (tensor.dtype, tensor.shape) for key, tensor in part.items()}
    return {key: (tensor.dtype, tensor.shape[dim:]) for key, tensor in part.items()}


def _describe(kind: Mapping[Any, tuple[torch.dtype, torch.Size]]) -> str:
    return ", ".join(
        f'"{key}" {str(dtype).removeprefix("torch.")} {list(shape)}'
        for key, (dtype, shape) in kind.items()
    )


def check_has(batch: Any, *keys: str) -> None:
    """Refuse a batch without one of some keys.

    Raises:
        ValueError: If one is missing; says how to add it.
    """
    remedies = {"labels": "forgekit.shift_labels adds them."}
    for key in keys:
        if key not in batch:
            remedy = remedies.get(key, f'Name the token ids "{key}".')
            raise ValueError(f'batch has no "{key}"; it has {quoted(batch.keys())}. {remedy}')


def apply_transforms(batch: TensorDict, transforms: Iterable[Any]) -> TensorDict:
    """Call functions of a micro-batch one after another.

    Raises:
        TypeError: If one returns no TensorDict.
        ValueError: If one changes the number of rows, since rows count samples.
    """
    for transform in transforms:
        after: Any = transform(batch)
        name = getattr(transform, "__name__", repr(transform))
        if not isinstance(after, TensorDict):
            raise TypeError(
                f"the transform {name} returned a {type(after).__name__}; return the TensorDict."
            )
        if after.batch_size != batch.batch_size:
            raise ValueError(
                f"the transform {name} made rows {list(after.batch_size)} of "
                f"{list(batch.batch_size)}; samples are counted in rows. Mask rows with labels of "
                "-100 instead of leaving them out."
            )
        batch = after
    return batch
