"""Loads of experts: logged from the state."""

from __future__ import annotations

import attrs
import lab
import pytest
import torch
from lab import alone, logits_loss
from pool import run_ranks
from tensordict import TensorDict

import forgekit as fk
from forgekit.metrics.hooks import expert_loads

MOE = fk.MoESpec(experts=4, top_k=2, ffn_dim=8, first=1)
SPEC = attrs.evolve(lab.SPEC, layers=3, moe=MOE)
LAYERS = ["moe/load/layers.1.feed_forward", "moe/load/layers.2.feed_forward"]


def test_loads_are_the_shares_of_the_last_good_step_over_their_mean():
    """Counted here with hooks on the routers: 2 x 6 positions with 2 experts each."""
    model = fk.Transformer(SPEC)
    chosen = {}
    for layer in (1, 2):
        router = model.layers[layer].feed_forward.router
        note = lambda _m, _args, out, name=LAYERS[layer - 1]: chosen.update({name: out[1]})  # noqa: E731
        router.register_forward_hook(note)
    state = alone(model)
    assert expert_loads(state) == dict.fromkeys(LAYERS, [1.0] * 4)
    ids = torch.randint(19, (2, 6), generator=torch.Generator().manual_seed(0))
    batch = TensorDict({"input_ids": ids, "labels": ids}, [2])
    state, _ = fk.make_step(logits_loss, schedule=fk.constant(0.1))(state, [batch])
    found = expert_loads(state)
    assert list(found) == LAYERS
    for name, choice in chosen.items():
        counts = torch.bincount(choice.flatten(), minlength=4)
        assert found[name] == pytest.approx((counts / 6).tolist(), abs=1e-3)
    assert found[LAYERS[0]] != found[LAYERS[1]]
    assert expert_loads(alone(fk.Transformer(attrs.evolve(SPEC, moe=None)))) == {}


def train(mesh=None):
    model = fk.Transformer(SPEC).double()
    model = model if mesh is None else fk.parallelize(model, mesh)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    ids = torch.randint(19, (4, 6), generator=torch.Generator().manual_seed(0))
    batches = TensorDict({"input_ids": ids, "labels": ids}, [4]).split(2)
    return fk.make_step(logits_loss, schedule=fk.constant(0.1))(state, batches)


def _loads_of_a_stage(_rank, _world):
    state, metrics = train(fk.build_mesh(fk.MeshSpec(pp=2), device="cpu"))
    return expert_loads(state), float(metrics["moe/load_max"])


def test_each_pipeline_stage_finds_the_loads_of_all_layers():
    state, metrics = train()
    found = run_ranks(_loads_of_a_stage, 2)
    assert found == [(expert_loads(state), float(metrics["moe/load_max"]))] * 2
    assert len(found[0][0]) == 2
