"""Under context parallelism a loss is a sum over positions, and exact, or it is refused."""

from __future__ import annotations

import math
from functools import partial

import attrs
import pytest
import torch
import torch.nn.functional as F
from covering import first_of, in_turn
from lab import (
    SPEC,
    alone,
    full_tensors,
    is_kept,
    lay_out,
    logits_loss,
    mean_gradients,
    relative_error,
    token_rows,
)
from pool import run_again, run_ranks
from tensordict import TensorDict

import forgekit as fk

SPEC = attrs.evolve(SPEC, vocab_size=38)
ROWS, PLACES = 4, 16


def _batch(seed=0):
    batch = token_rows(ROWS, PLACES, SPEC.vocab_size, seed)
    batch["labels"][0, :11] = -100
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return batch.update({"rewards": rewards - rewards.mean()})


def _log_p(logits, labels):
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return torch.where(labels != -100, chosen, 0.0)


def _policy(model, batch):
    """Rewards of whole rows for each position; over the rows they add up to nothing."""
    labels = batch["labels"]
    terms = batch["rewards"][:, None] * _log_p(model(batch["input_ids"]), labels)
    return fk.Loss(-terms.sum(), (labels != -100).sum())


def _without_labels(model, batch):
    return fk.Loss(model(batch["input_ids"]).square().sum(), batch["input_ids"].numel())


ADDED = {"policy": _policy, "without labels": _without_labels}


def _preference(model, batch):
    """With a count that is a sum over positions."""
    sums = _log_p(model(batch["input_ids"]), batch["labels"]).sum(1)
    terms = F.logsigmoid(0.3 * (sums[::2] - sums[1::2]))
    return fk.Loss(-terms.sum(), (batch["labels"] != -100).sum())


def _count_of_rows(model, batch):
    return fk.Loss(logits_loss(model, batch).sum, len(batch))


NOT_ADDED = {
    "preference": (_preference, "its sums are .* for whole sequences and"),
    "rows as count": (_count_of_rows, r"its counts are 4 for whole sequences and 4 \+ 4 f"),
}


def _state(sizes, dtype=torch.float64, **options):
    return lay_out(fk.Transformer(SPEC).to(dtype), sizes, **options)


def _gradients(state, loss_fn):
    return mean_gradients(state, [_batch(seed) for seed in range(2)], loss_fn)


def _expected(loss_fn):
    return _gradients(alone(fk.Transformer(SPEC).double()), loss_fn)


def _added(rank, world, name, sizes, options):
    return _gradients(_state(sizes, **options), ADDED[name])


SOME = [
    ("policy", {"cp": 2}, {"context_parallel": "ring"}),
    ("without labels", {"cp": 2}, {"context_parallel": "ulysses"}),
]
BESIDE = [("policy", {"cp": 2, second: 2}, {}) for second in ("tp", "pp")]


@pytest.mark.parametrize(("name", "sizes", "options"), first_of(SOME, SOME + BESIDE))
def test_a_sum_over_positions_is_exact(name, sizes, options):
    expected, found = _expected(ADDED[name]), {}
    for gradients in run_again(_added, math.prod(sizes.values()), name, sizes, options):
        found |= gradients
    assert relative_error(found, expected) < 1e-10


def _refused(rank, world, name, sizes, options):
    dtype = torch.float64 if "precision" not in options else torch.float32
    state, batches = _state(sizes, dtype, **options), [_batch(seed) for seed in range(2)]
    loss_fn, message = NOT_ADDED[name]
    step = fk.make_step(loss_fn, schedule=fk.constant(0.1))
    before = full_tensors(state.model)
    match = f"loss_fn is not a sum over positions: {message}.* needs cp=1"
    for run in (partial(step, state), partial(fk.evaluate, state, loss_fn=loss_fn)):
        with pytest.raises(ValueError, match=match):
            run(batches=batches)
    assert is_kept(state.model, before)
    assert state.model.training
    fk.evaluate(state, batches, loss_fn, audit=False)
    step = fk.make_step(loss_fn, schedule=fk.constant(0.1), audit=False)
    return float(step(state, batches)[1]["skipped"])


@pytest.mark.parametrize(
    ("name", "options"),
    in_turn(list(NOT_ADDED), [{}, {"context_parallel": "ulysses", "precision": "bf16"}]),
)
def test_a_loss_that_is_no_sum_over_positions_is_refused(name, options):
    assert run_ranks(_refused, 2, name, {"cp": 2}, options) == [0.0, 0.0]


def test_stages_refuse_it_together():
    assert run_ranks(_refused, 4, "rows as count", {"cp": 2, "pp": 2}, {}) == [0.0] * 4


def _teacher_loss(teacher, model, batch):
    with torch.no_grad():
        wanted = teacher(batch["input_ids"]).log_softmax(-1)
    found = model(batch["input_ids"]).log_softmax(-1)
    is_target = batch["labels"] != -100
    terms = F.kl_div(found, wanted, log_target=True, reduction="none").sum(-1)
    return fk.Loss(torch.where(is_target, terms, 0.0).sum(), is_target.sum())


def _build_teacher():
    return fk.Transformer(SPEC, seed=7).double().requires_grad_(False)


def _distilled(rank, world):
    state, teacher = _state({"cp": 2}), _build_teacher()
    with pytest.raises(ValueError, match="loss_fn is not a sum over positions: its sums are"):
        fk.audit(state, _batch(0), partial(_teacher_loss, teacher))
    teacher = fk.parallelize(teacher, state.mesh)
    fk.audit(state, _batch(0), partial(_teacher_loss, teacher))
    return _gradients(state, partial(_teacher_loss, teacher))


def test_a_teacher_has_to_share_sequences_too_and_is_exact_then():
    expected = _expected(partial(_teacher_loss, _build_teacher()))
    for found in run_ranks(_distilled, 2):
        assert relative_error(found, expected) < 1e-10


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
