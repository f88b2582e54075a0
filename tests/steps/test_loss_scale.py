"""The loss scale of float16: it follows overflows on the device and never touches the gradient."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
from covering import first_of, in_turn
from lab import (
    SPEC,
    full_tensors,
    global_batch,
    host_reads,
    lay_out,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from pool import run_again
from saved import everything
from torch import nn

import forgekit as fk

LAYOUTS = [(1, {}), (2, {}), (4, {"dp_replicate": 2, "dp_shard": 2})]
HUGE = 2.0**18


@pytest.fixture
def mesh():
    yield fk.build_mesh(device="cpu")
    fk.shutdown()


def _state(sizes, precision="fp16", optimizer=fk.adamw, **options):
    state = lay_out(fk.Transformer(SPEC), sizes, optimizer, precision=precision)
    return attrs.evolve(state, **{name: torch.tensor(value) for name, value in options.items()})


def _batches(world, rank, kind="ragged", seed=0):
    return [row[rank] for row in global_batch(world, kind, seed)]


def _parts(state, batches, **options):
    """A step written out, with its options of ``update``."""
    totals = fk.reduce_totals(fk.accumulate(state, batches, logits_loss), state)
    return fk.update(state, fk.clip(totals, 1.0), lr=0.01, totals=totals, **options)


# Overflow


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _overflow(rank, world, sizes, optimizer):
    """A good step, as many bad ones as the scale is too large, and a good one again."""
    state = _state(sizes, optimizer=optimizer, loss_scale=1.0)
    state = _parts(state, _batches(world, rank))
    state = attrs.evolve(state, loss_scale=torch.tensor(HUGE), good_steps=torch.tensor(5))
    before, seen = everything(state), []
    while True:
        state = _parts(state, _batches(world, rank, seed=1))
        after = everything(state)
        untouched = all(after[name].equal(value) for name, value in before.items() if "." in name)
        seen.append(
            (untouched, *(after[n].item() for n in ("loss_scale", "good_steps", "skipped")))
        )
        if not untouched:
            return seen, full_tensors(state.model)


SOME = first_of(
    [(LAYOUTS[0], fk.adamw), (LAYOUTS[1], _sgd)], itertools.product(LAYOUTS, [fk.adamw, _sgd])
)


@pytest.mark.parametrize(("layout", "optimizer"), SOME)
def test_overflows_change_nothing_and_halve_the_scale_until_a_step_is_good(layout, optimizer):
    world, sizes = layout
    results = run_again(_overflow, world, sizes, optimizer)
    seen, parameters = results[0]
    bad = len(seen) - 1
    assert 3 < bad < 20
    for step, numbers in enumerate(seen[:-1], start=1):
        assert numbers == (True, HUGE / 2**step, 0, step)
    assert seen[-1] == (False, HUGE / 2**bad, 1, 0)
    assert all(tensor.isfinite().all() for tensor in parameters.values())
    assert all(found == seen for found, _ in results)


# Growth


def _growth(rank, world, sizes):
    state = _state(sizes, loss_scale=2.0**-6)
    scales = []
    for seed in range(7):
        state = _parts(state, _batches(world, rank, seed=seed), growth_interval=3)
        scales.append((state.loss_scale.log2().item(), state.good_steps.item()))
    return scales


@pytest.mark.parametrize(("world", "sizes"), first_of(LAYOUTS[:1], LAYOUTS))
def test_good_steps_in_a_row_double_the_scale(world, sizes):
    expected = [(-6, 1), (-6, 2), (-5, 0), (-5, 1), (-5, 2), (-4, 0), (-4, 1)]
    assert run_again(_growth, world, sizes) == [expected] * world


def test_float16_starts_where_small_gradients_survive(mesh):
    state = _state({})
    assert state.loss_scale == 1.0
    around = nn.Sequential(state.model)  # as a user's wrapper
    assert fk.TrainState.create(around, fk.adamw(around), mesh=state.mesh).loss_scale == 1.0
    assert _state({}, "bf16").loss_scale == 2.0**-12


def test_the_scale_is_moved_without_a_host_read(mesh):
    state = _parts(_state({}), _batches(1, 0))
    totals = fk.reduce_totals(fk.accumulate(state, _batches(1, 0), logits_loss), state)
    with host_reads() as reads:
        state = fk.update(state, fk.clip(totals), lr=0.01, totals=totals, growth_interval=1)
    assert reads == []
    assert state.loss_scale == 2.0


# The gradient


def _gradients(rank, world, sizes, scale):
    state = _state(sizes, loss_scale=scale)
    gradients = mean_gradients(state, _batches(world, rank), logits_loss)
    return gradients, {t.dtype for t in (*state.model.parameters(), *gradients.values())}


@pytest.mark.parametrize(("layout", "scale"), in_turn(LAYOUTS, [2.0**-4, 1.0, 2.0**6]))
def test_the_gradient_is_right_at_every_scale_in_range(layout, scale):
    """Within the rounding of float16 (2**-11), and along the true one: no scale shortens it."""
    world, sizes = layout
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(world))
    for found, dtypes in run_again(_gradients, world, sizes, scale):
        assert dtypes == {torch.float32}
        assert relative_error(found, expected) < 4 * 2**-11
        along = sum((found[n].double() * expected[n]).sum() for n in expected)
        assert along / sum(g.square().sum() for g in expected.values()) == pytest.approx(
            1, abs=3e-4
        )
