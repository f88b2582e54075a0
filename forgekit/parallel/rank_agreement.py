"""All ranks have to be told the same, or they would wait for each other or mix up parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

SHOWN = 4
"""Ranks that an error lists."""


def check_alike(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Compare models and settings over all ranks; a small collective of objects.

    Args:
        model: The model as this rank built it.
        settings: What this rank was told; compared as text.

    Raises:
        ValueError: On every rank, with what the ranks have, if one of them differs.
    """
    mine = {**{name: repr(value) for name, value in settings.items()}, "model": _describe(model)}
    everyone: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for name in mine:
        first = {theirs[name]: rank for rank, theirs in reversed(list(enumerate(everyone)))}
        if len(first) > 1:
            shown = list(first.items())[::-1][:SHOWN]
            raise ValueError(
                f"ranks differ in {name}: "
                + ", ".join(f"{value} on rank {rank}" for value, rank in shown)
                + ". Use one configuration for all ranks."
            )


def _describe(model: nn.Module) -> str:
    """The model's size, and a digest that changes with any name, shape or dtype."""
    parameters = [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()]
    # On meta or not decides who fills and who sends.
    on_meta = sum(p.is_meta for p in model.parameters())
    digest = hashlib.blake2b(repr((parameters, on_meta)).encode(), digest_size=4).hexdigest()
    total = sum(p.numel() for p in model.parameters())
    return (
        f"{type(model).__name__} of {len(parameters)} parameters, {total:,} numbers, {on_meta} on "
        f"meta ({digest})"
    )
