"""What a step promises beside its gradient: lazy, silent, undoable, indifferent to its scale."""

from __future__ import annotations

from itertools import product

import attrs
import pytest
import torch
from covering import first_of, in_turn
from lab import (
    SPEC,
    alone,
    build_state,
    full_tensors,
    global_batch,
    host_reads,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from pool import run_again, run_ranks
from saved import assert_same, everything
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule

import forgekit as fk

CONSTANT = fk.constant(0.01)


def _batches(world=1, rank=0, kind="ragged", seed=0):
    return [row[rank] for row in global_batch(world, kind, seed)]


# Loss scale and split


def _sgd(model):
    return torch.optim.SGD(model.parameters(), momentum=0.9)


@pytest.mark.parametrize("build", [fk.adamw, _sgd])
def test_parameters_are_bitwise_independent_of_the_loss_scale(build):
    results = []
    for exponent in (-30, 0, 17):
        model = fk.Transformer(SPEC)
        state = fk.TrainState.create(model, build(model), loss_scale=2.0**exponent)
        step = fk.make_step(logits_loss, schedule=CONSTANT, max_norm=0.5)
        for seed in range(3):
            state, metrics = step(state, _batches(seed=seed))
        results.append(full_tensors(state.model) | {"norm": metrics["grad_norm"]})
    for found in results[1:]:
        assert_same(found, results[0])


@pytest.mark.parametrize("rows", [[8], [1, 7], [1] * 8])
def test_gradient_does_not_depend_on_the_split(rows):
    ids = torch.randint(0, SPEC.vocab_size, (8, 11), generator=torch.Generator().manual_seed(1))
    labels = ids[:, 1:].clone()
    labels[2:5, 3:] = -100
    batch = TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [8])
    expected, _ = reference_gradients(fk.Transformer(SPEC), [[batch]])
    state = build_state({}, 1, dtype=torch.float64)
    found = mean_gradients(state, list(batch.split(rows)), logits_loss)
    assert relative_error(found, expected) < 1e-12


# Laziness


@pytest.mark.parametrize("sized", [True, False])
def test_batches_are_pulled_one_at_a_time(sized):
    """A rollout stream must not be drained before the first backward."""
    done = []

    class Stream(list):
        def __iter__(self):
            for index, batch in enumerate(super().__iter__()):
                assert len(done) >= index - (not sized)
                yield batch

    def loss_fn(model, batch):
        loss = logits_loss(model, batch)
        loss.sum.register_hook(lambda _: done.append(1))
        return loss

    stream = Stream(_batches())
    fk.accumulate(build_state({}, 1), stream if sized else iter(stream), loss_fn)
    assert len(done) == 3


# Host reads


def _by_source(batches):
    for batch in batches:
        batch["source"] = torch.arange(batch.shape[0]) % 2
    return batches


def _reads(build):
    """With everything that a step can report."""
    state, loss_fn = build_state({}, 1, build), fk.losses_by_source(logits_loss, ("code", "prose"))
    step = fk.make_step(loss_fn, schedule=CONSTANT, spikes=fk.SpikeLimit())
    state, _ = step(state, _by_source(_batches()))
    batches = _by_source(_batches(seed=1))
    with host_reads() as reads:
        step(state, batches)
    return reads


def test_a_step_with_a_fused_optimizer_reads_nothing_on_the_host():
    assert _reads(fk.adamw) == []
    assert _reads(_sgd)[0] == "__bool__"  # others cost one: the counter does count


# Bad steps


def _nan_where(is_bad):
    def loss_fn(model, batch):
        loss = logits_loss(model, batch)
        return fk.Loss(loss.sum * (float("nan") if is_bad else 1.0), loss.count)

    return loss_fn


def _infinite_gradient(model, batch):
    """A finite loss whose gradient is not: d/dx sqrt(x) at 0."""
    loss = logits_loss(model, batch)
    return fk.Loss(loss.sum + (model.norm.weight.sum() * 0.0).abs().sqrt(), loss.count)


def _bad_step(rank, world, build, what):
    state = build_state({}, world, build)
    step = fk.make_step(logits_loss, schedule=CONSTANT)
    state, _ = step(state, _batches(world, rank))
    before, rows = everything(state), state.samples
    losses = {
        "nan loss on one rank": _nan_where(rank == world - 1),
        "infinite gradient": _infinite_gradient,
        "no targets": logits_loss,
    }
    kind = "no_targets" if what == "no targets" else "ragged"
    bad = fk.make_step(losses[what], schedule=CONSTANT)
    for count in (1, 2):
        state, metrics = bad(state, _batches(world, rank, kind))
        assert metrics["skipped"] == 1
        changed = {"step": 1 + count, "samples": (1 + count) * rows, "skipped": count}
        assert_same(everything(state), before | {n: torch.tensor(v) for n, v in changed.items()})
    state, _ = step(state, _batches(world, rank, seed=1))
    after = everything(state)
    assert not all(after[n].equal(value) for n, value in before.items() if n.startswith("model."))
    return state.step, int(state.skipped), int(before["targets"])


def _plain_adamw(model):
    return torch.optim.AdamW(model.parameters(), foreach=False)


@pytest.mark.parametrize(
    ("world", "build", "what"),
    in_turn(
        [2, 1],
        [fk.adamw, _sgd, _plain_adamw],
        ["nan loss on one rank", "infinite gradient", "no targets"],
    ),
)
def test_a_bad_step_changes_nothing_on_any_rank(world, build, what):
    targets = sum(int((b["labels"] != -100).sum()) for row in global_batch(world) for b in row)
    for result in run_again(_bad_step, world, build, what):
        assert result == (4, 0, targets)


