"""Layers of experts over ranks: as in one process, and what travels between them.

The layouts of the oracle have as many experts on each rank; here some ranks hold fewer.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import torch
import torch.distributed as dist
from covering import first_of
from lab import alone, full, full_tensors, lay_out, relative_error
from pool import run_ranks
from saved import everything
from steps import test_experts as steps
from steps.test_experts import balance, is_same, loss_fn, routed, rows, split
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import forgekit as fk
from forgekit.mesh import data_ranks, expert_ranks, expert_view
from forgekit.model.moe import MoE
from forgekit.parallel.expert import apply_experts, find_experts

MOE = attrs.evolve(steps.MOE, experts=7, shared=2)
SPEC = attrs.evolve(steps.SPEC, vocab_size=20, kv_heads=2, layers=2, moe=MOE)
LIMIT = 0.05
"""Below the gradient's norm, so that the one factor clips."""
GROUPS = {"experts": 6, "router": "sigmoid", "groups": 3, "top_groups": 2}
LAYOUTS = {
    "EP2xTP2, 3 experts": (4, {"dp_shard": 2, "tp": 2, "ep": 2}, {"experts": 3}),
    "EP4": (4, {"ep": 4}, {}),
    "EP2, 3 experts": (2, {"ep": 2}, {"experts": 3}),
    "TP2, groups": (2, {"tp": 2}, GROUPS),
    "EP2xHSDP2xTP2": (8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "ep": 2}, {"experts": 6}),
    "EP4xTP2": (8, {"dp_shard": 4, "tp": 2, "ep": 4}, {}),
}


def spec_of(changes):
    return attrs.evolve(SPEC, moe=attrs.evolve(MOE, **changes))


def build(**changes):
    """A model with scores far apart, loads that are not even, and an expert 100 times the rest."""
    model = fk.Transformer(spec_of(changes)).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(12)
        for layer in routed(model):
            layer.experts.down[0].mul_(10)
            load = torch.rand(layer.spec.experts, generator=generator) + 0.1
            layer.router.load.copy_(load / load.sum())
            layer.router.selection_bias[-1] = -9.0  # the last rank's experts may get no token
    return model


def momentum(model):
    return torch.optim.SGD(model.parameters(), momentum=0.5)


def mine(batch, mesh):
    """This rank's rows of a batch."""
    rank, ranks = data_ranks(mesh)
    return batch[rank::ranks].contiguous()


def train(state, sizes=(4, 4)):
    """Two clipped steps: gradients and counts of the first, and what is left by both."""
    for index in range(2):
        whole = rows(index, positions=12)
        if index:  # with four ranks the first one has no token
            whole["doc_ids"][::4], whole["labels"][::4] = -1, -100
        batches = [mine(batch, state.mesh) for batch in split(whole, sizes)]
        totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
        if index == 0:
            gradients = {name: full(g) for name, g in fk.gradients(state, totals).items()}
            counts = totals.sums["experts", "counts"].tolist()
            assert fk.clip(totals).grad_norm > 2 * LIMIT
        state = fk.update(state, fk.clip(totals, LIMIT), lr=0.05, totals=totals)
    return state, gradients, counts


def contents(state):
    """All that a checkpoint holds, and balance."""
    return everything(state), balance(state)


def _train(rank, world, sizes, changes, options, folder):
    """From a checkpoint of one process two steps, and a checkpoint of what they leave."""
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    with torch.device("meta"):
        model = fk.Transformer(spec_of(changes))
    model = fk.parallelize(model, mesh, seed=5, **options)
    fresh = full_tensors(model)
    loads = [layer.router.load.clone() for layer in routed(model)]
    state = fk.TrainState.create(model.double(), momentum(model), mesh=mesh)
    state = fk.checkpoint_load(state, folder / "0")
    loaded = contents(state)
    sizes = (4, 4) if data_ranks(mesh)[1] <= 4 else (8,)  # no rank without a row
    state, gradients, counts = train(state, sizes)
    fk.checkpoint_save(state, folder / "1").wait()
    return fresh, loads, loaded, gradients, counts, contents(state)


def error(found, expected):
    """The worst error of any parameter, each on its own scale."""
    assert found.keys() == expected.keys()
    return max(relative_error({n: found[n]}, {n: expected[n]}) for n in expected)


same = partial(torch.testing.assert_close, rtol=0, atol=0)


CHOSEN = [("EP2xTP2, 3 experts", "selective"), ("EP2, 3 experts", "full")]


@pytest.mark.parametrize(
    ("layout", "what"), first_of(CHOSEN, itertools.product(LAYOUTS, ["none", "full", "selective"]))
)
def test_layers_of_experts_start_train_and_resume_as_in_one_process(layout, what, tmp_path):
    world, sizes, changes = LAYOUTS[layout]
    expected = full_tensors(fk.Transformer(spec_of(changes), seed=5))
    state, *_ = train(alone(build(**changes), momentum))
    saved = contents(state)
    fk.checkpoint_save(state, tmp_path / "0", blocking=True)
    state, gradients, counts = train(state)
    after, balanced = contents(state)
    options = {"activation_checkpoint": what}
    by_rank = run_ranks(_train, world, sizes, changes, options, tmp_path, timeout_s=20 * world)
    for fresh, loads, loaded, *trained in by_rank:
        assert all(torch.equal(fresh[name], expected[name]) for name in expected)
        assert all((load == 1 / len(load)).all() for load in loads)
        same(loaded, saved)
        assert error(trained[0], gradients) < 1e-10
        assert trained[1] == counts
        assert error(trained[2][0], after) < 1e-10
        assert is_same(trained[2][1], balanced)
    again = fk.checkpoint_load(alone(build(**changes), momentum), tmp_path / "1")
    same(contents(again), by_rank[0][-1])


