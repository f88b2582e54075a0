"""Functions of a row or a micro-batch, for ``transforms=``: each returns a new TensorDict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from forgekit.data.samples import IGNORED, PADDING
from forgekit.inputs import check_integers

__all__ = ["mask_prompts", "pad_places"]

_FILL = {"labels": IGNORED, "doc_ids": PADDING}


def mask_prompts(batch: TensorDict, start: int, stop: int | None = None) -> TensorDict:
    """Let only answers carry a loss: what follows the token ``start``, ``stop`` included.

    Each document stands for itself: one of several turns may have several answers, and one that
    was split has none in a piece without ``start``.

    Args:
        batch: A row or a micro-batch with ``input_ids`` and ``labels``, ``[... s]``; ``doc_ids``
            where there are several documents in a row.
        start: The token id after which an answer begins.
        stop: The last token of an answer; None lets it go on to the end of its document.

    Returns:
        A copy whose other labels are -100.

    Raises:
        ValueError: If there are no labels yet, or ``start`` and ``stop`` are the same.

    Examples:
        >>> row = {"input_ids": torch.tensor([4, 1, 5, 2]), "labels": torch.tensor([1, 5, 2, 6])}
        >>> mask_prompts(TensorDict(row), start=1, stop=2)["labels"]
        tensor([-100,    5,    2, -100])
    """
    _check_has(batch, ("input_ids", "labels"), "mask_prompts")
    check_integers(start=(start, 0), stop=(0 if stop is None else stop, 0))
    if start == stop:
        raise ValueError(f"start and stop are both {start}; an answer ends with another token.")
    ids = batch["input_ids"]
    places = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
    began = _last(ids == start, places)
    ended = torch.full_like(began, -1) if stop is None else _last(ids == stop, places)
    if "doc_ids" in batch:
        documents = batch["doc_ids"]
        is_first = F.pad(documents[..., 1:] != documents[..., :-1], (1, 0), value=True)
        ended = torch.maximum(ended, _last(is_first, places) - 1)
    masked = batch.clone()
    masked["labels"] = torch.where(began > ended, batch["labels"], IGNORED)
    return masked


def pad_places(
    batch: TensorDict, places: int | None = None, *, multiple: int = 1, token: int = 0
) -> TensorDict:
    """Fill rows up on the right: labels -100, document ids -1, positions 0.

    As a transform of single rows it brings them to one length; of a micro-batch, to a length that
    context parallelism can share.

    Args:
        batch: A row or a micro-batch with ``input_ids`` ``[... s]``; what has its shape is filled.
        places: Places afterwards; None for as many as there are, up to a multiple.
        multiple: What divides the places afterwards.
        token: The id to fill with.

    Returns:
        A new TensorDict.

    Raises:
        ValueError: If there are no labels yet, more places already, or ``multiple`` does not
            divide ``places``.

    Examples:
        >>> row = TensorDict({"input_ids": torch.tensor([5, 6]), "labels": torch.tensor([6, 7])})
        >>> pad_places(row, 3)["labels"]
        tensor([   6,    7, -100])
    """
    _check_has(batch, ("input_ids", "labels"), "pad_places")
    check_integers(
        places=(0 if places is None else places, 0), multiple=(multiple, 1), token=(token, 0)
    )
    shape = batch["input_ids"].shape
    wanted = -(-shape[-1] // multiple) * multiple if places is None else places
    if wanted % multiple:
        raise ValueError(f"{places} places cannot be shared: {multiple} must divide them.")
    if wanted < shape[-1]:
        raise ValueError(
            f"a row has {shape[-1]} places, more than {places}; cut or drop long rows, or pack "
            "documents: forgekit.pack."
        )
    filled: dict[str, Any] = dict(batch.items())
    for key, tensor in filled.items():
        if tensor.shape == shape:
            filled[key] = F.pad(tensor, (0, wanted - shape[-1]), value=_FILL.get(key, 0))
    filled["input_ids"][..., shape[-1] :] = token
    return TensorDict(filled, batch.batch_size)


def _last(is_marked: Tensor, places: Tensor) -> Tensor:
    """The last marked place up to each place, ``[... s]``; -1 before the first."""
    return torch.where(is_marked, places, -1).cummax(-1).values


def _check_has(batch: TensorDict, keys: Sequence[str], who: str) -> None:
    for key in keys:
        if key not in batch:
            there = ", ".join(map(str, batch.keys())) or "nothing"
            raise ValueError(
                f'{who} found no "{key}"; the batch has {there}. Put forgekit.shift_labels before.'
            )