def test_counts_of_different_kinds_add_up_exactly_above_two_to_the_24():
    """Stacked together they would all be float32, and the first one 2**24."""
    counts = [torch.tensor(2**24 + 1), torch.tensor(1.5), 2.5]
    values = iter(counts)

    def loss_fn(model, batch):
        return fk.Loss(logits_loss(model, batch).sum, next(values), {"half": 0.5})

    state = build_state({}, 1)
    totals = fk.reduce_totals(fk.accumulate(state, _batches(), loss_fn), state)
    assert totals["targets"].item() == 2**24 + 5
    half = [totals["metrics", "half", kind] for kind in ("sum", "count")]
    assert [total.item() for total in half] == [0.5 * len(counts), len(counts)]
    assert {total.dtype for total in half} == {torch.float64}
    state = fk.update(state, fk.clip(totals), lr=0.0, totals=totals)
    assert state.targets.item() == 2**24 + 5


# Exceptions in the middle


def _raise_then_retry(rank, world, layout, sync, has_reset):
    if not has_reset:  # as on torch 2.11, which the declared range begins with
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(FSDPModule, "reset_iter_state")
            return _raise_then_retry(rank, world, layout, sync, has_reset=True)
    state = build_state(layout, world, dtype=torch.float64)
    calls = []

    def fails_in_second(model, batch):
        calls.append(1)
        loss = logits_loss(model, batch)
        if len(calls) == 2:
            raise RuntimeError("micro-batch 2 is broken")
        return loss

    step = fk.make_step(fails_in_second, schedule=CONSTANT, sync=sync)
    with pytest.raises(RuntimeError, match="micro-batch 2 is broken"):
        step(state, _batches(world, rank))
    assert all(p.grad is None for p in state.model.parameters())
    assert state.step == 0
    return mean_gradients(state, _batches(world, rank), logits_loss, sync=sync)


WHERE = [(4, {"dp_replicate": 2, "dp_shard": 2}), (1, {}), (2, {})]
SYNCS = ["hsdp_last", "last", "every"]
RETRIED = [*zip(WHERE, SYNCS, [True] * 3, strict=True), (WHERE[2], "last", False)]


@pytest.mark.parametrize(
    ("where", "sync", "has_reset"), first_of(RETRIED, product(WHERE, SYNCS, [True]))
)
def test_a_step_that_raised_can_be_tried_again(where, sync, has_reset):
    world, layout = where
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(world))
    for found in run_ranks(_raise_then_retry, world, layout, sync, has_reset):
        assert relative_error(found, expected) < 1e-10


class _ReturnsTensorDict(torch.nn.Linear):
    def forward(self, x):
        return TensorDict({"y": super().forward(x)}, [len(x)])


def _some_batch():
    return TensorDict({"x": torch.ones(3, 2)}, [3])


def test_a_model_that_returns_a_tensordict_is_refused():
    state = alone(_ReturnsTensorDict(2, 2))
    step = fk.make_step(lambda m, b: fk.Loss(m(b["x"])["y"].sum(), 1), schedule=CONSTANT)
    with pytest.raises(TypeError, match="_ReturnsTensorDict returned a TensorDict"):
        step(state, [_some_batch()])


def _metrics_loss(name, metric=(12.0, 4)):
    def loss_fn(model, batch):
        total = model(batch["x"]).sum()
        return fk.Loss(total, 3, {name: metric, "plain": torch.tensor(5.0), "with graph": total})

    return loss_fn


BAD = [
    ([], lambda m, b: None, ValueError, "a step got no micro-batch"),
    ([_some_batch()], lambda m, b: fk.Loss(b["x"].sum(), 1), ValueError, "does not depend on any"),
    ([_some_batch()], _metrics_loss("loss"), ValueError, r"names \['loss'\] are reserved"),
    ([_some_batch()], _metrics_loss("a", (torch.ones(2), 1)), ValueError, r"got shape \(2,\)"),
]


@pytest.mark.parametrize(("batches", "loss_fn", "error", "message"), BAD)
def test_bad_input_to_a_step(batches, loss_fn, error, message):
    state = alone(torch.nn.Linear(2, 2))
    with pytest.raises(error, match=message):
        fk.accumulate(state, batches, loss_fn)
    assert all(p.grad is None for p in state.model.parameters())


@pytest.mark.parametrize("max_norm", [0.0, float("nan")])
def test_a_max_norm_that_is_not_positive_is_refused(max_norm):
    with pytest.raises(ValueError, match=r"max_norm is .*; it must be positive"):
        fk.clip(fk.Totals.of(targets=1, grad_sq=1.0, loss_scale=1.0), max_norm=max_norm)


# Metrics, noise


def test_own_metrics_are_sums_over_counts():
    step = fk.make_step(_metrics_loss("double"), schedule=CONSTANT)
    _, metrics = step(alone(torch.nn.Linear(2, 2)), [_some_batch(), _some_batch()])
    assert metrics["double"].item() == pytest.approx(12 / 4)
    assert metrics["plain"].item() == pytest.approx(5.0)
    # A metric that keeps its graph would keep its micro-batch's until the step ends.
    assert all(value.shape == () and not value.requires_grad for value in metrics.values())


def test_dropout_depends_on_seed_and_step_alone():
    spec = attrs.evolve(SPEC, dropout=0.5)
    results = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        model = fk.Transformer(spec)
        state = fk.TrainState.create(model, _sgd(model), seed=seed)
        torch.manual_seed(noise)
        state, _ = fk.make_step(logits_loss, schedule=CONSTANT)(state, _batches())
        results.append(full_tensors(state.model))
    assert_same(results[0], results[1])
    assert relative_error(results[0], results[2]) > 0
