"""What a step refuses at once: gradients that were never reduced, replicas that differ."""

from __future__ import annotations

import dataclasses
import math
import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from lab import (
    SPEC,
    alone,
    full_tensors,
    global_batch,
    is_kept,
    lay_out,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
    vectors,
    vectors_loss,
)
from pool import on_ranks, run_again
from tensordict import TensorDict
from torch import nn

import forgekit as fk
from forgekit.steps.audit.agreement import UnreducedError, check_replicas, digest_rows

WIDTH, CLASSES = 6, 5
PLAN = {"body": "colwise", "head": "rowwise"}
REPLICAS = {"dp_replicate": 2, "dp_shard": 1}


class _Model(nn.Module):
    """Counts in a buffer what it has seen, if it is told to, each rank its own."""

    def __init__(self, norm=None, counts_from=math.inf, is_kept=True):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm = norm or nn.Identity()
        self.counts_from, self.calls = counts_from, 0
        self.register_buffer("seen", torch.zeros(3, 2), persistent=is_kept)

    def forward(self, x):
        self.calls += 1
        if self.calls > self.counts_from:
            self.seen += x.mean()
        return self.head(self.norm(self.body(x)).tanh())


def _step(loss_fn=vectors_loss, **options):
    return fk.make_step(loss_fn, schedule=fk.constant(0.1), **options)


def _keeps(state, step, batches, error, match):
    """Whether a step raises and changes nothing."""
    before = full_tensors(state.model)
    with pytest.raises(error, match=match):
        step(state, batches)
    return is_kept(state.model, before)


def _skipping_loss(model, batch):
    if batch["labels"].eq(-100).all():
        return fk.Loss(torch.zeros((), dtype=torch.float64, requires_grad=True) * 1, 0)
    return vectors_loss(model, batch)


@pytest.mark.parametrize(
    ("steps_before", "sizes", "sync", "precision"),
    [(0, {}, "last", "fp32"), (1, {}, "last", "bf16"), (1, REPLICAS, "hsdp_last", "fp32")],
)
@on_ranks(2, keep=True)
def test_a_loss_that_skips_the_model_in_the_last_micro_batch_is_refused(
    rank, world, steps_before, sizes, sync, precision
):
    model = _Model().double() if precision == "fp32" else _Model()
    state, step = lay_out(model, sizes, precision=precision), _step(_skipping_loss, sync=sync)
    for _ in range(steps_before):
        state, _ = step(state, vectors(rank))
    batches = vectors(rank)
    batches[-1]["labels"][:] = -100
    assert _keeps(state, step, batches, UnreducedError, "Call the model for every micro-batch")
    state, metrics = step(state, vectors(rank, seed=1))  # nothing stale, nothing donated
    assert metrics["skipped"] == 0


@on_ranks(2, keep=True)
def test_a_loss_may_skip_the_model_in_the_first_micro_batch(rank, world):
    batches = vectors(rank)
    batches[0]["labels"][:] = -100
    found = mean_gradients(lay_out(_Model().double()), batches, _skipping_loss)
    rows = [vectors(at)[1] for at in range(world)]
    assert relative_error(found, reference_gradients(_Model(), [rows], vectors_loss)[0]) < 1e-12


CHANGES = {
    "values": lambda bias: bias.add_(1e-3),
    "every other value": lambda bias: bias[1].add_(1e-3),
    "signs": lambda bias: bias.neg_(),  # of the same norm
}
SLOPES = {"gradients": 1.5, "signs of gradients": -1.0}
"""By what the second rank multiplies its loss."""


@pytest.mark.parametrize("sizes", [{"dp_replicate": 2}, {"tp": 2}], ids=str)
@on_ranks(2, keep=True)
def test_replicas_that_differ_are_refused_on_every_rank(rank, world, sizes):
    plan, (along,) = PLAN if "tp" in sizes else None, sizes
    for name in (*CHANGES, *(SLOPES if plan else {})):
        state = lay_out(_Model().double(), {"dp_shard": 1, **sizes}, plan=plan)
        if rank and name in CHANGES:
            with torch.no_grad():
                CHANGES[name](state.model.head.bias.to_local())

        def scaled(model, batch, name=name):
            loss = vectors_loss(model, batch)
            return dataclasses.replace(loss, sum=loss.sum * SLOPES.get(name, 1.0) ** rank)

        before = full_tensors(state.model)
        kind = "gradients" if name in SLOPES else "values"
        message = (
            f"ranks 0 and 1 hold the same part of 'head.bias', but its {kind} differ .* along "
            f"{along}. Likely cause: .* Nothing was updated"
        )
        with pytest.raises(ValueError, match=message):
            fk.audit(state, vectors(0)[0], scaled)
        assert _keeps(state, _step(scaled), vectors(0), ValueError, message)
        # A loop that never asks is not stopped.
        fk.reduce_totals(fk.accumulate(state, vectors(0), scaled), state)
        assert is_kept(state.model, before)


