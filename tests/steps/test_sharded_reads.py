"""Parameters that a loss reads by itself, and modules whose outputs FSDP cannot follow."""

from __future__ import annotations

import pytest
import torch
from covering import first_of
from lab import (
    alone,
    full,
    full_tensors,
    is_kept,
    lay_out,
    mean_gradients,
    relative_error,
    vectors,
    vectors_loss,
)
from pool import on_ranks, run_again
from torch import nn

import forgekit as fk
from forgekit.steps.audit.agreement import UnreducedError
from forgekit.tensors import local

WIDTH, CLASSES = 6, 5
REPLICAS = {"dp_replicate": 2, "dp_shard": 1}


class _Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x):
        y = self.linear(x).tanh()
        if self.kind == "kept":
            self.kept = self.linear(y)
            return x.detach() + 0 * self.linear.bias
        return y


class _Model(nn.Module):
    def __init__(self, kind=""):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_Block(kind), _Block(kind)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            x = layer.kept if layer.kind == "kept" else y
        return self.head(x)


def _with_square(weight):
    """An L2 term of one weight, read as ``weight(model)`` after the model was called."""

    def loss_fn(model, batch):
        loss = vectors_loss(model, batch)
        return loss.with_mean(weight(model).square().sum(), 0.1)

    return loss_fn


def _read_before(model, batch):
    term = full(model.head.weight).square().sum()
    return vectors_loss(model, batch).with_mean(term, 0.1)


def _all_squares(model, batch):
    loss = vectors_loss(model, batch)
    return loss.with_mean(sum(p.square().sum() for p in model.parameters()), 0.1)


def _module_inside(model, batch):
    x = model.layers[1](model.layers[0](batch["x"]))
    return fk.cross_entropy(model.head(x), batch["labels"])


def _head_again(model, batch):
    loss = vectors_loss(model, batch)
    return loss + fk.cross_entropy(model.head(batch["x"]), batch["labels"])


READ = {
    "shard": _with_square(lambda model: local(model.layers[0].linear.weight)),
    "before": _read_before,
    "head after": _with_square(lambda model: full(model.head.weight)),
    "head again": _head_again,
    "looked at": _with_square(lambda model: full(model.layers[0].linear.weight.detach())),
}


def _state(sizes, kind="", **options):
    plan = {"layers.*.linear": "replicate"} if "tp" in sizes else None
    return lay_out(_Model(kind).double(), sizes, plan=plan, **options)


def _read(rank, world, name, sizes):
    state = _state(sizes)
    return mean_gradients(state, vectors(fk.data_ranks(state.mesh)[0]), READ[name])


EXACT = [
    ("head after", {}, 2),
    ("looked at", REPLICAS, 2),
    ("shard", {"tp": 2}, 2),
    ("head again", {"tp": 2}, 2),
    ("head again", {"tp": 2}, 4),
]


@pytest.mark.parametrize(("name", "sizes", "world"), first_of(EXACT[:-1], EXACT), ids=str)
def test_what_ranks_hold_whole_may_be_read(name, sizes, world):
    """After the model's call FSDP keeps the root's own parameters gathered until backward."""
    rows = [b for rank in range(world // sizes.get("tp", 1)) for b in vectors(rank)]
    expected = mean_gradients(alone(_Model().double()), rows, READ[name])
    for found in run_again(_read, world, name, sizes):
        assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize(("name", "sizes"), [("shard", REPLICAS), ("before", {})])
@on_ranks(2, keep=True)
def test_a_shard_that_a_loss_reads_is_refused(rank, world, name, sizes):
    """Its gradient would be that of one rank's rows."""
    state = _state(sizes)
    step = fk.make_step(READ[name], schedule=fk.constant(0.1))
    before = full_tensors(state.model)
    weight = "head.weight" if name == "before" else "layers.0.linear.weight"
    with pytest.raises(UnreducedError, match=rf"\({weight}\).* not by full_tensor\(\) or to_local"):
        step(state, vectors(rank))
    assert is_kept(state.model, before)
    fk.make_step(READ[name], schedule=fk.constant(0.1), audit=False)(state, vectors(rank))


def _slope(model, batch):
    """A gradient penalty: it differentiates through the gradient."""
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return fk.Loss(out.square().sum() + slope.square().sum(), len(x))


OUTSIDE = "computes with sharded parameters outside the model's forward.* weight decay"
MIXED = {
    "all squares": (_all_squares, OUTSIDE),
    "module inside": (_module_inside, OUTSIDE),
    "kept": (vectors_loss, r"FSDP has freed\. Either FSDP saw"),
    "slope": (_slope, "FSDP has freed.* loss_fn differentiates through the"),
}


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("all squares", {"tp": 2}, {}),
        ("module inside", REPLICAS, {}),
        ("kept", REPLICAS, {}),
        ("slope", {}, {}),
        ("slope", {}, {"reshard_after_forward": False}),
    ],
)
@on_ranks(2)
def test_shards_that_meet_plain_tensors_and_blocks_that_fsdp_cannot_follow_are_named(
    rank, world, name, sizes, options
):
    state, (loss_fn, message) = _state(sizes, name, **options), MIXED[name]
    with pytest.raises(ValueError, match=message):
        fk.accumulate(state, vectors(rank), loss_fn)
    assert all(p.grad is None for p in state.model.parameters())
