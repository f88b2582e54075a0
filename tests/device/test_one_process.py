"""One process on the pretend device: everything around a step, as on the CPU."""

from __future__ import annotations

import torch
from device.pretend import NAME
from oracle import SPEC, full_tensors
from ranks import run_ranks
from torch import nn

import forgekit as fk

SETUP = "device.pretend:install"


class Foreign(nn.Module):
    """A model that fills itself."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.out = nn.Linear(4, 7)

    def forward(self, ids):
        return self.out(self.norm(self.embed(ids)))


MODELS = {"own": lambda: fk.Transformer(SPEC), "foreign": Foreign}


def starts(_rank, _world, device):
    mesh = fk.build_mesh(device=device)
    modules = [torch, *([torch.get_device_module(device)] if device != "cpu" else [])]
    found = {}
    for name, build in MODELS.items():
        with torch.device("meta"):
            model = build()
        found[name] = full_tensors(fk.parallelize(model, mesh, seed=3))
        with torch.device(device):
            model = build()
        before = [module.get_rng_state() for module in modules]
        fk.init_weights(model, 3)
        assert all(map(torch.equal, before, [module.get_rng_state() for module in modules]))
        found[f"{name}, filled"] = full_tensors(model)
    return {
        (model, name): tensor.cpu()
        for model, all_ in found.items()
        for name, tensor in all_.items()
    }


def test_every_device_starts_from_the_same_weights():
    (there,), (here,) = run_ranks(starts, 1, NAME, setup=SETUP), run_ranks(starts, 1, "cpu")
    assert there.keys() == here.keys()
    for name in here:
        assert torch.equal(there[name], here[name]), name
