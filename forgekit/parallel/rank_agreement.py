"""What ranks compare before they go on: if they differed, they would wait for each other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

SHOWN = 4
"""Ranks that an error lists."""


def exchange(mine: Any, world: int | None = None) -> list[Any]:
    """Gather an object from each rank, on every rank; a collective where there are several."""
    everyone = [mine] * (dist.get_world_size() if world is None else world)
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


def raise_together(*problems: str | None) -> None:
    """Raise on every rank what some of them found; a small collective.

    Args:
        *problems: What this rank found; None for nothing.

    Raises:
        ValueError: With the first of all problems, and how many there are.
    """
    found = list(dict.fromkeys(p for theirs in exchange(problems) for p in theirs if p))
    if found:
        more = f" ({len(found) - 1} more like it)" if found[1:] else ""
        raise ValueError(f"{found[0]}{more}")


def check_alike(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Compare models and settings over all ranks; a small collective of objects.

    Args:
        model: The model as this rank built it.
        settings: What this rank was told; compared as text.

    Raises:
        ValueError: On every rank, with what the ranks have, if one of them differs.
    """
    shown = {name: repr(value) for name, value in settings.items()}
    check_same(exchange({**shown, "model": _describe(model)}))


def check_same(everyone: Sequence[Mapping[str, str]]) -> None:
    """Raise if the settings that ranks have exchanged differ.

    Args:
        everyone: By rank, each setting's value as text.

    Raises:
        ValueError: With what the ranks have.
    """
    for name in everyone[0]:
        first = {theirs.get(name): rank for rank, theirs in reversed(list(enumerate(everyone)))}
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
