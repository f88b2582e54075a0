"""Comparison of ranks: those that state the same key must state the same value.

Ranks that differ would wait for each other, or add up what does not belong together.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn


class Difference(NamedTuple):
    """A key, the first rank that stated it, and a rank that stated another value."""

    key: Any
    first: int
    other: int


def exchange(
    mine: Any, world: int | None = None, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Gather an object from each rank on every rank; a collective if there are several."""
    gathered = [mine] * (dist.get_world_size(group) if world is None else world)
    if len(gathered) > 1:
        dist.all_gather_object(gathered, mine, group=group)
    return gathered


def find_difference(
    stated: Sequence[Mapping[Any, Any]],
    is_same: Callable[[Any, Any], bool] = operator.eq,
) -> Difference | None:
    """Find the first key for which two ranks state different values.

    Args:
        stated: By rank, values by key. A key that one rank alone states is compared with nothing.
        is_same: Compares two values.

    Examples:
        >>> find_difference([{"a": 1}, {"b": 2}, {"a": 3, "b": 2}])
        Difference(key='a', first=0, other=2)
    """
    first: dict[Hashable, int] = {}
    for rank, values in enumerate(stated):
        for key, value in values.items():
            known = first.setdefault(key, rank)
            if not is_same(stated[known][key], value):
                return Difference(key, known, rank)
    return None


def raise_together(*problems: str | None) -> None:
    """Raise the first problem of any rank on every rank; a small collective.

    Args:
        *problems: What is wrong on this rank; None for nothing.

    Raises:
        ValueError: With the first of all problems, and how many there are.
    """
    distinct = list(dict.fromkeys(p for ranks in exchange(problems) for p in ranks if p))
    if distinct:
        more = f" ({len(distinct) - 1} more like it)" if distinct[1:] else ""
        raise ValueError(f"{distinct[0]}{more}")


def check_alike(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Raise unless models and settings are equal on all ranks; a small object collective.

    Args:
        model: The model as this rank built it.
        settings: This rank's settings; compared as text.

    Raises:
        ValueError: On every rank, with what the ranks have, if one of them differs.
    """
    shown = {name: repr(value) for name, value in settings.items()}
    check_same(exchange({**shown, "model": _describe(model)}))


def check_same(settings: Sequence[Mapping[str, str]]) -> None:
    """Raise if the exchanged settings differ.

    Args:
        settings: By rank, each setting's value as text; one that a rank lacks differs.

    Raises:
        ValueError: With what the ranks have.
    """
    names = dict.fromkeys(name for one in settings for name in one)
    difference = find_difference([{name: one.get(name) for name in names} for one in settings])
    if difference is not None:
        name, *ranks = difference
        shown = ", ".join(f"{settings[rank].get(name)} on rank {rank}" for rank in ranks)
        raise ValueError(f"ranks differ in {name}: {shown}. Use one configuration for all ranks.")


def _describe(model: nn.Module) -> str:
    """Return the model's size and a digest of all names, shapes and dtypes."""
    parameters = [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()]
    # Whether it is on meta decides which ranks initialise and which send.
    on_meta = sum(p.is_meta for p in model.parameters())
    digest = hashlib.blake2b(repr((parameters, on_meta)).encode(), digest_size=4).hexdigest()
    total = sum(p.numel() for p in model.parameters())
    return (
        f"{type(model).__name__} of {len(parameters)} parameters, {total:,} numbers, {on_meta} on "
        f"meta ({digest})"
    )
