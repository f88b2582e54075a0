"""Faults of optimizers, schedules and averages, over several steps of AdamW."""

from __future__ import annotations

from typing import Any

import torch
from distributed import models
from faults.planting import function, value
from faults.table import Check, Fault, judge_numbers
from faults.training import training
from lab import SPEC, full_tensors, global_batch, logits_loss

import forgekit as fk

DECAY, BOUND = 0.7, 1e-12
USER: dict[str, Any] = {"after_step": lambda state, before: state}


def _average(rank: int, world: int) -> dict[str, float]:
    """An EMA beside its formula, in float64 over the weights after each step."""
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    model = fk.parallelize(fk.Transformer(SPEC).double(), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh, average=fk.EMA(DECAY))
    step = fk.make_step(logits_loss, schedule=fk.constant(0.05))
    expected = full_tensors(model)
    for number in range(3):
        before = {n: v.clone() for n, v in state.average.values.items()}
        state, _ = step(state, [row[rank] for row in global_batch(world, seed=number)])
        state = USER["after_step"](state, before)
        for name, weight in full_tensors(state.model).items():
            expected[name].lerp_(weight, 1 - DECAY)
    with fk.averaged(state):
        average = full_tensors(state.model)
    errors = [(average[n] - e).abs().max() / e.abs().max() for n, e in expected.items()]
    return {"average": float(max(errors)) / BOUND}


def _stale(state: fk.TrainState, before: Any) -> fk.TrainState:
    for name, values in state.average.values.items():
        values.copy_(before[name])
    return state


def _rounded(state: fk.TrainState, _before: Any) -> fk.TrainState:
    for values in state.average.values.values():
        values.copy_(values.bfloat16())
    return state


def _with_optimizer(**changes: Any) -> Any:
    def adamw(model: Any, fused: bool = True) -> Any:
        options = {"lr": 0.0, "eps": 1e-3, "weight_decay": 0.1, "fused": fused} | changes
        return torch.optim.AdamW(model.parameters(), **options)

    return value(models.BUILDERS, "adamw", adamw)


def _forget(update: Any, state: fk.TrainState, *args: Any, **options: Any) -> Any:
    """What an optimizer that is built again in each step does."""
    state.optimizer.state.clear()
    return update(state, *args, **options)


def _half_rate(update: Any, state: fk.TrainState, *args: Any, **options: Any) -> Any:
    return update(state, *args, **options | {"lr": options["lr"] / 2})


def _late(step: int, schedule: Any = models.SCHEDULES["adamw"]) -> float:
    return schedule(max(step - 1, 0))


ADAMW, MOVED = "fsdp2 fp64 3 steps", "adamw moved"
CHECKS = training(["fsdp2"], "fp64", steps=3)
CHECKS["average"] = Check(measure=_average, judge=judge_numbers)
LATE = value(models.SCHEDULES, "adamw", _late)
FAULTS = [
    Fault("a stale average", "average", value(USER, "after_step", _stale), "average"),
    Fault("no weight decay", ADAMW, _with_optimizer(weight_decay=0.0), MOVED),
    Fault("another beta", ADAMW, _with_optimizer(betas=(0.9, 0.99)), MOVED),
    Fault("another epsilon", ADAMW, _with_optimizer(eps=1e-8), MOVED),
    Fault("moments forgotten", ADAMW, function("update", _forget), MOVED),
    Fault("half of the rate", ADAMW, function("update", _half_rate), MOVED),
    Fault("a schedule that begins a step late", ADAMW, LATE, MOVED),
    Fault("an average in bfloat16", "average", value(USER, "after_step", _rounded), "average"),
]
