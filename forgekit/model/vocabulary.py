"""Padded vocabularies: padding rows take part in no softmax."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

Head = Callable[..., Any]


def on_tokens(head: Head, tokens: int) -> Head:
    """Restrict a head to the rows of tokens.

    Where ranks share the vocabulary, their parts can only be of one size. A head that takes an
    argument ``vocab_size`` gets its rank's part then, and where padding begins; for any
    other the rows are gathered.

    Args:
        head: ``head(hidden, weight)``.
        tokens: Number of rows that are tokens, the first ones.
    """

    def project(hidden: Tensor, weight: Tensor) -> Any:
        if _is_shared(weight) and "vocab_size" in inspect.signature(head).parameters:
            return partial(head, vocab_size=tokens)(hidden, weight)
        return head(hidden, _first(weight, 0, tokens))

    return project


def logits_of(hidden: Tensor, weight: Tensor, vocab_size: int | None = None) -> Tensor:
    """Compute logits of the first ``vocab_size`` rows of ``[v d]``, by default all; a head."""
    logits = F.linear(hidden, weight)
    return logits if vocab_size is None else _first(logits, -1, vocab_size)


def _is_shared(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and any(one.is_shard(0) for one in weight.placements)


def _first(values: Tensor, dim: int, count: int) -> Tensor:
    if isinstance(values, DTensor):  # gathered here, so that backward shards the gradient
        values = values.redistribute(placements=[Replicate()] * values.device_mesh.ndim)
    return values.narrow(dim, 0, count)


def tokens_of(sizes: Any) -> int | None:
    """Return the number of token ids of a spec or configuration; None if unknown."""
    return getattr(sizes, "tokens", None) or getattr(sizes, "vocab_size", None)
