"""Losses of a vocabulary that ranks share, against torch on all of it in one process, float64."""

from __future__ import annotations

import math

import pytest
import torch
from lab import Watch
from pool import run_again
from steps.projections import DIM, HIDDEN, LABELS, MASKED, VOCAB, WEIGHT, draw, reference
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import forgekit as fk
from forgekit.steps import cross_entropy as cross_entropy_file

LOGITS = HIDDEN @ WEIGHT.T
SPREAD = {"shard": Shard(-1), "replicate": Replicate(), "places": Shard(1)}


def mesh_of(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))


def spread(tensor: Tensor, mesh: DeviceMesh, placement: object) -> DTensor:
    """A leaf; every rank cuts what it has."""
    local = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    return local.detach().requires_grad_()


def expected_by_logits(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = reference(logits, labels, z_loss)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def expected_by_linear(labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    loss = reference(hidden @ weight.T, labels, z_loss)
    return loss.detach(), *torch.autograd.grad(loss, [hidden, weight])


def assert_alike(everyone: list[list[Tensor]], expected: tuple[Tensor, ...]) -> None:
    """Right on the first rank, and the same bits on all."""
    for found in everyone:
        for mine, first, wanted in zip(found, everyone[0], expected, strict=True):
            assert mine.dtype == torch.float64
            assert torch.equal(mine, first)
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


# Logits


def _logits(rank, world, logits, labels, z_loss, kind):
    there = spread(logits, mesh_of(world), SPREAD[kind])
    loss = fk.cross_entropy(there, labels, z_loss)
    assert not isinstance(loss.sum, DTensor)
    assert int(loss.count) == int((labels != -100).sum())
    (0.125 * loss.sum).backward()
    assert there.grad.placements == there.placements
    return [loss.sum.detach(), 8 * there.grad.full_tensor()]


@pytest.mark.parametrize("kind", ["shard", "replicate", "places"])
def test_cross_entropy_of_shared_logits_equals_torch(kind):
    logits = LOGITS if kind != "places" else LOGITS[:, :4]
    labels = LABELS if kind != "places" else LABELS[:, :4]
    everyone = run_again(_logits, 2, logits, labels, 0.3, kind)
    assert_alike(everyone, expected_by_logits(logits, labels, 0.3))


def _uneven(rank, world):
    weight = spread(draw(VOCAB + 1, DIM), mesh_of(world), Shard(0))
    with pytest.raises(ValueError, match=r"^weight has a vocabulary of 13, which 2 ranks share; "):
        fk.linear_cross_entropy(HIDDEN, weight, LABELS)
    other = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    with pytest.raises(ValueError, match=r"logits is a DTensor over .*, not 'tp' alone"):
        fk.cross_entropy(spread(LOGITS, other, Shard(-1)), LABELS)
    with pytest.raises(ValueError, match=r"weight is a DTensor over .* Read it inside forward"):
        fk.linear_cross_entropy(HIDDEN, spread(WEIGHT, other, Shard(0)), LABELS)
    for label in (VOCAB, -1, -99):  # on all ranks, or those without an error would wait
        labels = LABELS.clone()
        labels[1, 0] = label
        with pytest.raises((IndexError, RuntimeError), match="is out of bounds"):
            fk.linear_cross_entropy(HIDDEN, spread(WEIGHT, mesh_of(world), Shard(0)), labels)


def test_columns_that_a_rank_would_take_for_others_and_labels_of_none_are_refused():
    run_again(_uneven, 2)


# Linear


def _linear(rank, world, hidden, weight, labels, z_loss, chunk):
    mesh = mesh_of(world)
    weight, hidden = spread(weight, mesh, Shard(0)), spread(hidden, mesh, Replicate())
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
    assert_alike(everyone, expected_by_linear(LABELS, z_loss))
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


def _seen(rank, world, rows, vocab, chunk):
    mesh = mesh_of(world)
    hidden = spread(torch.ones(rows, 1), mesh, Replicate())
    weight = spread(torch.ones(vocab, 1), mesh, Shard(0))
    with pytest.MonkeyPatch.context() as patch, Watch() as linear:
        patch.setattr(cross_entropy_file, "chunk_rows", lambda weight: chunk)
        loss = fk.linear_cross_entropy(hidden, weight, torch.arange(rows) % vocab, 0.1)
        loss.sum.backward()
    return linear.count("gather"), linear.largest


def test_one_collective_for_each_chunk_and_never_all_logits():
    for collectives, largest in run_again(_seen, 2, 40, 200, 10):
        assert collectives == 4
        assert largest == 10 * 200 / 2
