"""Divergence from stored top-k rows, against sums over all logits in float64."""

from __future__ import annotations

import math
from functools import partial

import attrs
import pytest
import torch
from lab import SPEC, Watch, alone, global_batch, lay_out, mean_gradients
from pool import run_again
from steps.projections import HIDDEN, MASKED, PLACES, ROWS, VOCAB, WEIGHT, assert_alike, draw, share
from tensordict import TensorDict
from torch import Tensor

import forgekit as fk
from forgekit.steps import log_probs as log_probs_file

TEACHER = draw(ROWS, PLACES, VOCAB, seed=4)
CHUNKS = {"one row": 1, "uneven": 4, "all": 1000}


def stored(k: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The teacher's k most likely tokens, in an order of their own, and their logarithms."""
    log_probs, ids = (TEACHER / temperature).log_softmax(-1).topk(k)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
    return ids[..., order], log_probs[..., order]


def wanted(k: int, temperature: float, *, reverse: bool) -> list[Tensor]:
    """Sum and gradients by the definition: k outcomes, and all others as one."""
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    student = (hidden @ weight.T / temperature).softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for row, place in (~MASKED).nonzero().tolist():
        teacher = (TEACHER[row, place] / temperature).softmax(-1)
        chosen = teacher.topk(k).indices.tolist()
        others = [token for token in range(VOCAB) if token not in chosen]
        p, q = (
            torch.cat([each[chosen], each[others].sum()[None]])[: min(k + 1, VOCAB)]
            for each in (teacher, student[row, place])
        )
        first, second = (q, p) if reverse else (p, q)
        total = total + (first * (first / second).log()).sum()
    return [total.detach(), *torch.autograd.grad(total, [hidden, weight])]


def computed(weight: Tensor, k: int, temperature: float, *, reverse: bool) -> list[Tensor]:
    hidden = HIDDEN.masked_fill(MASKED[..., None], math.nan).requires_grad_()
    ids, log_probs = stored(k, temperature)
    log_probs = log_probs.masked_fill(MASKED[..., None], math.nan)
    options = {"mask": ~MASKED, "temperature": temperature, "reverse": reverse}
    loss = fk.sparse_kl(hidden, weight, ids, log_probs, **options)
    assert loss.count == (~MASKED).sum()
    torch.testing.assert_close(loss.rows[0].sum(), loss.sum.detach())
    gradients = torch.autograd.grad(0.5 * loss.sum, [hidden, weight])
    assert not gradients[0][MASKED].any()
    return [loss.sum.detach(), *(2 * gradient for gradient in gradients)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("k", "temperature", "chunk"),
    [(1, 1.0, "one row"), (3, 0.7, "uneven"), (11, 2.0, "all"), (VOCAB, 0.7, "uneven")],
)
def test_values_and_gradients_are_those_over_all_logits(
    monkeypatch, k, temperature, chunk, reverse
):
    monkeypatch.setattr(log_probs_file, "chunk_rows", lambda weight: CHUNKS[chunk])
    mine = computed(WEIGHT.clone().requires_grad_(), k, temperature, reverse=reverse)
    for here, there in zip(mine, wanted(k, temperature, reverse=reverse), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


def _shared(rank: int, world: int, k: int, reverse: bool) -> list[Tensor]:
    here = computed(share(WEIGHT), k, 0.7, reverse=reverse)
    return [*here[:-1], here[-1].full_tensor()]


@pytest.mark.parametrize(("world", "k"), [(2, 3), (4, VOCAB)])
@pytest.mark.parametrize("reverse", [False, True])
def test_ranks_that_share_the_vocabulary_find_the_same(world, k, reverse):
    assert_alike(run_again(_shared, world, k, reverse), wanted(k, 0.7, reverse=reverse))


EVEN = attrs.evolve(SPEC, vocab_size=38, unpadded_vocab_size=35)
"""Three rows are padding: on two ranks the second has them."""


def _rows(layout: dict[str, int]) -> list[list[TensorDict]]:
    """``[micro-batch][reader]`` of 16 positions, with a teacher's four tokens at each."""
    rows = [global_batch(layout.get("dp_shard", 1), seed=seed)[1] for seed in range(3)]
    for number, batch in enumerate(batch for row in rows for batch in row):
        batch["input_ids"] %= EVEN.tokens
        shape = batch["input_ids"].shape
        log_probs, ids = draw(*shape, EVEN.tokens, seed=number).log_softmax(-1).topk(4)
        ids[batch["labels"] == -100] = -100
        batch["teacher"] = TensorDict({"ids": ids, "log_probs": log_probs}, shape)
    return rows


def _distil(model, batch) -> fk.Loss:
    teacher = batch["teacher"]
    head = partial(fk.sparse_kl, ids=teacher["ids"], log_probs=teacher["log_probs"])
    return model(batch["input_ids"], head=head)


def _distil_by_logits(model, batch) -> fk.Loss:
    """The same by the definition, position by position."""
    is_target = batch["labels"] != -100
    teacher, student = batch["teacher"][is_target], model(batch["input_ids"])[is_target].softmax(-1)
    p, q = (
        torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1)
        for each in (teacher["log_probs"].exp(), student.gather(-1, teacher["ids"]))
    )
    return fk.Loss((p * (p / q).log()).sum(), is_target.sum())


def _train(rank: int, world: int, layout: dict[str, int]) -> dict[str, Tensor]:
    state = lay_out(fk.Transformer(EVEN).double(), layout)
    batches = [row[rank * len(row) // world] for row in _rows(layout)]
    return mean_gradients(state, batches, _distil)


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, {"tp": 2}), (2, {"cp": 2}), (2, {"dp_shard": 2}), (4, {"dp_shard": 2, "tp": 2})],
    ids=str,
)
def test_as_a_head_inside_a_sharded_model(world, layout):
    everyone = [batch for row in _rows(layout) for batch in row]
    expected = mean_gradients(alone(fk.Transformer(EVEN).double()), everyone, _distil_by_logits)
    for gradients in run_again(_train, world, layout):
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12)


