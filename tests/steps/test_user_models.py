"""The step on models and habits that are not ours: what users bring must not break the gradient."""

from __future__ import annotations

import pytest
import torch
from lab import (
    SPEC,
    build_state,
    full_tensors,
    global_batch,
    is_kept,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from pool import on_ranks
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import fully_shard

import forgekit as fk


def _batches(rank, world, seed=0):
    return [row[rank] for row in global_batch(world, seed=seed)]


@on_ranks(2)
def test_a_model_that_the_user_wrapped_in_fsdp_sums_too(rank, world):
    mesh = fk.build_mesh(device="cpu")
    model = fully_shard(fk.Transformer(SPEC).double(), mesh=mesh["dp_shard"])
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(world))
    found = mean_gradients(state, _batches(rank, world), logits_loss)
    assert relative_error(found, expected) < 1e-10


def test_the_first_step_of_fused_momentum_may_be_bad():
    """The buffer is made from unwritten memory, and a skip leaves it so."""
    results, step = [], fk.make_step(logits_loss, schedule=fk.constant(0.1))
    for fused in (True, False):
        model = fk.Transformer(SPEC)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, fused=fused)
        state = fk.TrainState.create(model, optimizer)
        for kind in ("no_targets", "ragged", "ragged", "ragged"):
            state, _ = step(state, [row[0] for row in global_batch(1, kind)])
        results.append(full_tensors(state.model))
    assert relative_error(*results) < 1e-6


@on_ranks(2, timeout_s=20)
def test_a_metric_that_is_lost_on_one_rank_is_refused_on_all(rank, world):
    state = build_state({}, world)

    def loss_fn(model, batch):
        loss = logits_loss(model, batch)
        return loss if rank == state.step == 1 else loss.with_metrics(extra=(1.0, 1))

    step = fk.make_step(loss_fn, schedule=fk.constant(0.1))
    state, _ = step(state, _batches(rank, world))
    before = full_tensors(state.model)
    match = r"changed: missing \['metrics.extra.count'"
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match=match) as raised:
        step(state, _batches(rank, world))
    assert rank == 1 or "the step failed on rank 1" in str(raised.value)
    assert is_kept(state.model, before)


@on_ranks(2)
def test_ranks_with_different_numbers_of_rows_are_refused(rank, world):
    state = build_state({}, world)
    batches = [batch[: 1 + rank] for batch in _batches(rank, world)]
    with pytest.raises(ValueError, match=r"rank 1 counts 12 samples in a step, rank 0 6"):
        fk.reduce_totals(fk.accumulate(state, batches, logits_loss), state)


class _Lying(list):
    length: int

    def __len__(self):
        return self.length


@pytest.mark.parametrize("sync", ["last", "hsdp_last"])
@on_ranks(2)
def test_a_length_that_is_not_kept_changes_no_gradient(rank, world, sync):
    found = []
    for length in (2, 3, 4):
        state, batches = build_state({}, world), _Lying(_batches(rank, world))
        batches.length = length
        fk.accumulate(state, batches, logits_loss, sync=sync)
        found.append(full_tensors(state.model, gradients=True))
    assert max(relative_error(one, found[1]) for one in found) < 1e-6


def test_counting_ahead_keeps_what_padding_counts():
    rows = [TensorDict(dict.fromkeys(("input_ids", "labels"), torch.arange(4)), [])] * 5
    state, samples = build_state({}, 1), []
    for group in fk.groups(fk.make_loader(rows, batch_size=2, epochs=1), 2):
        batches, _ = fk.count_ahead(state, group, {"rows": len})
        samples.append(fk.accumulate(state, batches, logits_loss).samples)
    assert samples == [4, 1]


def test_sixteen_bit_parameters_keep_a_factor_near_one():
    model = nn.Linear(64, 1, bias=False).bfloat16()
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), loss_scale=1.0)
    gradient = torch.linspace(0.5, 1.5, 64).bfloat16()[None]
    model.weight.grad = gradient.clone()
    before = model.weight.detach().clone()
    totals = fk.Totals.of(targets=1.0, loss=1.0, grad_sq=0.0, loss_scale=1.0)
    correction = fk.clip(totals)._replace(factor=torch.tensor(0.999, dtype=torch.float64))
    fk.update(state, correction, lr=0.0, totals=totals)
    assert torch.equal(model.weight.grad, (gradient.float() * 0.999).bfloat16())
    assert torch.equal(model.weight, before)
