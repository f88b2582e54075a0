"""Numbers of targets: counted once in every layout, exactly, and by labels that can hold them."""

from __future__ import annotations

import math
from functools import partial

import attrs
import pytest
import torch
from covering import in_turn
from lab import MICRO_BATCHES, SPEC, build_state, full_tensors, global_batch, is_kept, lay_out
from pool import run_again, run_ranks

import forgekit as fk

NAN = math.nan
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "hsdp2": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "tp2, fsdp2": (4, {"tp": 2, "dp_shard": 2}),
    "cp2, pp2": (4, {"cp": 2, "pp": 2}),
}


def _count_ahead(rank, world, layout):
    state = lay_out(fk.Transformer(attrs.evolve(SPEC, vocab_size=40)), layout)
    row, rows = fk.data_ranks(state.mesh)
    batches = [everyone[row] for everyone in global_batch(rows)]
    counters = {"labels": lambda b: (b["labels"] != -100).sum(), "thirds": lambda b: len(b) / 3}
    pulled, counts = fk.count_ahead(state, iter(batches), counters)
    return len(pulled), rows, {name: count.item() for name, count in counts.items()}


@pytest.mark.parametrize(("world", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_counted_ahead_is_counted_once_in_every_layout(world, layout):
    for pulled, rows, counts in run_again(_count_ahead, world, layout):
        flat = [batch for row in global_batch(rows) for batch in row]
        assert pulled == MICRO_BATCHES
        assert counts["labels"] == sum(int((batch["labels"] != -100).sum()) for batch in flat)
        assert counts["thirds"] == pytest.approx(len(flat) * 2 / 3, rel=1e-15)


# A mean that is weighted by its targets


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2049, torch.tensor(70_001)])
def test_with_mean_of_sixteen_bits_keeps_the_whole_count(dtype, count):
    """2,049 is no number of 11 bits, and float16 ends at 65,504."""
    aux = torch.tensor(0.75, dtype=dtype, requires_grad=True)
    base = fk.Loss(torch.tensor(5.0), count)
    loss = base.with_mean(aux, weight=0.5)
    assert loss.sum.dtype == torch.float32
    assert loss.sum.item() == torch.tensor(5.0 + 0.375 * int(count)).item()
    assert loss.count is base.count


# Counts that no step can divide by


def _per_gate(model, batch):
    """A loss over what a gate lets in, its count with a gradient of its own."""
    logits = model(batch["input_ids"])
    return fk.Loss(logits.square().sum(), logits[..., 0].sigmoid().sum())


def _gated(rank, world, layout):
    state = build_state(layout, world)
    batches = [row[0] for row in global_batch(1)]
    batches = [batches[1]] * 2  # of one shape
    before = full_tensors(state.model)
    message = "count that carries a gradient|raised before|stage 1 of the pipeline"
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        fk.accumulate(state, batches, _per_gate)
    assert is_kept(state.model, before)
    assert all(p.grad is None for p in state.model.parameters())
    return str(caught.value)


@pytest.mark.parametrize(("world", "layout"), [(1, {}), (2, {"dp_shard": 2}), (2, {"pp": 2})])
def test_a_count_with_a_gradient_is_refused_on_every_rank(world, layout):
    """The step divides by a number: what the count's own gradient asks for would be dropped."""
    for message in run_ranks(_gated, world, layout):
        assert "count that carries a gradient" in message


WRONG_COUNTS = {"all below zero": (-3.0, -3.0), "one below zero": (40.0, -1.0), "nan": (9.0, NAN)}


def _counted(as_number, model, batch):
    loss, counts = fk.cross_entropy(model(batch["input_ids"]), batch["labels"]), batch["counts"]
    return fk.Loss(loss.sum, float(counts[0]) if as_number else counts[0])


def _wrong_count(rank, world, layout, counts):
    """A wrong count in the rows of the first data-parallel rank alone."""
    state = build_state(layout, world)
    data = fk.data_ranks(state.mesh)[0]
    batches = [global_batch(1, seed=data)[1][0] for _ in counts]
    for batch, count in zip(batches, (5.0, 5.0) if data else counts, strict=True):
        batch["counts"] = torch.full(batch.batch_size, count)
    before = full_tensors(state.model)
    loss_fn = partial(_counted, world == 1)
    # No loss over such counts is a sum over positions, which an audit would say.
    step = fk.make_step(loss_fn, schedule=fk.constant(0.1), audit="cp" not in layout)
    state, metrics = step(state, batches)
    assert is_kept(state.model, before)
    return float(metrics["skipped"]), int(state.targets), int(state.skipped)


COUNTED = [(1, {}), (2, {"dp_shard": 2}), (2, {"cp": 2}), (2, {"pp": 2})]


@pytest.mark.parametrize(("name", "sizes"), in_turn(list(WRONG_COUNTS), COUNTED))
def test_a_step_with_a_count_below_zero_is_a_bad_one_on_every_rank(name, sizes):
    """Also where the other counts make the sum a positive one."""
    world, layout = sizes
    found = run_again(_wrong_count, world, layout, WRONG_COUNTS[name])
    assert found == [(1.0, 0, 1)] * world


# Labels that cannot hold what they have to


UNFIT = [(torch.float32, 10), (torch.bool, 10), (torch.uint8, 10), (torch.int16, 50257)]


@pytest.mark.parametrize(("dtype", "vocab"), UNFIT, ids=str)
def test_labels_that_cannot_be_right_are_refused(dtype, vocab):
    hidden, weight, labels = torch.zeros(1, 3, 2), torch.zeros(vocab, 2), torch.zeros(1, 3)
    message = rf"^labels are {dtype}, which cannot hold -100 and every id up to {vocab - 1}"
    with pytest.raises(TypeError, match=message):
        fk.linear_cross_entropy(hidden, weight, labels.to(dtype))
    with pytest.raises(TypeError, match=message):
        fk.cross_entropy(hidden @ weight.T, labels.to(dtype))
    fk.linear_cross_entropy(hidden, torch.zeros(128, 2), labels.to(torch.int8))