def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch):
    monkeypatch.setattr(log_probs_file, "chunk_rows", lambda weight: 10)
    hidden, weight = torch.ones(1, 200, 1).requires_grad_(), torch.ones(90, 1).requires_grad_()
    ids = torch.stack([torch.arange(200) % 90, torch.arange(1, 201) % 90], -1)[None]
    with Watch() as seen:
        fk.sparse_kl(hidden, weight, ids, torch.full(ids.shape, -2.0)).sum.backward()
    assert seen.largest == 10 * 90


def test_a_student_that_is_sure_of_a_token_has_finite_gradients():
    """All but one exponential underflow; the teacher leaves mass over, or none."""
    hidden = torch.ones(1, 2, 1, requires_grad=True)
    weight = torch.tensor([[500.0], [0.0], [-500.0]], requires_grad=True)
    ids, log_probs = torch.tensor([[[0], [0]]]), torch.tensor([[[0.0], [math.log(0.5)]]])
    for reverse in (False, True):
        loss = fk.sparse_kl(hidden, weight, ids, log_probs, reverse=reverse)
        gradients = torch.autograd.grad(loss.sum, [hidden, weight])
        assert all(value.isfinite().all() for value in (loss.sum, *gradients))


BAD = {
    "ids outside": ({"ids": torch.tensor([[[0, 12]]])}, "ids outside the vocabulary of 12"),
    "padding": ({"ids": torch.tensor([[[0, 11]]]), "vocab_size": 11}, "the vocabulary of 11"),
    "negative": ({"ids": torch.tensor([[[0, -1]]])}, "ids outside the vocabulary"),
    "twice": ({"ids": torch.tensor([[[3, 3]]])}, "a token twice"),
    "above one": ({"log_probs": torch.tensor([[[-0.1, -1.0]]])}, "sum above 1"),
    "k differs": ({"ids": torch.tensor([[[0]]])}, r"shape \(1, 1, 1\) and log_probs \(1, 1, 2\)"),
    "mask": ({"mask": torch.ones(1).bool()}, r"mask has shape \(1,\); it must be \(1, 1\)"),
    "temperature": ({"temperature": 0.0}, "is 0.0; it must be finite and at least 1e-30"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_distribution_is_refused(case):
    options, message = BAD[case]
    good = {"ids": torch.tensor([[[0, 1]]]), "log_probs": torch.tensor([[[-1.0, -1.0]]])}
    hidden, arguments = HIDDEN[:1, :1], good | options
    with pytest.raises(ValueError, match=message):
        fk.sparse_kl(hidden, WEIGHT, **arguments)
    masked = torch.zeros(1, 1, dtype=torch.bool)
    if case not in ("k differs", "mask", "temperature"):  # values at positions that do not count
        assert fk.sparse_kl(hidden, WEIGHT, **arguments, mask=masked).sum == 0


def _bad_on_one(rank: int, world: int) -> str:
    state = lay_out(fk.Transformer(EVEN))
    batch = _rows({"dp_shard": world})[0][rank]
    if rank:
        batch["teacher", "log_probs"][0, -1] = 0.0
        batch["teacher", "ids"][0, -1] = torch.arange(4)
    step = fk.make_step(_distil, schedule=lambda step: 1e-3)
    with pytest.raises(ValueError, match="sum above 1") as raised:
        step(state, [batch])
    return str(raised.value)


def test_all_ranks_refuse_rows_that_one_of_them_has():
    assert len({*run_again(_bad_on_one, 2)}) == 1