# What travels


@attrs.define
class Watched:
    """Work under way that says when it is waited for."""

    work: Any
    events: list[Any]

    def wait(self):
        self.events.append(("wait",))
        return self.work.wait()


def _exchange(rank, world, changes):
    state = lay_out(build(**changes), {"ep": world}, momentum)
    events, send = [], dist.all_to_all_single

    def watched(arrived, rows, *args, **options):
        events.append(("send", rows.numel() * rows.element_size(), rows.dtype))
        work = send(arrived, rows, *args, **options)
        return Watched(work, events) if options.get("async_op") else work

    for layer in routed(state.model):
        layer.shared.register_forward_hook(lambda *_: events.append(("shared",)))
    batches = [mine(batch, state.mesh) for batch in split(rows(positions=12), [4, 4])]
    with patch.object(dist, "all_to_all_single", watched):
        totals = fk.reduce_totals(fk.accumulate(state, batches, loss_fn), state)
    gradients = {name: full(g) for name, g in fk.gradients(state, totals).items()}
    noted = [totals["experts", name].tolist() for name in ("counts", "kept")]
    return gradients, events, *noted


@pytest.mark.parametrize("capacity", [0.9, pytest.param(None, marks=pytest.mark.oracle)])
def test_routed_tokens_travel_and_nothing_else(capacity):
    """Four exchanges of the rows that are computed, in forward and back, and the numbers of them.

    With a capacity each rank is a micro-batch of its own: the share that it drops is that of one
    process which takes them one by one.
    """
    changes = {"capacity": capacity, "experts": 3}
    state = alone(build(**changes), momentum)
    apart = [b[rank::2] for b in split(rows(positions=12), [4, 4]) for rank in range(2)]
    totals = fk.reduce_totals(fk.accumulate(state, apart, loss_fn), state)
    expected = dict(fk.gradients(state, totals))
    by_rank = run_ranks(_exchange, 2, changes)
    for gradients, _, counts, kept in by_rank:
        assert error(gradients, expected) < 1e-10
        assert counts == totals["experts", "counts"].tolist()
        assert kept == totals["experts", "kept"].tolist()
    computed, choices = sum(kept), sum(map(sum, counts))
    assert (computed < choices) == (capacity is not None)
    sent = [event[1:] for _, events, *_ in by_rank for event in events if event[0] == "send"]
    dim, item, ranks, layers, micros, each = 16, 8, 2, 1, 2, 2
    numbers = [size for size, dtype in sent if dtype == torch.int64]
    assert numbers == [ranks * each * 8] * (ranks * layers * micros)
    assert sum(size for size, dtype in sent if dtype == torch.float64) == 4 * computed * dim * item
    # Shared experts compute before rows that are on their way are read, and waited for.
    orders = [[event[0] for event in events] for _, events, *_ in by_rank]
    forward = ["send", "send", "shared", "wait", "send", "wait"]
    backward = ["send", "wait"] * 2
    assert orders == [(forward + backward) * 2] * 2


# Meshes, names and errors


def layer(experts=7):
    return MoE(16, attrs.evolve(MOE, experts=experts), "layer")


REFUSED = [
    (lambda: layer().experts, "", {"ep": 4}, "neither '' nor a module above it has a `dispatch`"),
    (layer, "", {"ep": 4}, "is for modules whose parameters"),
    (lambda: layer(5), "experts", {"ep": 4}, r"would have none; use at most ep=3\."),
    (layer, "experts", {"ep": 2, "tp": 2}, "travel 2 times over"),
]


def _meshes(rank, world):
    """Equal in torch's eyes; each knows its own experts, and a mesh by torch alone has none."""
    for build_model, name, sizes, message in REFUSED:
        view = expert_view(fk.build_mesh(fk.MeshSpec(**sizes), device="cpu"))
        model = build_model()
        with pytest.raises(ValueError, match=message):
            apply_experts(model, view, find_experts(model, {name: "expert"}))
    view = expert_view(fk.build_mesh(fk.MeshSpec(pp=2, dp_shard=1, cp=2, ep=2), device="cpu"))
    assert view["ep"].mesh.tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]  # neighbours
    meshes = [fk.build_mesh(fk.MeshSpec(ep=ep), device="cpu") for ep in (2, 1, 4)]
    meshes.append(init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)))
    return [expert_ranks(mesh) for mesh in meshes]


def test_what_cannot_be_shared_is_refused_and_meshes_keep_their_own_experts():
    for rank, found in enumerate(run_ranks(_meshes, 4)):
        assert found == [(rank % 2, 2), (0, 1), (rank, 4), (0, 1)]


def test_a_module_inside_another_one_is_not_sharded_twice():
    model, plan = nn.Sequential(layer(), layer()), {"0*": "expert", "1.experts*": "expert"}
    assert find_experts(model, plan) == [model[0], model[1].experts]
    with pytest.raises(ValueError, match=r"the plan's pattern '\*\.moe' matches no module"):
        find_experts(model, {"*.moe": "expert"})
