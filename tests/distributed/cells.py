"""A job of the pool: one layout on its ranks, and in it any number of cells, one after another.

Every rank sends the whole of the tensors that it has a part of; ranks must send the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from distributed.batches import global_batch
from distributed.experts import balance_of
from distributed.matrix import Cell
from distributed.models import BUILDERS, LOSSES, MAX_NORM, SCHEDULES, build_model, prefer
from lab import full, lay_out
from pool import run_again
from torch import Tensor

import forgekit as fk

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.float32}
Found = dict[str, Any]


def run_layout(cells: Sequence[Cell]) -> list[Sequence[Found]]:
    """Run cells of one layout on its ranks; for each what every rank found, for ``merge``."""
    world, timeout_s = cells[0].row.world, 60 + 20 * len(cells)
    return [*zip(*run_again(run_cells, world, [*cells], timeout_s=timeout_s), strict=True)]


def run_cells(rank: int, world: int, cells: Sequence[Cell]) -> list[Found]:
    """One rank's part; a model is laid out once for the cells that compute alike."""
    models: dict[Any, LaidOut] = {}
    found = []
    for cell in cells:
        kind = cell.dtype, cell.recompute
        if kind not in models:
            models[kind] = LaidOut(cell)
        found.append(run_cell(cell, models[kind]))
    return found


class LaidOut:
    """A cell's model, built on meta and laid out, and what it started from."""

    def __init__(self, cell: Cell, device: str = "cpu", **options: Any) -> None:
        model = build_model(cell.row, device="meta").to(DTYPES[cell.dtype])
        options = {"activation_checkpoint": cell.recompute, **cell.row.options, **options}
        options["precision"] = "bf16" if cell.dtype == "bf16" else "fp32"
        sizes = {"dp_shard": 1, **cell.row.sizes}
        state = lay_out(model, sizes, BUILDERS["sgd"], device, **options)
        self.model, self.mesh = state.model, state.mesh
        if cell.row.routed:
            prefer(self.model)
        self.shards = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.start = self.send(self.shards)
        self.balance = {n: b.clone() for n, b in self.model.named_buffers()}

    def state(self, optimizer: Any) -> fk.TrainState:
        """A state at step 0, from the same parameters each time."""
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        with torch.no_grad():
            for name, tensor in (self.shards | self.balance).items():
                named[name].copy_(tensor)
        build = BUILDERS.get(optimizer, optimizer)
        return fk.TrainState.create(self.model, build(self.model), mesh=self.mesh)

    def send(self, tensors: Mapping[str, Tensor], factor: Any = 1) -> dict[str, Tensor]:
        """Whole tensors, times a factor."""
        return {name: (full(t.detach()) * factor).cpu() for name, t in tensors.items()}

    def send_parameters(self) -> dict[str, Tensor]:
        return self.send(dict(self.model.named_parameters()))


def own_batches(cell: Cell, mesh: Any, step: int) -> list[Any]:
    """The micro-batches of this data rank."""
    rank, ranks = fk.data_ranks(mesh)
    return global_batch(cell.row, cell.micros, cell.targets, cell.packed, step)[rank::ranks]


def run_cell(cell: Cell, laid_out: LaidOut) -> Found:
    """What this rank finds for a cell."""
    found = {"start": laid_out.start, "sgd": _by_parts(cell, laid_out)}
    found |= {key: found["sgd"].pop(key) for key in ("gradients", "counts")}
    found["sgd"]["parameters"] = laid_out.send_parameters()
    if "adamw" in cell.optimizers:
        found["adamw"] = _by_make_step(cell, laid_out.state("adamw"))
        found["adamw"]["parameters"] = laid_out.send_parameters()
    return found


def _by_parts(cell: Cell, laid_out: LaidOut) -> Found:
    """The step written out; gradients of the first step before they are clipped.

    Nothing is proved first if that is left to ``_by_make_step``, on the same model.
    """
    state, numbers, gradients, counts = laid_out.state("sgd"), [], {}, []
    audit = "adamw" not in cell.optimizers
    for step in range(cell.steps):
        mine = own_batches(cell, state.mesh, step)
        if audit and step == 0:
            fk.audit(state, mine[0], LOSSES[cell.loss])
        totals = fk.accumulate(state, mine, LOSSES[cell.loss])
        totals = fk.reduce_totals(totals, state)
        if step == 0:
            factor = fk.clip(totals).factor
            raw: Any = {name: p.grad for name, p in state.model.named_parameters()}
            gradients = laid_out.send(raw, factor)
            if cell.row.routed:
                counts = totals.sums["experts", "counts"].tolist()
        lr = SCHEDULES["sgd"](step)
        correction = fk.clip(totals, max_norm=MAX_NORM)
        state = fk.update(state, correction, lr=lr, totals=totals)
        metrics = fk.step_metrics(totals, correction, lr=lr)
        numbers.append({**_values(metrics), "factor": correction.factor.item()})
    found = {"gradients": gradients, "counts": counts, "numbers": numbers}
    return {**found, **_counters(state)}


def _by_make_step(cell: Cell, state: fk.TrainState) -> Found:
    sync = "hsdp_last" if cell.row.size("dp_replicate") > 1 else "every"
    schedule = SCHEDULES["adamw"]
    step = fk.make_step(LOSSES[cell.loss], schedule=schedule, max_norm=MAX_NORM, sync=sync)
    numbers = []
    for index in range(cell.steps):
        state, metrics = step(state, own_batches(cell, state.mesh, index))
        numbers.append(_values(metrics))
    return {"numbers": numbers, **_counters(state)}


def _values(metrics: Any) -> dict[str, float]:
    return {name: value.item() for name, value in metrics.items()}


def _counters(state: fk.TrainState) -> dict[str, Any]:
    counters = {"samples": state.samples, "targets": int(state.targets), "step": state.step}
    return {**counters, "balance": balance_of(state.model)}


def merge(by_rank: Sequence[Found], *, agree: bool = True) -> Found:
    """One answer from all ranks: of each name what the first rank has that has it.

    Args:
        by_rank: What each rank found.
        agree: Raise unless tensors and numbers are bitwise the same on every rank that has them.
    """
    keys = dict.fromkeys(key for found in by_rank for key in found)
    return {key: _merge_values([f[key] for f in by_rank if key in f], agree) for key in keys}


def _merge_values(values: list[Any], agree: bool) -> Any:
    if isinstance(values[0], dict):
        return merge(values, agree=agree)
    if isinstance(values[0], Tensor):  # by bytes: NaN is the same as NaN
        alike = [value.numpy().tobytes() == values[0].numpy().tobytes() for value in values]
        assert not agree or all(alike), "ranks hold different copies"
    else:
        assert not agree or all(value == values[0] for value in values), f"ranks differ: {values}"
    return values[0]
