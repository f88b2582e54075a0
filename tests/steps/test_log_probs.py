"""Log-probabilities without logits, against a softmax of all of them in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from lab import Watch
from pool import run_again
from steps.projections import (
    HIDDEN,
    LABELS,
    MASKED,
    PLACES,
    ROWS,
    WEIGHT,
    assert_alike,
    draw,
    share,
)
from torch import Tensor

import forgekit as fk
from forgekit.steps import log_probs as log_probs_file

SLOPES = draw(2, ROWS, PLACES, seed=3)  # each position has its own: what a policy's loss does


def expected(temperature: float, uses_entropy: bool) -> list[Tensor]:
    """Values, entropies and gradients by the definition."""
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    p = (hidden @ weight.T / temperature).softmax(-1)
    at_label = p.gather(-1, LABELS.clamp(min=0)[..., None])[..., 0]
    log_probs = at_label.log().where(~MASKED, 0.0)
    entropies = -(p * p.log()).sum(-1).where(~MASKED, torch.zeros(()))
    total = (SLOPES[0] * log_probs).sum()
    if uses_entropy:
        total = total + (SLOPES[1] * entropies).sum()
    gradients = torch.autograd.grad(total, [hidden, weight])
    return [log_probs.detach(), *([entropies.detach()] if uses_entropy else []), *gradients]


def found(hidden: Tensor, weight: Tensor, temperature: float, uses_entropy: bool) -> list[Tensor]:
    results = fk.linear_log_probs(hidden, weight, LABELS, temperature, entropy=uses_entropy)
    results = results if uses_entropy else (results,)
    assert all(value._base is None for value in results), "FSDP warns of outputs that are views"
    total = sum(map(torch.mul, SLOPES, results), torch.zeros(())).sum()
    gradients = torch.autograd.grad(total, [hidden, weight])
    return [*(value.detach() for value in results), *gradients]


@pytest.mark.parametrize(
    ("temperature", "uses_entropy", "chunk"),
    [(1.0, False, 1), (0.6, False, 1000), (1.0, True, 4), (0.6, True, 1000)],
)
def test_values_and_gradients_are_those_of_a_softmax(monkeypatch, temperature, uses_entropy, chunk):
    monkeypatch.setattr(log_probs_file, "chunk_rows", lambda weight: chunk)
    hidden = HIDDEN.masked_fill(MASKED[..., None], math.nan).requires_grad_()
    here = found(hidden, WEIGHT.clone().requires_grad_(), temperature, uses_entropy)
    for mine, wanted in zip(here, expected(temperature, uses_entropy), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    assert not here[-2][MASKED].any()


def test_tokens_that_cannot_come_up_have_no_part_in_the_entropy():
    """A bias of -inf cannot be given, so a column's logit is -inf by an infinite weight."""
    hidden, weight = torch.ones(1, 2, 1), torch.tensor([[0.0], [0.0], [-math.inf]])
    weight.requires_grad_()
    log_probs, entropies = fk.linear_log_probs(hidden, weight, torch.tensor([[0, 1]]), entropy=True)
    torch.testing.assert_close(log_probs, torch.full((1, 2), -math.log(2)))
    torch.testing.assert_close(entropies, torch.full((1, 2), math.log(2)))
    (log_probs.sum() + entropies.sum()).backward()
    torch.testing.assert_close(weight.grad, torch.tensor([[0.0], [0.0], [0.0]]))


def test_sixteen_bits_lose_nothing_in_the_logarithm():
    hidden, weight = HIDDEN.bfloat16().requires_grad_(), WEIGHT.bfloat16().requires_grad_()
    log_probs = fk.linear_log_probs(hidden, weight, LABELS)
    assert log_probs.dtype == torch.float32
    logits = (hidden.detach() @ weight.detach().T).double()
    wanted = -F.cross_entropy(logits.mT, LABELS, reduction="none")
    torch.testing.assert_close(log_probs.double(), wanted, rtol=1e-6, atol=1e-6)
    (SLOPES[0] * log_probs).sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    for mine, wanted in zip([hidden.grad, weight.grad], expected(1.0, False)[1:], strict=True):
        assert (mine - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch):
    monkeypatch.setattr(log_probs_file, "chunk_rows", lambda weight: 10)
    hidden, weight = torch.ones(200, 1).requires_grad_(), torch.ones(90, 1).requires_grad_()
    with Watch() as seen:
        fk.linear_log_probs(hidden, weight, torch.arange(200) % 90).sum().backward()
    assert seen.largest == 10 * 90


def _shared(rank: int, world: int, temperature: float, uses_entropy: bool) -> list[Tensor]:
    here = found(HIDDEN.clone().requires_grad_(), share(WEIGHT), temperature, uses_entropy)
    return [*here[:-1], here[-1].full_tensor()]


def test_ranks_that_share_the_vocabulary_find_the_same():
    assert_alike(run_again(_shared, 2, 0.7, True), expected(0.7, True))


@pytest.mark.parametrize("temperature", [0.0, math.nan, math.inf, -0.5, 1e-31, 1e-45])
def test_a_temperature_without_probabilities_is_refused(temperature):
    with pytest.raises(ValueError, match=r"temperature is .*; it must be finite and at least"):
        fk.linear_log_probs(HIDDEN, WEIGHT, LABELS, temperature)
    assert fk.linear_log_probs(HIDDEN, WEIGHT, LABELS, 1e-30).isfinite().all()
