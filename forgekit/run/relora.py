"""ReLoRA: adapters that are merged for good every so often, and start again.

Each adapter adds a product of low rank; many of them, one after the other, add up to a change of
high rank.

References:
    https://arxiv.org/abs/2307.05695
"""

from __future__ import annotations

from typing import TypeVar

import torch

from forgekit.inputs import check_integers
from forgekit.model.initial import copy_full
from forgekit.model.lora_layers import LoraLayer, local_of, merged_weight
from forgekit.model.nf4 import is_packed
from forgekit.optim.average import average_of
from forgekit.run.adapters import check_unmerged, let_go
from forgekit.state import TrainState, donate

StateT = TypeVar("StateT", bound=TrainState)


def relora(state: StateT, *, every: int) -> StateT:
    """Every ``every`` steps merge a state's adapters into their weights and start new ones.

    Call it after each step; what the model computes does not change. New values of ``A`` come from
    the adapter's seed, its name and the step, so every layout and every resumed run finds the same.
    The optimizer forgets what it kept for adapters (moments and their step counts begin again) and
    keeps the rest; a running average begins again with the weights as they are. ReLoRA also warms
    the learning rate up again, which is the schedule's part. In a base of 16 bits a merge rounds
    away what is below their precision.

    Args:
        state: The state after a step, or before the first; consumed.
        every: Number of steps between two merges.

    Returns:
        The state, of the same step.

    Raises:
        ValueError: If ``every`` is below 1, adapters are merged by ``merge_lora``, or the base is
            packed into four bits, where rounding would erase what was learned.
    """
    check_integers(every=(every, 1))
    layers = check_unmerged(state.model, "they would be added twice")
    if any(is_packed(getattr(layer, matrix)) for layer in layers for matrix in layer.adapters):
        raise ValueError(
            'the base is packed (add_lora(base="nf4")), and a merge into four bits would round '
            "away what the adapters learned. Train without relora, or leave base out."
        )
    if state.step and state.step % every == 0:
        let_go(state.model)
        for layer in layers:
            _restart(layer, state)
        if (average := average_of(state)) is not None:
            average.restart()  # it holds factors whose product is in the base now
    return donate(state)


@torch.no_grad()
def _restart(layer: LoraLayer, state: TrainState) -> None:
    for matrix in layer.adapters:
        local_of(getattr(layer, matrix)).copy_(merged_weight(layer, matrix))
    for name, full in layer.initial_adapters(restart=state.step).items():
        parameter = getattr(layer, name)
        copy_full(parameter, full())
        state.optimizer.state.pop(parameter, None)
