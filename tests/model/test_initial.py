"""Initial weights come from (seed, name) alone, in whatever model and layout the name stands."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from lab import SPEC, full_tensors
from torch import nn

import forgekit as fk


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_parameter_has_the_same_values_in_a_deeper_model():
    """Projections into the residual stream have the same direction and a width by depth."""
    models = (fk.Transformer(attrs.evolve(SPEC, layers=layers)) for layers in (1, 4))
    shallow, deep = map(full_tensors, models)
    assert shallow.keys() < deep.keys()
    for name, values in shallow.items():
        if name.endswith(("attention.output.weight", "down.weight")):
            torch.testing.assert_close(deep[name], values / 2, rtol=1e-6, atol=0)
        else:
            assert torch.equal(deep[name], values), name


def test_widths_are_as_documented():
    spec = attrs.evolve(SPEC, dim=96, ffn_dim=256, vocab_size=300, layers=8, qkv_bias=True)
    for name, values in full_tensors(fk.Transformer(spec)).items():
        if name.endswith((".bias", "norm.weight")):
            assert values.eq(0 if name.endswith(".bias") else 1).all()
            continue
        narrow = name.endswith(("attention.output.weight", "down.weight"))
        std = 0.02 / math.sqrt(2 * 8) if narrow else 0.02
        assert values.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(values.mean().item()) < std / 10


class Foreign(nn.Module):
    """Nothing of ours: layers of torch, a nested list, two layers of the same shape."""

    def __init__(self, more=0):
        super().__init__()
        self.embed, self.net = nn.Embedding(11, 8), nn.Module()
        body = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2 + more))
        self.net.body = nn.ModuleList(body)
        self.no_bias = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight  # is filled under its first name, in every layout
        self.register_buffer("scale", torch.tensor(3.0))


def foreign_weights(seed=0, more=0):
    model = Foreign(more)
    fk.init_weights(model, seed)
    return full_tensors(model)


def test_values_are_from_seed_and_name_alone_also_of_foreign_modules():
    expected, ours = foreign_weights(), full_tensors(fk.Transformer(SPEC))
    torch.manual_seed(2)
    model, own = Foreign(), fk.Transformer(SPEC)
    state = torch.get_rng_state()
    for one, values in ((model, expected), (own, ours)):
        fk.init_weights(one, 0)
        assert equal(full_tensors(one), values)
    assert torch.equal(torch.get_rng_state(), state)
    deeper = foreign_weights(more=2)
    assert all(torch.equal(deeper[name], expected[name]) for name in expected)
    first, second = expected["net.body.0.0.weight"], expected["net.body.1.0.weight"]
    assert not torch.equal(first, second)
    assert not torch.equal(foreign_weights(seed=1)["net.body.0.0.weight"], first)
    fk.init_weights(model, 5, only={"net.body.1.0.weight"})  # the named ones alone
    wanted = expected | {"net.body.1.0.weight": foreign_weights(seed=5)["net.body.1.0.weight"]}
    assert equal(full_tensors(model), wanted)


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Module()
        self.part.gain = nn.Parameter(torch.zeros(400))


def test_a_model_may_give_its_own_widths_and_has_to_where_a_module_has_no_method():
    model = OwnParameter()
    message = r"'part' \(Module\) has the parameters \['gain'\], but no reset_parameters\(\)"
    with pytest.raises(ValueError, match=message + r".*initial_std\(name\) to the model"):
        fk.init_weights(model, 0)
    model.initial_std = {"part.gain": 0.5}.get
    fk.init_weights(model, 0)
    assert model.part.gain.std().item() == pytest.approx(0.5, rel=0.1)
