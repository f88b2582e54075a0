"""Adapters that are merged for good and start again."""

from __future__ import annotations

import pytest
import torch
from adapted import batches_of, build, loss_fn, move
from lab import full
from pool import run_again

import forgekit as fk
from forgekit.run import relora

IDS = torch.arange(20).reshape(2, 10)


def train(kind, steps, every, mesh=None, turn=0, ranks=1):
    model = build(kind) if mesh is None else fk.parallelize(build(kind), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(loss_fn, schedule=fk.constant(0.01))
    batches = [batch for row in batches_of(2) for batch in row][turn::ranks]
    for _ in range(steps):
        state, _ = step(state, batches)
        state = relora(state, every=every)
    return state


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_merge_for_good_changes_no_logits_and_starts_anew(kind):
    model = move(build(kind))
    state = fk.TrainState.create(model, fk.adamw(model))
    step = fk.make_step(loss_fn, schedule=fk.constant(0.01))
    with pytest.raises(ValueError, match="every 0 must be at least 1"):
        relora(state, every=0)
    for _ in range(2):
        state, _ = step(state, [row[0] for row in batches_of(1)])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    logits, old = model(IDS), state
    state = relora(state, every=3)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
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
    first = dict(model.named_parameters())["layers.0.attention.query.lora_A"].detach().clone()
    state, _ = step(state, [row[0] for row in batches_of(1)])
    relora(state, every=3)
    again = dict(model.named_parameters())["layers.0.attention.query.lora_A"]
    assert not torch.isclose(again, first).any()


@pytest.mark.parametrize(("rule", "share"), [(fk.EMA(0.9), 0.1), (fk.UniformAverage(1), 1.0)])
def test_the_average_of_the_weights_begins_again_with_the_new_adapters(rule, share):
    """What it held were factors whose product is in the base by then."""
    model = move(build("dense"))
    state = fk.TrainState.create(model, fk.adamw(model), average=rule)
    step = fk.make_step(loss_fn, schedule=fk.constant(0.01))
    batches = [row[0] for row in batches_of(1)]
    for _ in range(4):
        state, _ = step(state, batches)
    state = relora(state, every=4)
    expected = model(IDS)
    with fk.averaged(state):
        assert torch.allclose(model(IDS), expected, rtol=0, atol=1e-12)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    state, _ = step(state, batches)
    after = {n: p.detach().clone() for n, p in model.named_parameters()}
    with fk.averaged(state):
        for name, parameter in model.named_parameters():
            mean = torch.lerp(before[name], after[name], share)
            assert torch.allclose(parameter, mean, rtol=0, atol=1e-14), name
    assert any((after[n] - p).abs().max() > 1e-3 for n, p in before.items())


def sharded(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=2), device="cpu")
    state = train("dense", 3, 2, mesh, rank, world)
    return {n: full(p).detach() for n, p in state.model.named_parameters()}


def test_every_layout_starts_the_same_adapters():
    expected = {n: p.detach() for n, p in train("dense", 3, 2).model.named_parameters()}
    found = run_again(sharded, 2)[0]
    worst = max(float((found[n] - expected[n]).abs().max()) for n in expected)
    assert worst < 1e-9
