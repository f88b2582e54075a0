"""Under context parallelism a loss is a sum over positions, and exact, or it is refused."""

from __future__ import annotations

import itertools
import math
from functools import partial

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import first_of, in_turn
from lab import SPEC, full_tensors, head_loss, logits_loss, relative_error
from ranks import run_again, run_ranks
from tensordict import TensorDict

import forgekit as fk

SPEC = attrs.evolve(SPEC, vocab_size=38)
ROWS, PLACES = 4, 16


def _batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator)
    ids = draw(0, SPEC.vocab_size, (ROWS, PLACES + 1))
    labels = ids[:, 1:].clone()
    labels[draw(0, 10, labels.shape) < 3] = -100
    labels[0, :11] = -100
    rewards = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    items = {"input_ids": ids[:, :-1], "labels": labels, "rewards": rewards - rewards.mean()}
    items["source"] = torch.tensor([0, 1, 1, 0])
    return TensorDict(items, [ROWS])


def _log_p(logits, labels):
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels != -100, chosen, 0.0)


def _z_loss(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"], z_loss=0.3)


def _policy(model, batch):
    """Rewards of whole rows for each position; over the rows they add up to nothing."""
    labels = batch["labels"]
    terms = batch["rewards"][:, None] * _log_p(model(batch["input_ids"]), labels)
    return fk.Loss(-terms.sum(), (labels != -100).sum())


def _without_labels(model, batch):
    logits = model(batch["input_ids"])
    return fk.Loss(logits.square().sum(), batch["input_ids"].numel())


def _two_calls(model, batch):
    first, second = model(batch["input_ids"]), model(batch["input_ids"].flip(0))
    return fk.Loss((first - second).square().sum(), batch["input_ids"].numel())


ADDED = {
    "cross-entropy": logits_loss,
    "head": head_loss,
    "z-loss": _z_loss,
    "by source": fk.losses_by_source(logits_loss, ("code", "prose")),
    "policy": _policy,
    "without labels": _without_labels,
    "two calls": _two_calls,
}


def _preference(model, batch):
    sums = _log_p(model(batch["input_ids"]), batch["labels"]).sum(1)
    return fk.Loss(-F.logsigmoid(0.3 * (sums[::2] - sums[1::2])).sum(), ROWS // 2)


def _preference_by_targets(model, batch):
    """With a count that is one."""
    loss = _preference(model, batch)
    return fk.Loss(loss.sum, (batch["labels"] != -100).sum())


def _row_means(model, batch):
    labels = batch["labels"]
    means = _log_p(model(batch["input_ids"]), labels).sum(1) / (labels != -100).sum(1).clamp(min=1)
    return fk.Loss(-means.sum(), ROWS)


def _mean(model, batch):
    loss = logits_loss(model, batch)
    return fk.Loss(loss.sum / loss.count.clamp(min=1), 1)


def _count_of_rows(model, batch):
    return fk.Loss(logits_loss(model, batch).sum, len(batch))


def _shifted_here(model, batch):
    logits, ids = model(batch["input_ids"]), batch["input_ids"]
    return fk.cross_entropy(logits[:, :-1], ids[:, 1:])


NOT_ADDED = {
    "preference": (_preference, "its sums are .* for whole sequences and"),
    "preference by targets": (_preference_by_targets, "its sums are .* for whole sequences and"),
    "row means": (_row_means, "its sums are .* for whole sequences and"),
    "mean of a micro-batch": (_mean, "its sums are .* for whole sequences and"),
    "rows as count": (
        _count_of_rows,
        r"its counts are 4 for whole sequences and 4 \+ 4 f",
    ),
    "labels shifted here": (_shifted_here, "its sums are .* for whole sequences and"),
}


def _state(sizes, dtype=torch.float64, **options):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    model = fk.parallelize(fk.Transformer(SPEC).to(dtype), mesh, **options)
    return fk.TrainState.create(model, fk.adamw(model), mesh=mesh)


def _gradients(state, loss_fn, micros=1):
    batches = [_batch(seed) for seed in range(micros)]
    totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    factor = fk.clip(totals).factor
    return {n: g * factor for n, g in full_tensors(state.model, gradients=True).items()}


def _expected(loss_fn, micros=1):
    model = fk.Transformer(SPEC).double()
    return _gradients(fk.TrainState.create(model, fk.adamw(model)), loss_fn, micros)


def _added(rank, world, name, sizes, micros, options):
    return _gradients(_state(sizes, **options), ADDED[name], micros)


@pytest.mark.parametrize(("name", "method"), in_turn(list(ADDED), ["ring", "ulysses"]))
def test_a_sum_over_positions_is_exact(name, method):
    expected = _expected(ADDED[name])
    for found in run_again(_added, 2, name, {"cp": 2}, 1, {"context_parallel": method}):
        assert relative_error(found, expected) < 1e-10


@pytest.mark.parametrize(
    ("second", "name"),
    first_of(
        [("tp", "head"), ("pp", "policy")],
        itertools.product(["tp", "pp"], ["cross-entropy", "head", "policy"]),
    ),
)
def test_a_sum_over_positions_is_exact_beside(second, name):
    expected, found = _expected(ADDED[name], 2), {}
    for gradients in run_again(_added, 4, name, {"cp": 2, second: 2}, 2, {}):
        found |= gradients
    assert relative_error(found, expected) < 1e-10


def _refused(rank, world, name, sizes, options):
    dtype = torch.float64 if "precision" not in options else torch.float32
    state = _state(sizes, dtype, **options)
    loss_fn, message = NOT_ADDED[name]
    step = fk.make_step(loss_fn, schedule=fk.constant(0.1))
    before = full_tensors(state.model)
    with pytest.raises(ValueError, match=f"loss_fn is no sum over positions: {message}") as caught:
        step(state, [_batch(seed) for seed in range(2)])
    after = full_tensors(state.model)
    assert "needs cp at 1" in str(caught.value)
    return all(torch.equal(before[n], after[n]) for n in before) and state.model.training


@pytest.mark.parametrize(
    ("name", "options"),
    in_turn(list(NOT_ADDED), [{}, {"context_parallel": "ulysses", "precision": "bf16"}]),
)
def test_a_loss_that_is_no_sum_over_positions_is_refused(name, options):
    assert run_ranks(_refused, 2, name, {"cp": 2}, options) == [True, True]


@pytest.mark.parametrize("name", ["preference by targets", "rows as count"])
def test_stages_refuse_it_together(name):
    assert run_ranks(_refused, 4, name, {"cp": 2, "pp": 2}, {}) == [True] * 4


def _evaluated(rank, world, name, sizes):
    """Refused losses leave the model in training mode; an exact one is that of one process."""
    state, batches = _state(sizes), [_batch(seed) for seed in range(2)]
    if name in ADDED:
        found = fk.evaluate(state, batches, ADDED[name])
        return float(found["loss"]), float(found["targets"])
    loss_fn, message = NOT_ADDED[name]
    with pytest.raises(ValueError, match=f"loss_fn is no sum over positions: {message}"):
        fk.evaluate(state, batches, loss_fn)
    found = fk.evaluate(state, batches, loss_fn, audit=False)
    assert state.model.training
    return float(found["targets"]) > 0


@pytest.mark.parametrize(
    ("name", "sizes"),
    in_turn(list(NOT_ADDED), [{"cp": 2}] * 5 + [{"cp": 2, "pp": 2}]),
)
def test_an_evaluation_refuses_a_loss_that_is_no_sum_over_positions(name, sizes):
    world = math.prod(sizes.values())
    assert run_ranks(_evaluated, world, name, sizes) == [True] * world


@pytest.mark.parametrize("name", ["policy", "head"])
def test_an_evaluation_of_a_sum_over_positions_is_exact(name):
    model = fk.Transformer(SPEC).double()
    state = fk.TrainState.create(model, fk.adamw(model))
    whole = fk.evaluate(state, [_batch(seed) for seed in range(2)], ADDED[name])
    for loss, targets in run_again(_evaluated, 2, name, {"cp": 2}):
        assert loss == pytest.approx(float(whole["loss"]), rel=1e-10)
        assert targets == float(whole["targets"])


def _teacher_loss(teacher, model, batch):
    with torch.no_grad():
        wanted = teacher(batch["input_ids"]).log_softmax(-1)
    found = model(batch["input_ids"]).log_softmax(-1)
    is_target = batch["labels"] != -100
    terms = F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)
    return fk.Loss(torch.where(is_target, terms, 0.0).sum(), is_target.sum())


def _build_teacher():
    teacher = fk.Transformer(SPEC, seed=7).double()
    return teacher.requires_grad_(requires_grad=False)


def _distilled(rank, world, shares):
    state = _state({"cp": 2})
    teacher = _build_teacher()
    if shares:
        teacher = fk.parallelize(teacher, state.mesh)
        return _gradients(state, partial(_teacher_loss, teacher))
    with pytest.raises(ValueError, match="loss_fn is no sum over positions: its sums are"):
        _gradients(state, partial(_teacher_loss, teacher))
    return True


def test_a_teacher_that_shares_sequences_too_is_exact():
    expected = _expected(partial(_teacher_loss, _build_teacher()))
    for found in run_again(_distilled, 2, True):
        assert relative_error(found, expected) < 1e-10


def test_a_teacher_that_sees_slices_only_is_refused():
    assert run_again(_distilled, 2, False) == [True, True]


def _with_mean(model, batch):
    logits = model(batch["input_ids"])
    size = logits.square().mean().sqrt()  # of two halves it is not the mean of theirs
    return fk.cross_entropy(logits, batch["labels"]).with_mean(size, weight=20.0)


def _loss_with_mean(rank, world):
    state = _state({"cp": 2})
    state, metrics = fk.make_step(_with_mean, schedule=fk.constant(0.1))(state, [_batch()])
    return float(metrics["loss"])


def test_a_mean_of_each_slice_enters_by_its_targets():
    """As that of each micro-batch does: the result depends on how positions are split."""
    batch, total = _batch(), 0.0
    with torch.no_grad():
        logits = fk.Transformer(SPEC).double()(batch["input_ids"])
    for rank in range(2):
        whole = TensorDict({**batch, "logits": logits}, [ROWS])
        part = fk.shard_sequence(whole, rank=rank, world=2, method="zigzag")
        loss = fk.cross_entropy(part["logits"], part["labels"])
        total += float(loss.sum + 20.0 * part["logits"].square().mean().sqrt() * loss.count)
    expected = total / int((batch["labels"] != -100).sum())
    assert run_again(_loss_with_mean, 2) == [pytest.approx(expected, rel=1e-10)] * 2


def _left_out(rank, world):
    state = _state({"cp": 2})
    step = fk.make_step(_row_means, schedule=fk.constant(0.1), audit=False)
    return float(step(state, [_batch()])[1]["skipped"])


def test_the_proof_of_sums_can_be_left_out():
    assert run_again(_left_out, 2) == [0.0, 0.0]
