"""Adapters that are merged for good and start again."""

from __future__ import annotations

import pytest
import torch
from adapted import batches_of, build, loss_fn, move
from lab import alone, full_tensors, is_kept, lay_out, relative_error
from pool import run_again

import forgekit as fk
from forgekit.lora import relora

IDS = torch.arange(20).reshape(2, 10)


STEP = fk.make_step(loss_fn, schedule=fk.constant(0.01))
BATCHES = [row[0] for row in batches_of(1)]


def train(rank=0, world=1):
    """Parameters after three steps, with new adapters after the second."""
    state = lay_out(build("dense")) if world > 1 else alone(build("dense"))
    batches = [batch for row in batches_of(2) for batch in row][rank::world]
    for _ in range(3):
        state, _ = STEP(state, batches)
        state = relora(state, every=2)
    return full_tensors(state.model)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_merge_for_good_changes_no_logits_and_starts_anew(kind):
    model = move(build(kind))
    state = alone(model)
    with pytest.raises(ValueError, match="every 0 must be at least 1"):
        relora(state, every=0)
    for _ in range(2):
        state, _ = STEP(state, BATCHES)
    before, logits, old = full_tensors(model), model(IDS), state
    state = relora(state, every=3)
    assert is_kept(model, before)
    assert len(state.optimizer.state) == sum("lora_" in name for name in before)
    with pytest.raises(fk.DonatedStateError, match="was donated"):
        _ = old.step
    state = relora(state, every=2)
    assert (state.step, len(state.optimizer.state)) == (2, 0)
    assert torch.allclose(model(IDS), logits, rtol=0, atol=1e-12)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            assert not parameter.any()
        elif name.endswith("lora_A"):
            assert not torch.isclose(parameter, before[name]).any()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    adapted = {n.replace("lora_A", "weight") for n in before if n.endswith(".lora_A")}
    assert adapted <= changed
    first = model.layers[0].attention.query.lora_A.detach().clone()
    state, _ = STEP(state, BATCHES)
    relora(state, every=3)
    assert not torch.isclose(model.layers[0].attention.query.lora_A, first).any()


@pytest.mark.parametrize(("rule", "share"), [(fk.EMA(0.9), 0.1), (fk.UniformAverage(1), 1.0)])
def test_the_average_of_the_weights_begins_again_with_the_new_adapters(rule, share):
    """What it held were factors whose product is in the base by then."""
    model = move(build("dense"))
    state = fk.TrainState.create(model, fk.adamw(model), average=rule)
    for _ in range(4):
        state, _ = STEP(state, BATCHES)
    state = relora(state, every=4)
    expected = model(IDS)
    with fk.averaged(state):
        assert torch.allclose(model(IDS), expected, rtol=0, atol=1e-12)
    before = full_tensors(model)
    state, _ = STEP(state, BATCHES)
    after = full_tensors(model)
    with fk.averaged(state):
        for name, parameter in model.named_parameters():
            mean = torch.lerp(before[name], after[name], share)
            assert torch.allclose(parameter, mean, rtol=0, atol=1e-14), name
    assert any((after[n] - p).abs().max() > 1e-3 for n, p in before.items())


def test_every_layout_starts_the_same_adapters():
    assert relative_error(run_again(train, 2)[0], train()) < 1e-9
