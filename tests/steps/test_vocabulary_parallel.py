"""Losses of a vocabulary that ranks share, against torch on all of it in one process, float64."""

from __future__ import annotations

import math

import pytest
import torch
from lab import Watch
from pool import on_ranks, run_again
from steps.projections import (
    DIM,
    HIDDEN,
    LABELS,
    MASKED,
    VOCAB,
    WEIGHT,
    assert_alike,
    draw,
    reference,
    share,
)
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

import forgekit as fk
from forgekit.steps import cross_entropy as cross_entropy_file

LOGITS = HIDDEN @ WEIGHT.T
PLACEMENTS = {"shard": Shard(-1), "replicate": Replicate(), "places": Shard(1)}


def expect(logits: Tensor, labels: Tensor, z_loss: float, *inputs: Tensor) -> list[Tensor]:
    loss = reference(logits, labels, z_loss)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


# Logits


def _logits(rank, world, logits, labels, z_loss, kind):
    there = share(logits, PLACEMENTS[kind])
    loss = fk.cross_entropy(there, labels, z_loss)
    assert not isinstance(loss.sum, DTensor)
    assert int(loss.count) == int((labels != -100).sum())
    (0.125 * loss.sum).backward()
    assert there.grad.placements == there.placements
    return [loss.sum.detach(), 8 * there.grad.full_tensor()]


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_cross_entropy_of_shared_logits_equals_torch(kind):
    logits, labels = (each[:, : 4 if kind == "places" else None] for each in (LOGITS, LABELS))
    everyone = run_again(_logits, 2, logits, labels, 0.3, kind)
    logits = logits.clone().requires_grad_()
    assert_alike(everyone, expect(logits, labels, 0.3, logits))


@on_ranks(2, keep=True)
def test_columns_that_a_rank_would_take_for_others_and_labels_of_none_are_refused(rank, world):
    weight = share(draw(VOCAB + 1, DIM))
    with pytest.raises(ValueError, match=r"^weight has a vocabulary of 13, which 2 ranks share; "):
        fk.linear_cross_entropy(HIDDEN, weight, LABELS)
    with pytest.raises(ValueError, match=r"logits is a DTensor over .*, not 'tp' alone"):
        fk.cross_entropy(share(LOGITS, Shard(-1), "dp_shard"), LABELS)
    with pytest.raises(ValueError, match=r"weight is a DTensor over .* Read it inside forward"):
        fk.linear_cross_entropy(HIDDEN, share(WEIGHT, name="dp_shard"), LABELS)
    for label in (VOCAB, -1, -99):  # on all ranks, or those without an error would wait
        labels = LABELS.clone()
        labels[1, 0] = label
        with pytest.raises((IndexError, RuntimeError), match="is out of bounds"):
            fk.linear_cross_entropy(HIDDEN, share(WEIGHT), labels)


# Linear


def _linear(rank, world, hidden, weight, labels, z_loss, chunk):
    weight, hidden = share(weight), share(hidden, Replicate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy_file, "chunk_rows", lambda weight: chunk)
        loss = fk.linear_cross_entropy(hidden, weight, labels, z_loss)
    assert int(loss.count) == int((labels != -100).sum())
    (0.125 * loss.sum).backward()
    assert weight.grad.placements == weight.placements
    return [loss.sum.detach(), 8 * hidden.grad.full_tensor(), 8 * weight.grad.full_tensor()]


@pytest.mark.parametrize(("world", "z_loss", "chunk"), [(2, 0.0, 1000), (4, 0.3, 4)])
def test_linear_cross_entropy_equals_torch_whatever_stands_at_masked_positions(
    world, z_loss, chunk
):
    dirty = torch.where(MASKED[..., None], math.nan, HIDDEN)
    everyone = run_again(_linear, world, dirty, WEIGHT, LABELS, z_loss, chunk)
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    assert_alike(everyone, expect(hidden @ weight.T, LABELS, z_loss, hidden, weight))
    assert not everyone[0][1][MASKED].any()


def test_a_rank_whose_columns_are_all_minus_infinity():
    """As those of a vocabulary that was padded to a rounder size."""
    padded = WEIGHT.clone()
    padded[VOCAB // 2 :] = -math.inf
    labels = torch.where(MASKED, -100, LABELS % (VOCAB // 2))
    everyone = run_again(_linear, 2, HIDDEN.abs(), padded, labels, 0.3, 4)
    loss = reference(HIDDEN.abs() @ WEIGHT[: VOCAB // 2].T, labels, 0.3)
    for found, *_ in everyone:
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)


# Communication and memory


@on_ranks(2, keep=True)
def test_one_collective_for_each_chunk_and_never_all_logits(rank, world):
    hidden, weight = share(torch.ones(40, 1), Replicate()), share(torch.ones(200, 1))
    with pytest.MonkeyPatch.context() as patch, Watch() as linear:
        patch.setattr(cross_entropy_file, "chunk_rows", lambda weight: 10)
        loss = fk.linear_cross_entropy(hidden, weight, torch.arange(40), 0.1)
        loss.sum.backward()
    assert linear.count("gather") == 4
    assert linear.largest == 10 * 200 / 2
