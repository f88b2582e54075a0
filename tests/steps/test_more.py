"""A step in several calls of ``accumulate``: gradients held back, totals that go on."""

from __future__ import annotations

import attrs
import pytest
import torch
from lab import SPEC, alone, full, global_batch, lay_out, logits_loss
from pool import run_again
from tensordict import TensorDict
from torch import Tensor

import forgekit as fk

EVEN = attrs.evolve(SPEC, vocab_size=40, dim=48, heads=4, dropout=0.3)
EXPERTS = fk.MoESpec(experts=4, top_k=2, ffn_dim=24, aux_loss=0.1, bias_rate=0.01)
CUTS = ((1, 2), (2, 1), (1, 1, 1))


def _loss(model, batch) -> fk.Loss:
    loss = logits_loss(model, batch)
    return loss.with_metrics(largest=(loss.sum.detach() / 3, 1))


def _state(layout, rank, world, *, dtype=torch.float32, moe=None, **options) -> fk.TrainState:
    model = fk.Transformer(attrs.evolve(EVEN, moe=moe)).to(dtype)
    return alone(model) if world == 1 else lay_out(model, layout, **options)


def _batches(state, micro_batches: int = 3) -> list[TensorDict]:
    """Of 16 positions, which ranks can share; ragged numbers of targets."""
    reader, readers = fk.data_ranks(state.mesh)
    return [global_batch(readers, seed=seed)[1][reader] for seed in range(micro_batches)]


def _results(state, totals) -> dict[str, Tensor]:
    """Everything of a step that is not yet updated."""
    totals = fk.reduce_totals(totals, state)
    gradients = {name: full(p.grad) for name, p in state.model.named_parameters()}
    sums = {f"sum {key}": value for key, value in totals.sums.items(True, True)}
    return {**gradients, **sums, "samples": torch.tensor(totals.samples)}


def _in_calls(state, cut, *, more: bool, sync="last") -> fk.Totals:
    batches, totals = iter(_batches(state, sum(cut))), None
    for call, size in enumerate(cut):
        part = [next(batches) for _ in range(size)]
        goes_on = more and call < len(cut) - 1
        totals = fk.accumulate(state, part, _loss, sync=sync, more=goes_on, onto=totals)
        if call < len(cut) - 1:  # as rollouts do between two calls
            torch.rand(5)
            with torch.no_grad():
                if state.layout.stages is None:
                    state.model(torch.zeros(1, 16, dtype=torch.long))
    assert totals is not None
    return totals


