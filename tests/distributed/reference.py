"""What one process finds for a cell's data: float64, plain torch, the whole batch at once.

Nothing of the step is used: torch's cross-entropy is summed over the global batch and divided by
its number of targets; clipping and updates are torch's too.
"""

from __future__ import annotations

from functools import cache

import attrs
import torch
from distributed.batches import global_batch
from distributed.experts import Chosen, balance_of, compute_densely, follow, gradients_with_terms
from distributed.matrix import LAYOUTS, ROUTED, Cell, Row
from distributed.models import BUILDERS, MAX_NORM, SCHEDULES, build_model
from lab import reference_gradients
from tensordict import TensorDict
from torch import Tensor, nn

ALL = LAYOUTS | ROUTED


@attrs.frozen
class Training:
    """Some steps with one optimizer: the parameters after them and each step's numbers.

    Attributes:
        balance: Loads and biases of routers after them, by name.
        gradients: Of the token-mean loss of the first step's global batch.
        counts: How often each expert was chosen in the first step, by layer.
        metrics: Of routers in the first step.
    """

    parameters: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    balance: dict[str, list[float]]
    gradients: dict[str, Tensor]
    counts: list[list[float]]
    metrics: dict[str, float]


@attrs.frozen
class Expected:
    """What every layout has to find.

    Attributes:
        start: Parameters before the first step, float32.
        training: By optimizer.
        targets: Targets of each step.
        rows: Rows of each step.
    """

    start: dict[str, Tensor]
    training: dict[str, Training]
    targets: list[int]
    rows: list[int]


def expect(cell: Cell) -> Expected:
    """The reference of a cell; cells that differ in how they compute share it."""
    return _expect(_like(cell.layout), cell.micros, cell.targets, cell.packed, cell.steps)


def _like(layout: str) -> str:
    """The first layout of the table with the same data and the same model."""
    return next(name for name, row in ALL.items() if _data(row) == _data(ALL[layout]))


def _data(row: Row) -> tuple[object, ...]:
    shared = row.options.get("context_parallel", "ring") if row.size("cp") > 1 else None
    return row.layers, row.experts, row.routed, row.data_ranks, row.size("pp") > 1, shared


@cache
def _expect(layout: str, micros: int, targets: str, packed: bool, count: int) -> Expected:
    row = ALL[layout]
    steps = [global_batch(row, micros, targets, packed, step) for step in range(count)]
    start = {name: p.detach() for name, p in _model(row).named_parameters()}
    training = {name: _train(row, steps, name) for name in BUILDERS}
    counts = [sum(int((b["labels"] != -100).sum()) for b in batches) for batches in steps]
    rows = [sum(b.shape[0] for b in batches) for batches in steps]
    return Expected(start, training, counts, rows)


def _model(row: Row) -> nn.Module:
    model = build_model(row)
    compute_densely(model)
    return model


def _train(row: Row, steps: list[list[TensorDict]], name: str) -> Training:
    model = _model(row).double()
    optimizer = BUILDERS[name](model, fused=False)
    losses, norms, first = [], [], ({}, [], {})
    for step, batches in enumerate(steps):
        gradients, loss, chosen = _gradients(model, batches)
        if step == 0:
            first = {name: gradient.clone() for name, gradient in gradients.items()}, *chosen
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        losses.append(float(loss))
        assert norms[-1] > MAX_NORM, "clipping has to bite"
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULES[name](step)
        optimizer.step()
        follow(model)
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    return Training(parameters, losses, norms, balance_of(model), *first)


def _gradients(
    model: nn.Module, batches: list[TensorDict]
) -> tuple[dict[str, Tensor], Tensor, Chosen]:
    if getattr(model, "spec", None) and model.spec.moe is not None:
        return gradients_with_terms(model, batches)
    return *reference_gradients(model, [batches]), ([], {})