@on_ranks(2, keep=True)
def test_replicas_are_compared_again_now_and_then(rank, world):
    """A first step that is not finite is a bad one and no difference; drift is seen later."""
    state, batches = lay_out(_Model().double(), REPLICAS), vectors(rank)
    if rank:
        batches[0]["x"][0, 0] = math.nan
    state, metrics = _step()(state, batches)
    assert metrics["skipped"] == 1
    state, _ = _step()(state, vectors(rank))
    check_replicas(state)
    if rank:
        with torch.no_grad():
            state.model.body.weight.to_local()[0, 0] += 1e-2
    with pytest.raises(ValueError, match=r"'body.weight', but its values differ .* dp_replicate"):
        check_replicas(state)


EVERYWHERE = {"body": "replicate", "norm": "replicate", "head": "replicate"}


@pytest.mark.parametrize(
    ("options", "sizes", "plan", "step", "name"),
    [
        ({"norm": nn.BatchNorm1d(WIDTH)}, {"dp_shard": 2}, None, 0, "norm.running_mean"),
        ({"counts_from": 3}, {"dp_shard": 2}, None, 2, "seen"),
        ({"counts_from": 0, "is_kept": False}, {"dp_shard": 2}, None, 2, None),
        ({"norm": nn.BatchNorm1d(WIDTH)}, {"tp": 2}, EVERYWHERE, 2, None),
    ],
    ids=["first step", "later", "no checkpoint keeps it", "same rows"],
)
@on_ranks(2, keep=True)
def test_buffers_that_ranks_update_apart_are_refused_on_every_rank(
    rank, world, options, sizes, plan, step, name
):
    state = lay_out(_Model(**options).double(), sizes, plan=plan)
    row, _ = fk.data_ranks(state.mesh)
    match = rf"(?s)'{name}', but its values differ.*Likely cause: a buffer that each rank updates"
    with pytest.raises(ValueError, match=match) if name else nullcontext():
        for _ in range(2):
            state, _ = _step()(state, vectors(row))
            check_replicas(state)
    assert state.step == step


@pytest.mark.parametrize("when", [0, 1])
@on_ranks(2, timeout_s=20)
def test_losses_whose_counts_differ_on_one_rank_are_refused_on_all(rank, world, when):
    """In the first step and in a later one."""
    state, more = lay_out(_Model().double()), []

    def two_losses(model, batch):
        loss = vectors_loss(model, batch)
        return loss + dataclasses.replace(loss, count=loss.count + sum(more))

    for index in range(when):
        state, _ = _step(two_losses)(state, vectors(rank, seed=index))
    more += [1] * rank
    told = "" if rank == when == 1 else ("^rank 1 ", "^the step failed on rank 1; ")[when]
    told += ".*cannot add losses with counts 2 and 3. Use loss.with_mean"
    errors = ValueError, RuntimeError
    assert _keeps(state, _step(two_losses), vectors(rank, seed=when), errors, told)
    with pytest.raises(ValueError, match=r"^rank 1 cannot add losses with counts 2 and 3"):
        fk.evaluate(state, vectors(rank, micros=1, seed=when), two_losses)


class _Drawing(_Model):
    """Draws from three generators, counts in a buffer and keeps what it has drawn."""

    def __init__(self):
        super().__init__(counts_from=0)
        self.drawn = []

    def forward(self, x):
        self.drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))  # noqa: NPY002
        return super().forward(x) * (1.0 + self.drawn[-1][0])


def _reports(rank, world, sizes):
    """What is compared in a layout, and what a first step trains with the audit and without."""
    left = []
    for audit in (False, True):
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002
        model = _Drawing().double()
        state = lay_out(model, {"dp_shard": 1, **sizes}, plan=PLAN if "tp" in sizes else None)
        # Rows alike, for the buffer.
        stream, numbers = iter(batches := vectors(0, micros=4)), torch.get_rng_state()
        report = fk.audit(state, batches[0], vectors_loss) if audit else None
        assert torch.equal(numbers, torch.get_rng_state())
        assert not any(p.grad is not None for p in model.parameters())
        assert torch.equal(model.seen, torch.zeros(3, 2, dtype=torch.float64))
        step = fk.make_step(vectors_loss, schedule=fk.constant(0.1), audit=audit)
        state, _ = step(state, stream)
        assert next(stream, None) is None
        assert fk.steps.audited(state, stream, vectors_loss) is stream  # once in a process
        drawn = torch.tensor(model.drawn[-4:])
        left.append({**full_tensors(model), "drawn": drawn, "seen": model.seen.clone()})
    plain, audited = left
    assert all(torch.equal(value, plain[name]) for name, value in audited.items())
    assert str(report).startswith("rows, step and seed (world): ")
    return {one.compared: (one.ranks, one.found) for one in report.findings}


