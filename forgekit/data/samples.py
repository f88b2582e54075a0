"""Samples: the rows of a dataset, stacked into micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

__all__ = ["IGNORED", "apply_transforms", "collate", "read_rows"]

IGNORED = -100
"""The label of a position without a loss."""

PADDING = -1
"""The document id of a position that belongs to no document."""


def collate(samples: Sequence[TensorDict]) -> TensorDict:
    """Stack samples into a micro-batch, key by key: six times faster than stacking TensorDicts.

    Args:
        samples: TensorDicts, or dicts, of tensors of the same keys and shapes.

    Returns:
        A TensorDict with ``batch_size=[b]``.

    Raises:
        ValueError: If there are no samples, or they differ in keys or shapes.

    Examples:
        >>> rows = [{"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.tensor([3, 4])}]
        >>> collate(rows)["input_ids"].tolist()
        [[1, 2], [3, 4]]
    """
    if not samples:
        raise ValueError("there are no samples to collate; a micro-batch has at least one row.")
    keys = list(samples[0].keys())
    for number, sample in enumerate(samples):
        if set(sample.keys()) != set(keys):
            raise ValueError(
                f"sample {number} has {list_keys(sample.keys())}, sample 0 has {list_keys(keys)}; "
                "all rows of a micro-batch must have the same keys."
            )
    columns = {key: _stack([sample[key] for sample in samples], key) for key in keys}
    return TensorDict(columns, batch_size=[len(samples)])


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


def _stack(tensors: list[Tensor], key: Any) -> Tensor:
    for number, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise ValueError(
                f'"{key}" of sample {number} has shape {tuple(tensor.shape)}, of sample 0 '
                f"{tuple(tensors[0].shape)}; pad rows to one length, or pack them."
            )
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(
                f'"{key}" of sample {number} holds {tensor.dtype}, of sample 0 '
                f"{tensors[0].dtype}; stacking would cast one. Give all rows one dtype."
            )
    return torch.stack(tensors)


def list_keys(keys: Iterable[Any]) -> str:
    """List keys in quotes, for a message."""
    return ", ".join(f'"{key}"' for key in keys)


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
