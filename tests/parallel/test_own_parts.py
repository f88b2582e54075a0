"""Meshes, modules and parameters that users build themselves: exact, or refused at set-up."""

from __future__ import annotations

import attrs
import pytest
import torch
from lab import (
    SPEC,
    global_batch,
    logits_loss,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from pool import run_again, run_ranks
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import forgekit as fk

EVEN = attrs.evolve(SPEC, vocab_size=38)
MESHES = {
    "one dimension": {"dp_shard": 2},
    "replicated": {"dp_replicate": 2, "dp_shard": 1},
    "replicated, context": {"dp_replicate": 1, "dp_shard": 1, "cp": 2},
    "tensor": {"dp_shard": 1, "tp": 2},
    "pipeline": {"pp": 2, "dp_shard": 1},
}
DATA = {"one dimension": 2, "replicated": 2}


def _even(batch):
    """Sequences of 16 positions, as pipelines and slices need them; padded ones are masked."""
    ids = torch.zeros(batch.batch_size[0], 16, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    length = batch["input_ids"].shape[1]
    ids[:, :length], labels[:, :length] = batch["input_ids"], batch["labels"]
    return type(batch)({"input_ids": ids, "labels": labels}, batch.batch_size)


def _on_a_small_mesh(rank, world, sizes):
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = fk.parallelize(fk.Transformer(EVEN).double(), mesh)
    at, count = fk.data_ranks(mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    return mean_gradients(state, [_even(row[at]) for row in global_batch(count)], logits_loss)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_with_fewer_dimensions_is_exact(name):
    data = [[_even(batch) for batch in row] for row in global_batch(DATA.get(name, 1))]
    expected, _ = reference_gradients(fk.Transformer(EVEN), data)
    found: dict[str, torch.Tensor] = {}
    for gradients in run_again(_on_a_small_mesh, 2, MESHES[name]):
        found |= gradients
    assert relative_error(found, expected) < 1e-10


def _refuse(rank, world):
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("tp", "dp_shard"))
    message = r"\['tp', 'dp_shard'\].* dp_shard, cp, tp in this order"
    for use in (lambda: fk.parallelize(nn.Linear(2, 2), mesh), lambda: fk.data_ranks(mesh)):
        with pytest.raises(ValueError, match=message):
            use()
    for options in ({}, {"precision": "bf16"}):
        with pytest.raises(ValueError, match=r"blocks 0 and 2 share .*'shared.weight'.*same whole"):
            fk.parallelize(_Shared("a part"), fk.build_mesh(device="cpu"), **options)


def test_other_dimensions_and_modules_that_two_blocks_share_are_refused():
    run_ranks(_refuse, 2)


class _Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = nn.Linear(4, 4), shared

    def forward(self, x):
        return self.shared(self.own(x)).tanh()


class _Shared(nn.Module):
    """Two blocks share a part, or are one block."""

    def __init__(self, what):
        super().__init__()
        torch.manual_seed(2)
        first, other = _Block(nn.Linear(4, 4)), _Block(nn.Linear(4, 4))
        last = first if what == "a block" else _Block(first.shared)
        self.layers = nn.ModuleList([first, other, last])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _square_loss(model, batch):
    return fk.Loss(model(batch["x"]).square().sum(), len(batch))


def _rows(rank, world):
    x = torch.arange(8.0 * 4).reshape(8, 4).double() / 7
    return TensorDict({"x": x.chunk(world)[rank]}, [8 // world])


def _used_twice(rank, world):
    mesh = fk.build_mesh(device="cpu")
    model = fk.parallelize(_Shared("a block").double(), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    return mean_gradients(state, [_rows(rank, world)] * 2, _square_loss)


def test_a_whole_block_that_is_used_twice_is_exact():
    expected, _ = reference_gradients(_Shared("a block"), [[_rows(0, 1)]], _square_loss)
    for found in run_again(_used_twice, 2):
        assert relative_error(found, expected) < 1e-12


UNTRAINABLE = {
    "complex": (
        lambda: nn.Linear(4, 4, dtype=torch.complex64),
        r"'weight' is torch.complex64 .*view_as_real",
    ),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)),
        r"'0' is an embedding with sparse=True.*sparse=False",
    ),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_parameters_that_a_step_cannot_add_up_are_refused(name):
    build, message = UNTRAINABLE[name]
    model = build()
    with pytest.raises(ValueError, match=message):
        fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
