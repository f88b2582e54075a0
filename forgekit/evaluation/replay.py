"""Replay one step of a run: its samples, and where numbers stopped being finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import attrs
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from forgekit.state import TrainState
from forgekit.steps.accumulate import LossFn, accumulate
from forgekit.steps.clip import clip
from forgekit.steps.micro_batch import evaluating
from forgekit.steps.totals import with_gradient_square


@attrs.frozen
class Replay:
    """Description of a replayed step.

    Attributes:
        step: The step, as in ``metrics.jsonl``: 1 is the first.
        samples: The first sample and the one after the last.
        loss: Mean per target of the whole step.
        grad_norm: Of the token-mean gradient, before clipping.
        losses: Of each row the mean loss per target, without dropout; NaN without targets.
        targets: Of each row the number of targets.
        first_bad_output: The layer, the lowest one, whose output first was not finite in a forward
            pass, or None.
        highest_bad_gradient: The layer nearest to the loss whose gradient was not finite, or None.
        bad_parameters: Names of the parameters whose gradients are not finite.
    """

    step: int
    samples: tuple[int, int]
    loss: float
    grad_norm: float
    losses: list[float]
    targets: list[int]
    first_bad_output: str | None
    highest_bad_gradient: str | None
    bad_parameters: list[str]


def replay_step(state: TrainState, batches: Iterable[TensorDictBase], loss_fn: LossFn) -> Replay:
    """Recompute a step's gradient and describe it; nothing is updated.

    Slow: every layer is read on the host, and each row is also run alone.

    Args:
        state: The state before the step, in one process.
        batches: The step's micro-batches.
        loss_fn: ``loss_fn(model, batch) -> Loss``.

    Returns:
        What was found.

    Raises:
        ValueError: If the state is sharded over several ranks.
    """
    if state.mesh is not None and state.mesh.size() > 1:
        raise ValueError(
            f"a step is replayed in one process, but this state is on {state.mesh.size()} ranks; "
            "start `forgekit replay` without torchrun."
        )
    batches = list(batches)
    rows = _losses(state, loss_fn, batches)
    with find_bad_layers(state.model) as bad:
        totals = accumulate(state, batches, loss_fn)
    totals = with_gradient_square(totals, state)
    gradients = ((name, p.grad) for name, p in state.model.named_parameters())
    return Replay(
        step=state.step + 1,
        samples=(state.samples, state.samples + totals.samples),
        loss=float(totals["loss"] / totals["targets"]),
        grad_norm=float(clip(totals).grad_norm),
        losses=[total / count if count else math.nan for total, count in rows],
        targets=[int(count) for _, count in rows],
        first_bad_output=bad.output,
        highest_bad_gradient=bad.gradient,
        bad_parameters=[name for name, g in gradients if g is not None and not _is_finite(g)],
    )


@attrs.define
class BadLayers:
    """Where numbers first were not finite; None if all were."""

    output: str | None = None
    gradient: str | None = None


@contextmanager
def find_bad_layers(model: nn.Module) -> Iterator[BadLayers]:
    """Watch the outputs and gradients of a model's layers within the block, on the host.

    Args:
        model: A model whose modules are called in one process.

    Yields:
        Names of the innermost layers: that whose ``output`` first was not finite in a forward pass,
        and that whose output's ``gradient`` first was not finite in a backward pass, which is the
        one nearest to the loss.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> _ = nn.init.constant_(model[1].weight, float("inf"))
        >>> with find_bad_layers(model) as bad:
        ...     model(torch.ones(1, 2)).sum().backward()
        >>> bad
        BadLayers(output='1', gradient='0')
    """
    bad = BadLayers()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_hook(partial(_look, bad, name))
                stack.callback(hook.remove)
        yield bad


def _look(bad: BadLayers, name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
    for tensor in tree_leaves(outputs):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        if bad.output is None and not _is_finite(tensor):
            bad.output = name
        if tensor.requires_grad:
            tensor.register_hook(partial(_look_at_gradient, bad, name))


def _look_at_gradient(bad: BadLayers, name: str, gradient: Tensor) -> None:
    if bad.gradient is None and not _is_finite(gradient):
        bad.gradient = name


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


@torch.no_grad()
def _losses(
    state: TrainState, loss_fn: LossFn, batches: list[TensorDictBase]
) -> list[tuple[float, float]]:
    """Compute loss sum and count of each row, without dropout."""
    with evaluating(state.model, state.layout):
        losses = [loss_fn(state.model, row) for batch in batches for row in batch.split(1)]
    return [(float(loss.sum), float(loss.count)) for loss in losses]
