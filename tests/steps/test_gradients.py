"""The gradient is the token-mean gradient of the global batch, in every data-parallel layout."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from covering import first_of, in_turn
from oracle import (
    KINDS,
    LOSSES,
    SPEC,
    build_state,
    full_tensors,
    global_batch,
    logits_loss,
    reference_gradients,
    reference_training,
    relative_error,
)
from ranks import run_again, run_ranks
from torch.distributed.fsdp import FSDPModule

import forgekit as fk

LAYOUTS = {
    "one process": (1, {}),
    "replicas 2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "fsdp 2": (2, {}),
    "fsdp 4": (4, {}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}
BOUNDS = {torch.float64: 1e-10, torch.float32: 5e-7}


def _gradients(rank, world, layout, kind, dtype, sync, loss):
    """One accumulate, reduce and clip; the corrected full gradients and the reported numbers."""
    state = build_state(layout, world, dtype=dtype)
    batches = [row[rank] for row in global_batch(world, kind)]
    totals = fk.accumulate(state, batches, LOSSES[loss], sync=sync)
    totals = fk.reduce_totals(totals, state)
    correction = fk.clip(totals)
    gradients = full_tensors(state.model, gradients=True)
    corrected = {name: g * correction.factor for name, g in gradients.items()}
    metrics = fk.step_metrics(totals, correction, lr=0.0)
    return corrected, {k: v.item() for k, v in metrics.items()}, totals.samples


def _run(world, *args):
    return run_again(_gradients, world, *args) if world > 1 else [_gradients(0, 1, *args)]


@pytest.mark.parametrize(
    ("layout", "kind", "sync", "dtype", "loss"),
    in_turn(list(LAYOUTS), KINDS, ("last", "every", "hsdp_last"), list(BOUNDS), list(LOSSES)),
)
def test_gradients_equal_one_process_in_float64(layout, kind, sync, dtype, loss):
    world, sizes = LAYOUTS[layout]
    batches = global_batch(world, kind)
    expected, expected_loss = reference_gradients(fk.Transformer(SPEC), batches)
    targets = sum(int((b["labels"] != -100).sum()) for row in batches for b in row)
    for found, metrics, samples in _run(world, sizes, kind, dtype, sync, loss):
        assert relative_error(found, expected) < BOUNDS[dtype]
        assert metrics["targets"] == targets
        assert samples == 3 * 2 * world
        assert metrics["skipped"] == (targets == 0)
        if targets:
            assert metrics["loss"] == pytest.approx(expected_loss.item(), rel=1e-6)
            norm = sum(g.square().sum() for g in expected.values()).sqrt().item()
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.0, eps=1e-3, weight_decay=0.1)


def _fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.0, eps=1e-3, weight_decay=0.1, fused=True)


def _train(rank, world, layout, build, sync, dtype=torch.float32, options=None):
    state = build_state(layout, world, build, dtype, **(options or {}))
    step = fk.make_step(logits_loss, schedule=_schedule, max_norm=0.5, sync=sync)
    for index in range(5):
        batches = [row[rank] for row in global_batch(world, seed=index)]
        state, _ = step(state, batches)
    return full_tensors(state.model)


_schedule = fk.warmup_cosine(peak=0.05, warmup=2, total=8)
CASES = {
    (_sgd, torch.float64): ("last", 1e-12),
    (_sgd, torch.float32): ("hsdp_last", 1e-6),
    (_fused_adamw, torch.float64): ("every", 1e-11),
    # AdamW divides by the root of the second moment and so magnifies rounding.
    (_fused_adamw, torch.float32): ("hsdp_last", 1e-5),
}


SOME = [("replicas 2", _fused_adamw, torch.float32), ("fsdp 2", _sgd, torch.float64)]
"""The others as cells of the oracle."""


@pytest.mark.parametrize(
    ("layout", "build", "dtype"),
    first_of(SOME, itertools.product(LAYOUTS, (_sgd, _fused_adamw), BOUNDS)),
)
def test_parameters_after_five_steps_equal_one_process_in_float64(layout, build, dtype):
    """Momentum, decay, schedule and clipping included (max_norm 0.5 bites in every step)."""
    world, sizes = LAYOUTS[layout]
    sync, bound = CASES[build, dtype]
    reference = _adamw if build is _fused_adamw else build
    expected = reference_training(reference, world, 5, _schedule, max_norm=0.5)
    args = (sizes, build, sync, dtype)
    results = run_again(_train, world, *args) if world > 1 else [_train(0, 1, *args)]
    for found in results:
        assert relative_error(found, expected) < bound


@pytest.mark.oracle
@pytest.mark.parametrize("layout", ["fsdp 2", "hsdp 2x2"])
@pytest.mark.parametrize("what", ["full", "selective"])
def test_recomputation_changes_nothing(layout, what):
    world, sizes = LAYOUTS[layout]
    plain, again = (
        run_again(
            _train, world, sizes, _sgd, "last", torch.float32, {"activation_checkpoint": name}
        )[0]
        for name in ("none", what)
    )
    assert relative_error(again, plain) < 1e-6


# Each of these is a fault that trainers have had; the oracle has to see it.


def _mean_per_micro_batch(model, batch):
    loss = logits_loss(model, batch)
    return fk.Loss(loss.sum / loss.count.clamp(min=1), 1)


def _divided_by_size(model, batch):
    loss = logits_loss(model, batch)
    return fk.Loss(loss.sum / batch["labels"].numel(), loss.count)


def _shifted_twice(model, batch):
    return fk.cross_entropy(model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:])


def _mutated(rank, world, mutation):
    loss = {"mean": _mean_per_micro_batch, "size": _divided_by_size, "shift": _shifted_twice}
    state = build_state({}, world, dtype=torch.float64)
    batches = [row[rank] for row in global_batch(world)]
    averages = mutation == "average"
    for module in state.model.modules() if averages else ():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(world))
    with patch("forgekit.parallel.fsdp.sum_gradients") if averages else nullcontext():
        totals = fk.accumulate(state, batches, loss.get(mutation, logits_loss))
    if mutation == "count per rank":
        with patch.object(dist, "all_reduce"):
            totals = fk.reduce_totals(totals, state)
    else:
        totals = fk.reduce_totals(totals, state)
    factor = fk.clip(totals).factor
    return {n: g * factor for n, g in full_tensors(state.model, gradients=True).items()}


@pytest.mark.parametrize("mutation", ["mean", "size", "shift", "average", "count per rank"])
def test_the_oracle_sees_a_broken_step(mutation):
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(2))
    found = run_ranks(_mutated, 2, mutation)[0]
    assert relative_error(found, expected) > 0.1


def test_the_oracle_passes_the_unbroken_step():
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(2))
    assert relative_error(run_ranks(_mutated, 2, "none")[0], expected) < 1e-10
