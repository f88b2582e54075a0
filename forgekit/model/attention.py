"""Causal attention inside documents, as the plain callable that a model's ``attend`` socket takes.

Attention never crosses from one document of a packed row into another. On a CPU, where
``scaled_dot_product_attention`` computes masked pairs as well, the documents are attended one by
one when that is less work; elsewhere, and for many short documents, a boolean mask says the same.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

__all__ = ["Attend", "attend_causal", "document_mask", "wide"]

CALL_COST = 30_000
"""Query-key pairs that cost as much as one more call, forward and backward (one CPU core)."""


class Attend(Protocol):
    """What a model calls for attention; ``parallelize`` puts another one in its place."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None) -> Tensor:
        """Attend from each position to those before it in its document, itself included."""
        ...


def attend_causal(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None) -> Tensor:
    """Causal grouped-query attention on one device.

    Args:
        q: ``[b s h c]`` queries.
        k: ``[b s k c]`` keys; ``k`` divides ``h``.
        v: ``[b s k c]`` values.
        doc_ids: ``[b s]`` document of each position, -1 on padding; None for one document a row.

    Returns:
        ``[b s h c]``.
    """
    if doc_ids is None:
        return _sdpa(q, k, v)
    if q.device.type == "cpu":
        lengths = _document_lengths(doc_ids)
        if lengths is not None and _is_cheaper(lengths, q):
            return _attend_documents(q, k, v, lengths)
    return _sdpa(q, k, v, mask=document_mask(doc_ids))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics and sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def document_mask(doc_ids: Tensor) -> Tensor:
    """The pairs that may attend: ``mask[b, 0, i, j]`` is ``j <= i`` and the same document.

    Args:
        doc_ids: ``[b s]``.

    Returns:
        ``[b 1 s s]`` bool, True where attention is allowed.

    Examples:
        >>> document_mask(torch.tensor([[4, 4, 7]]))[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return same.tril_()


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    q, k, v = (rearrange(x, "b s h c -> b h s c") for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return rearrange(out, "b h s c -> b s h c")


def _attend_documents(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    # One split of all rows: its backward is one concatenation, where that of slices would add
    # a full-size gradient for each.
    split = (rearrange(x, "b s h c -> 1 (b s) h c").split(lengths, 1) for x in (q, k, v))
    out = torch.cat([_sdpa(*part) for part in zip(*split, strict=True)], dim=1)
    return rearrange(out, "1 (b s) h c -> b s h c", b=q.shape[0])


def _document_lengths(doc_ids: Tensor) -> list[int] | None:
    """Lengths of the runs of equal ids, row after row; None if an id comes back after another.

    On a CPU tensor the values are at hand: reading them waits for no device.
    """
    lengths: list[int] = []
    for row in doc_ids.tolist():
        runs = [(document, len(list(run))) for document, run in itertools.groupby(row)]
        documents = [document for document, _ in runs if document != -1]
        if len(set(documents)) != len(documents):
            return None
        lengths += [length for _, length in runs]
    return lengths


def _is_cheaper(lengths: list[int], q: Tensor) -> bool:
    rows, positions, heads, _ = q.shape
    one_by_one = sum(heads * length**2 + CALL_COST for length in lengths)
    return one_by_one < rows * heads * positions**2