def _compare(rank, world, layout, cuts, options):
    sync = options.pop("sync", "last")
    exact = _state(layout, rank, world, **options)
    whole = _results(exact, fk.accumulate(exact, _batches(exact), _loss, sync=sync))
    assert len(whole) > 20
    for cut in cuts:
        state = _state(layout, rank, world, **options)
        here = _results(state, _in_calls(state, cut, more=True, sync=sync))
        assert here.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(here[name], value), f"{name} in calls of {cut}"
        if "precision" in options:
            continue
        wide = _state(layout, rank, world, dtype=torch.float64, **options)
        wanted = _results(wide, fk.accumulate(wide, _batches(wide), _loss, sync=sync))
        state = _state(layout, rank, world, dtype=torch.float64, **options)
        here = _results(state, _in_calls(state, cut, more=False, sync=sync))
        for name, value in wanted.items():
            torch.testing.assert_close(here[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
def test_several_calls_are_one_to_the_bit_on_one_process(moe):
    _compare(0, 1, {}, CUTS, {"moe": moe})


CELLS = {
    "fsdp2": (2, {"dp_shard": 2}, {}),
    "fsdp2 bf16": (2, {"dp_shard": 2}, {"precision": "bf16"}),
    "fsdp2 every": (2, {"dp_shard": 2}, {"sync": "every"}),
    "hsdp4": (4, {"dp_replicate": 2, "dp_shard": 2}, {"sync": "hsdp_last"}),
    "tp2": (2, {"tp": 2}, {}),
    "cp2": (2, {"cp": 2}, {}),
    "ep2": (2, {"dp_shard": 2, "ep": 2}, {"moe": EXPERTS}),
}


@pytest.mark.parametrize("cell", CELLS)
def test_several_calls_are_one_to_the_bit_in_layouts(cell):
    world, layout, options = CELLS[cell]
    run_again(_compare, world, layout, CUTS[:1], options)


@pytest.mark.parametrize(("world", "schedule"), [(4, "1f1b"), (2, "zbv")])
def test_several_calls_are_one_to_the_bit_through_pipelines(world, schedule):
    run_again(_compare_staged, world, schedule)


def _compare_staged(rank, world, schedule):
    layout, results = {"pp": 2, "dp_shard": world // 2}, []
    for cut in ((4,), (2, 2)):
        model = fk.Transformer(attrs.evolve(EVEN, layers=4))
        state = lay_out(model, layout, pipeline_schedule=schedule)
        results.append(_results(state, _in_calls(state, cut, more=True)))
    whole, parts = results
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name


def _held(state) -> fk.Totals:
    return fk.accumulate(state, _batches(state)[:1], _loss, more=True)


def _refusals(rank, world, layout):
    state = _state(layout, rank, world)
    with pytest.raises((ValueError, RuntimeError), match="more=True"):
        fk.reduce_totals(_held(state), state)

    def fail(model, batch):
        raise KeyError("reward")

    held = _held(state)
    with pytest.raises(KeyError, match="reward"):
        fk.accumulate(state, _batches(state)[1:], fail, onto=held)
    assert not any(p.grad is not None for p in state.model.parameters())
    with pytest.raises(ValueError, match="onto"):
        fk.accumulate(state, _batches(state)[1:], _loss, onto=held)
    held = _held(state)
    fk.accumulate(state, _batches(state)[:1], _loss)  # clears
    with pytest.raises(ValueError, match="onto"):
        fk.accumulate(state, _batches(state)[1:], _loss, onto=held)
    assert not any(p.grad is not None for p in state.model.parameters())
    held = _held(state)
    for parameter in state.model.parameters():  # which frees them: none is left to compare
        parameter.grad = None
    if world == 1:  # FSDP holds gradients back elsewhere
        with pytest.raises(ValueError, match="onto"):
            fk.accumulate(state, _batches(state)[1:], _loss, onto=held)
    done = fk.reduce_totals(fk.accumulate(state, _batches(state), _loss), state)
    with pytest.raises(ValueError, match="onto"):
        fk.accumulate(state, _batches(state), _loss, onto=done)
    # After all of that a step is what it always is.
    fresh = _state(layout, rank, world)
    wanted = _results(fresh, fk.accumulate(fresh, _batches(fresh), _loss))
    here = _results(state, fk.accumulate(state, _batches(state), _loss))
    assert all(torch.equal(here[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"dp_shard": 2})])
def test_totals_that_cannot_go_on_are_refused(world, layout):
    if world == 1:
        _refusals(0, 1, layout)
    else:
        run_again(_refusals, world, layout)


def test_a_step_of_two_calls_trains_as_one():
    """Update, and go on with the next step."""
    whole, parts = _state({}, 0, 1), _state({}, 0, 1)
    step = fk.make_step(_loss, schedule=fk.constant(0.01))
    for _ in range(2):
        batches = _batches(whole)
        whole, _ = step(whole, batches)
        totals = fk.accumulate(parts, batches[:2], _loss, more=True)
        totals = fk.accumulate(parts, batches[2:], _loss, onto=totals)
        totals = fk.reduce_totals(totals, parts)
        correction = fk.clip(totals, max_norm=1.0)
        parts = fk.update(parts, correction, lr=0.01, totals=totals)
    assert whole.samples == parts.samples
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        assert torch.equal(a, b)
