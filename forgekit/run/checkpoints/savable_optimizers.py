"""Which optimizers can be saved: those whose state lies in ``optimizer.state``, by parameter.

One that keeps it elsewhere would be saved without an error and resume without its momentum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from forgekit.optim.chain import Chained
from forgekit.ranks import Ranks
from forgekit.state import TrainState, check_optimizer


def name_of(optimizer: Optimizer) -> str:
    """Name an optimizer by its class, a chain by those of its members."""
    members = optimizer.members if isinstance(optimizer, Chained) else ()
    names = dict.fromkeys(type(member).__qualname__ for member in members)
    return f"chain_optimizers({', '.join(names)})" if names else type(optimizer).__qualname__


def check_inner_optimizers(optimizer: Any) -> None:
    """Refuse an optimizer that wraps others whose state it does not share.

    Raises:
        TypeError: Names the optimizer, what it holds, and the remedy.
    """
    check_optimizer(optimizer)
    for name, inner in _inner_optimizers(optimizer):
        if inner.state is not optimizer.state:
            raise TypeError(
                f"{type(optimizer).__name__} holds {type(inner).__name__} in {name!r}, whose state "
                f"is not that of {type(optimizer).__name__}: a checkpoint would keep none of it. "
                "Join optimizers with forgekit.chain_optimizers(first, second); a wrapper of one "
                "shares its state with self.state = optimizer.state."
            )
        check_inner_optimizers(inner)


def check_complete(state: TrainState, ranks: Ranks) -> None:
    """Refuse an optimizer without any state after a good step, unless it needs none.

    Every rank calls it. torch's own optimizers keep their state where a checkpoint finds it, so
    they are not checked. One that needs none says so with an attribute ``stateless = True``.

    Raises:
        TypeError: On every rank.
    """
    optimizer = state.optimizer
    members = optimizer.members if isinstance(optimizer, Chained) else (optimizer,)
    asked = [member for member in members if not _is_known(member)]
    # After bad steps alone no optimizer has any state.
    if not asked or state.step <= int(state.skipped):
        return
    found = ranks.each(lambda: [_has_state(member, optimizer) for member in asked])
    for number, member in enumerate(asked):
        # A rank may hold none of a member's parameters, as with pipelines; one rank is enough.
        if not any(has_state[number] for has_state in found):
            raise TypeError(
                f"{type(member).__name__} has no state after step {state.step}. Kept anywhere but "
                "in optimizer.state[parameter] it would be lost in a checkpoint: keep it there. If "
                "it needs none, say so with stateless = True in its class."
            )


def _inner_optimizers(optimizer: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(optimizer).items():
        values = value.values() if isinstance(value, dict) else value
        found = values if isinstance(value, list | tuple | dict) else (value,)
        yield from ((name, inner) for inner in found if isinstance(inner, Optimizer))


def _is_known(optimizer: Any) -> bool:
    if isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    ):
        return True
    module = type(optimizer).__module__
    return getattr(optimizer, "stateless", False) or module.startswith(("torch.", "forgekit."))


def _has_state(member: Any, optimizer: Any) -> bool:
    parameters = (p for group in member.param_groups for p in group["params"])
    return any(optimizer.state.get(parameter) for parameter in parameters)
