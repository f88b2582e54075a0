"""Functions of a row or a micro-batch, for ``transforms=``: each returns a new TensorDict."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from forgekit.data.batch import IGNORED, PADDING, check_has
from forgekit.inputs import check_integers

_FILL = {"labels": IGNORED, "doc_ids": PADDING}


def mask_prompts(batch: TensorDict, start: int, stop: int | None = None) -> TensorDict:
    """Keep the labels of answers only: the tokens after ``start``, up to and including ``stop``.

    Answers end with their document: one of several turns may have several, and a piece of a split
    document without ``start`` has none.

    Args:
        batch: A row or a micro-batch with ``input_ids`` and ``labels``, ``[... s]``; ``doc_ids`` if
            a row holds several documents.
        start: The token id after which an answer begins.
        stop: The last token of an answer; None extends it to the end of its document.

    Returns:
        A copy whose other labels are -100.

    Raises:
        ValueError: If there are no labels yet, or ``start`` and ``stop`` are the same.

    Examples:
        >>> row = {"input_ids": torch.tensor([4, 1, 5, 2]), "labels": torch.tensor([1, 5, 2, 6])}
        >>> mask_prompts(TensorDict(row), start=1, stop=2)["labels"]
        tensor([-100,    5,    2, -100])
    """
    check_has(batch, "input_ids", "labels")
    check_integers(start=(start, 0), stop=(0 if stop is None else stop, 0))
    if start == stop:
        raise ValueError(f"start and stop are both {start}; an answer ends with another token.")
    ids = batch["input_ids"]
    # An answer is open at a position if `start` was last seen after `stop` and after the
    # document's first position: three running maxima, [... s], and no loop over positions.
    began = _last(ids == start)
    ended = torch.full_like(began, -1) if stop is None else _last(ids == stop)
    if "doc_ids" in batch:
        documents = batch["doc_ids"]
        is_first = F.pad(documents[..., 1:] != documents[..., :-1], (1, 0), value=True)
        ended = torch.maximum(ended, _last(is_first) - 1)
    masked = batch.clone()
    masked["labels"] = torch.where(began > ended, batch["labels"], IGNORED)
    return masked


def pad_positions(
    batch: TensorDict, positions: int | None = None, *, multiple: int = 1, token: int = 0
) -> TensorDict:
    """Pad rows on the right: labels -100, document ids -1, position ids 0.

    As a transform of single rows it gives them one length; of a micro-batch, a length that context
    parallelism can shard.

    Args:
        batch: A row or a micro-batch with ``input_ids`` ``[... s]``; tensors of this shape are
            padded.
        positions: The new ``s``; None for the next multiple.
        multiple: Must divide the new ``s``.
        token: The id on padding.

    Returns:
        A new TensorDict.

    Raises:
        ValueError: If there are no labels yet, rows are longer, or ``multiple`` does not divide
            ``positions``.

    Examples:
        >>> row = TensorDict({"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([6, 7])})
        >>> pad_positions(row, 3)["labels"]
        tensor([   6,    7, -100])
    """
    check_has(batch, "input_ids", "labels")
    check_integers(
        positions=(0 if positions is None else positions, 0),
        multiple=(multiple, 1),
        token=(token, 0),
    )
    shape = batch["input_ids"].shape
    wanted = -(-shape[-1] // multiple) * multiple if positions is None else positions
    if wanted % multiple:
        raise ValueError(f"positions {wanted} must be divisible by multiple {multiple}.")
    if wanted < shape[-1]:
        raise ValueError(
            f"a row has {shape[-1]} positions, more than {wanted}; truncate or drop long rows, or "
            "pack documents: forgekit.pack."
        )
    padded: dict[str, Any] = dict(batch.items())
    for key, tensor in padded.items():
        if tensor.shape == shape:
            padded[key] = F.pad(tensor, (0, wanted - shape[-1]), value=_FILL.get(key, 0))
    padded["input_ids"][..., shape[-1] :] = token
    return TensorDict(padded, batch.batch_size)


def _last(is_marked: Tensor) -> Tensor:
    """The last marked position up to each position, ``[... s]``; -1 before the first."""
    positions = torch.arange(is_marked.shape[-1], device=is_marked.device)
    return torch.where(is_marked, positions, -1).cummax(-1).values
