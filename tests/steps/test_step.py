"""What a step promises beside its gradient: lazy, silent, undoable, indifferent to its scale."""

from __future__ import annotations

import attrs
import pytest
import torch
from covering import in_turn
from lab import (
    SPEC,
    Watch,
    build_state,
    full_tensors,
    global_batch,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from pool import run_again, run_ranks
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule

import forgekit as fk

CONSTANT = fk.constant(0.01)


def _batches(world=1, rank=0, kind="ragged", seed=0):
    return [row[rank] for row in global_batch(world, kind, seed)]


def _optimizer_state(state):
    return {
        f"{index}.{key}": value.clone()
        for index, entry in state.optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }


def _bitwise_equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Loss scale and split


@pytest.mark.parametrize(
    "build", [fk.adamw, lambda m: torch.optim.SGD(m.parameters(), momentum=0.9)]
)
def test_parameters_are_bitwise_independent_of_the_loss_scale(build):
    results = []
    for exponent in (-30, 0, 17):
        model = fk.Transformer(SPEC)
        state = fk.TrainState.create(model, build(model), loss_scale=2.0**exponent)
        step = fk.make_step(logits_loss, schedule=CONSTANT, max_norm=0.5)
        for seed in range(3):
            state, metrics = step(state, _batches(seed=seed))
        results.append((full_tensors(state.model), metrics["grad_norm"]))
    for parameters, norm in results[1:]:
        assert _bitwise_equal(parameters, results[0][0])
        assert torch.equal(norm, results[0][1])


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

    class Stream:
        def __iter__(self):
            for index, batch in enumerate(_batches()):
                assert len(done) >= index - (0 if sized else 1)
                yield batch

    if sized:
        Stream.__len__ = lambda self: 3

    def loss_fn(model, batch):
        loss = logits_loss(model, batch)
        loss.sum.register_hook(lambda _: done.append(1))
        return loss

    fk.accumulate(build_state({}, 1), Stream(), loss_fn)
    assert len(done) == 3


# Host reads


def _by_source(batches):
    for batch in batches:
        batch["source"] = torch.arange(batch.shape[0]) % 2
    return batches


def _count_reads(state, monkeypatch):
    """With everything that a step can report."""
    read: list[str] = []
    loss_fn = fk.losses_by_source(logits_loss, ("code", "prose"))
    step = fk.make_step(loss_fn, schedule=CONSTANT, spikes=fk.SpikeLimit())
    state, _ = step(state, _by_source(_batches()))
    for name in ("tolist", "numpy", "item", "__bool__", "__float__", "__int__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda t, *a, n=name, o=original: (read.append(n), o(t, *a))[1],
        )
    batches = _by_source(_batches(seed=1))
    with Watch() as calls:
        step(state, batches)
    monkeypatch.undo()
    return read + calls.host_reads


def test_a_step_with_a_fused_optimizer_reads_nothing_on_the_host(monkeypatch):
    assert _count_reads(build_state({}, 1), monkeypatch) == []


def test_other_optimizers_cost_one_host_read(monkeypatch):
    """The control: the counter does count."""
    state = build_state({}, 1, lambda model: torch.optim.SGD(model.parameters()))
    assert _count_reads(state, monkeypatch)[0] == "__bool__"


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
    before, moments = full_tensors(state.model), _optimizer_state(state)
    losses = {
        "nan loss on one rank": _nan_where(rank == world - 1),
        "infinite gradient": _infinite_gradient,
        "no targets": logits_loss,
    }
    kind = "no_targets" if what == "no targets" else "ragged"
    bad = fk.make_step(losses[what], schedule=CONSTANT)
    skipped = []
    for _ in range(2):
        state, metrics = bad(state, _batches(world, rank, kind))
        skipped.append((metrics["skipped"].item(), state.skipped.item()))
    same = _bitwise_equal(full_tensors(state.model), before)
    same_moments = _bitwise_equal(_optimizer_state(state), moments)
    targets = state.targets.item()
    state, _ = step(state, _batches(world, rank, seed=1))
    moved = not _bitwise_equal(full_tensors(state.model), before)
    return same, same_moments, skipped, state.step, state.skipped.item(), moved, targets


def _sgd(model):
    return torch.optim.SGD(model.parameters(), momentum=0.9)


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
        assert result == (True, True, [(1.0, 1), (1.0, 2)], 4, 0, True, targets)


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


def _raise_then_retry(rank, world, layout, sync):
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


@pytest.mark.parametrize(
    ("where", "sync"),
    in_turn(
        [(4, {"dp_replicate": 2, "dp_shard": 2}), (1, {}), (2, {})], ["hsdp_last", "last", "every"]
    ),
)
def test_a_step_that_raised_can_be_tried_again(where, sync):
    world, layout = where
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(world))
    for found in run_ranks(_raise_then_retry, world, layout, sync):
        assert relative_error(found, expected) < 1e-10


def _retry_without_the_reset_of_torch(rank, world):
    reset = FSDPModule.reset_iter_state
    del FSDPModule.reset_iter_state
    try:
        return _raise_then_retry(rank, world, {}, "last")
    finally:
        FSDPModule.reset_iter_state = reset


def test_a_step_can_be_tried_again_where_torch_has_no_reset():
    """As on torch 2.11, which the declared range begins with."""
    expected, _ = reference_gradients(fk.Transformer(SPEC), global_batch(2))
    for found in run_ranks(_retry_without_the_reset_of_torch, 2):
        assert relative_error(found, expected) < 1e-10


class _ReturnsTensorDict(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x):
        return TensorDict({"y": self.linear(x)}, [len(x)])


def _some_batch(**tensors):
    return TensorDict(tensors or {"x": torch.ones(3, 2)}, [3])


def _linear_state():
    model = torch.nn.Linear(2, 2)
    return fk.TrainState.create(model, fk.adamw(model))


def test_a_model_that_returns_a_tensordict_is_refused():
    model = _ReturnsTensorDict()
    state = fk.TrainState.create(model, fk.adamw(model))
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
    state = _linear_state()
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
    _, metrics = step(_linear_state(), [_some_batch(), _some_batch()])
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
    assert _bitwise_equal(results[0], results[1])
    assert not _bitwise_equal(results[0], results[2])
