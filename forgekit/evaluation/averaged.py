"""Averaged weights for an evaluation or a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from forgekit.optim.average import average_of
from forgekit.optim.chain import Chained
from forgekit.optim.schedule_free import ScheduleFree
from forgekit.parallel.fsdp import fsdp_modules, release
from forgekit.state import TrainState
from forgekit.tensors import local


@contextmanager
def averaged(state: TrainState) -> Iterator[TrainState]:
    """Replace the weights by their average within the block, in place.

    The weights are the same bits afterwards, also where the block raises. The average is
    ``state.average``; without one, a schedule-free optimizer's evaluation point. Do not train
    within the block, where the weights are not there; ``checkpoint_save`` refuses it.

    Args:
        state: The state, made with ``TrainState.create(..., average=forgekit.EMA(0.999))``.

    Yields:
        The same state.

    Raises:
        ValueError: If the state has no average.

    Examples:
        Both losses of a held-out set::

            log(state, fk.evaluate(state, held_out, loss_fn, name="weights"))
            with fk.evaluation.averaged(state):
                log(state, fk.evaluate(state, held_out, loss_fn, name="average"))
    """
    values = _averages(state)
    kept = {parameter: local(parameter.detach()).clone() for parameter in values}
    try:
        _write(state, values)
        state.saves.is_averaged = True
        yield state
    finally:
        state.saves.is_averaged = False
        _write(state, kept)


def _averages(state: TrainState) -> Mapping[Tensor, Tensor]:
    """Return this rank's shards of averages, by parameter."""
    modules = fsdp_modules(*state.layout.roots(state.model))
    release(modules)  # gathered parameters are not the optimizer's
    if (average := average_of(state)) is not None:
        return {average.parameters[name]: local(value) for name, value in average.values.items()}
    optimizer = state.optimizer
    members = optimizer.members if isinstance(optimizer, Chained) else (optimizer,)
    optimizers = [member for member in members if isinstance(member, ScheduleFree)]
    if not optimizers:
        raise ValueError(
            f"the state has no average, and {type(state.optimizer).__name__} has none either. "
            "Make it with TrainState.create(model, optimizer, average=forgekit.EMA(0.999))."
        )
    return {p: value for optimizer in optimizers for p, value in optimizer.averages().items()}


@torch.no_grad()
def _write(state: TrainState, values: Mapping[Tensor, Tensor]) -> None:
    for parameter, value in values.items():
        local(parameter.detach()).copy_(value)
    release(fsdp_modules(*state.layout.roots(state.model)))  # gathered parameters are stale now