REPORTED = {
    "fsdp": ({"dp_shard": 2}, {"modules": ("world", "1 in one order")}),
    "replicas": (REPLICAS, {"copies of parameters": ("world", "4 alike")}),
    "tp": ({"tp": 2}, {"tensor-parallel plan": ("tp", "2 modules")}),
}


@pytest.mark.parametrize("name", REPORTED)
def test_an_audit_reports_what_it_compared_and_leaves_the_step_as_it_is(name):
    sizes, expected = REPORTED[name]
    for found in run_again(_reports, 2, sizes):
        assert found.items() >= expected.items()
        assert found.keys() >= {"rows, step and seed", "modules", "gradients", "copies of buffers"}
        assert ("copies of gradients" in found) == (name != "fsdp")


def test_an_audit_of_one_process_compares_nothing_and_has_each_micro_batch_once():
    given, state = vectors(0, 3), alone(_Model().double())
    assert fk.audit(state, given[0], vectors_loss).findings == ()
    assert state.model.calls == 0
    for batches in (given, iter(given)):
        seen = fk.steps.audited(alone(_Model().double()), batches, vectors_loss)
        assert all(one is wanted for one, wanted in zip(seen, given, strict=True))


@on_ranks(2)
def test_ranks_whose_steps_have_other_options_are_refused(rank, world):
    apart = {
        "max_norm": {"max_norm": 1.0 + rank},
        "spikes": {"spikes": fk.SpikeLimit(6.0 + rank)},
        "learning rate": {"schedule": fk.constant(0.1 + rank)},
    }
    state = lay_out(_Model().double())
    for name, options in apart.items():
        step = fk.make_step(vectors_loss, **{"schedule": fk.constant(0.1), **options})
        assert _keeps(state, step, vectors(rank), ValueError, f"^ranks differ in {name}: ")


@on_ranks(2, keep=True)
def test_ranks_that_share_rows_and_bring_different_ones_are_refused(rank, world):
    state = lay_out(fk.Transformer(SPEC).double(), {"pp": 2})
    match = r"along pp only, .* forgekit.data_ranks\(mesh\)"
    assert _keeps(state, _step(logits_loss), [_tokens(rank), _tokens(2)], ValueError, match)
    _, metrics = _step(logits_loss)(state, [_tokens(2), _tokens(3)])
    assert metrics["skipped"] == 0


def test_a_digest_of_rows_tells_all_of_them():
    """Of the same bytes in another shape or dtype, too."""
    batch = _tokens(2)
    ids, labels = batch["input_ids"], batch["labels"]
    others = (ids.reshape(2, 8, 2), ids.view(torch.float64), ids + (ids == ids.max()))
    changed = [TensorDict({"input_ids": other, "labels": labels}, [2]) for other in others]
    changed += [TensorDict({"inputs": ids, "labels": labels}, [2]), TensorDict({"a": batch}, [2])]
    assert digest_rows(batch) == digest_rows(_tokens(2))
    assert len({*map(digest_rows, (batch, *changed))}) == 6


def _tokens(seed):
    return global_batch(1, seed=seed)[1][0]


@on_ranks(2)
def test_all_ranks_raise_where_the_loss_of_one_does_in_a_first_step(rank, world):
    """The second rank's loss raises before the model, behind it, and with rows that are none."""
    state = lay_out(_Model().double())

    def fails(model, batch, *, late):
        loss = vectors_loss(model, batch) if late or not rank else None
        if rank:
            raise KeyError("reward")
        return loss

    error, match = (KeyError, "reward") if rank else (ValueError, "rank 1 at an exc.*reward")
    for late in (False, True):
        assert _keeps(state, _step(partial(fails, late=late)), vectors(rank), error, match)
    with pytest.raises(TypeError, match=r"a micro-batch must be .*; got a dict"):
        fk.audit(state, dict(vectors(rank)[0]), vectors_loss)
    state, metrics = _step()(state, vectors(rank))
    assert metrics["skipped"] == 0
