"""Initial weights come from (seed, name) alone, in whatever model and layout the name stands."""

from __future__ import annotations

import itertools
import math
import warnings

import attrs
import pytest
import torch
from covering import in_turn, some_of
from lab import SPEC, full_tensors
from pool import run_again
from torch import nn

import forgekit as fk


def weights(spec=SPEC, seed=0):
    return full_tensors(fk.Transformer(spec, seed=seed))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_parameter_has_the_same_values_in_a_deeper_model():
    """Projections into the residual stream have the same direction and a width by depth."""
    shallow, deep = weights(attrs.evolve(SPEC, layers=1)), weights(attrs.evolve(SPEC, layers=4))
    assert shallow.keys() < deep.keys()
    for name, values in shallow.items():
        if name.endswith(("attention.output.weight", "down.weight")):
            torch.testing.assert_close(deep[name], values / 2, rtol=1e-6, atol=0)
        else:
            assert torch.equal(deep[name], values), name


def test_seeds_and_names_give_different_values():
    drawn = [
        values.flatten()[:8] / values.std()
        for seed in (0, 1)
        for values in weights(seed=seed).values()
        if values.ndim > 1
    ]
    assert len(drawn) == 2 * (2 + 7 * SPEC.layers)
    for a, b in itertools.combinations(drawn, 2):
        assert not torch.allclose(a, b)


def test_widths_are_as_documented():
    spec = attrs.evolve(SPEC, dim=96, ffn_dim=256, vocab_size=300, layers=8)
    for name, values in weights(spec).items():
        if name.endswith("norm.weight"):
            assert torch.equal(values, torch.ones_like(values))
            continue
        narrow = name.endswith(("attention.output.weight", "down.weight"))
        std = 0.02 / math.sqrt(2 * 8) if narrow else 0.02
        assert values.std().item() == pytest.approx(std, rel=0.05), name
        assert abs(values.mean().item()) < std / 10


class Foreign(nn.Module):
    """Nothing of ours: layers of torch, a nested list, two layers of the same shape."""

    def __init__(self, more=0):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.net = nn.Module()
        self.net.body = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2 + more)
        )
        self.no_bias = nn.Linear(8, 8, bias=False)
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.net.body:
            x = x + layer(x)
        return self.no_bias(x) @ self.embed.weight.T


def foreign_weights(seed=0, more=0):
    model = Foreign(more)
    fk.init_weights(model, seed)
    return full_tensors(model)


def test_values_are_from_seed_and_name_alone_also_of_foreign_modules():
    expected, ours = foreign_weights(), weights()
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


def test_only_the_named_parameters_are_filled():
    model, expected = Foreign(), foreign_weights(seed=5)
    before = full_tensors(model)
    fk.init_weights(model, 5, only={"net.body.1.0.weight"})
    for name, values in full_tensors(model).items():
        wanted = expected if name == "net.body.1.0.weight" else before
        assert torch.equal(values, wanted[name])


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Module()
        self.part.gain = nn.Parameter(torch.zeros(400))


class OwnWidth(OwnParameter):
    def initial_std(self, name):
        return 0.5 if name == "part.gain" else None


def test_a_module_without_a_method_is_an_error_that_names_it():
    message = r"'part' \(Module\) has the parameters \['gain'\] and no reset_parameters\(\)"
    with pytest.raises(ValueError, match=message + r".*initial_std\(name\) to the model"):
        fk.init_weights(OwnParameter(), 0)


def test_a_model_may_give_its_own_widths():
    model = OwnWidth()
    fk.init_weights(model, 0)
    assert model.part.gain.std().item() == pytest.approx(0.5, rel=0.1)


class TiedForeign(Foreign):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight


def test_a_shared_parameter_is_filled_under_its_first_name():
    """The name under which ``named_parameters`` lists it, in every layout."""
    model = TiedForeign()
    fk.init_weights(model, 0)
    assert torch.equal(model.embed.weight, foreign_weights()["embed.weight"])
    assert model.head.weight is model.embed.weight


# Layouts

LAYOUTS = {
    "one rank": (1, {}),
    "fsdp 2": (2, {}),
    "hsdp 2x2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


def _build(kind):
    return Foreign() if kind == "foreign" else fk.Transformer(SPEC, seed=7)


def _from_meta(rank, world, sizes, kind, options):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    with torch.device("meta"):
        model = _build(kind)
    if kind == "foreign":
        model.scale = torch.tensor(3.0)
    with warnings.catch_warnings():
        # torch's own compiler uses it at import.
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
        model = fk.parallelize(model, mesh, seed=7, **options)
    assert all(not p.is_meta for p in model.parameters())
    return full_tensors(model)


def _from_cpu(rank, world, sizes, kind, options):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    return full_tensors(fk.parallelize(_build(kind), mesh, seed=99, **options))


@pytest.mark.parametrize(("layout", "build"), in_turn(list(LAYOUTS), [_from_meta, _from_cpu]))
def test_every_layout_starts_from_bitwise_the_same_weights(layout, build):
    world, sizes = LAYOUTS[layout]
    expected = weights(seed=7)
    for found in run_again(build, world, sizes, "transformer", {}):
        assert equal(found, expected)


@pytest.mark.parametrize("layout", some_of(LAYOUTS, "one rank", "fsdp 2"))
def test_a_foreign_model_starts_from_the_same_weights_too(layout):
    world, sizes = LAYOUTS[layout]
    for found in run_again(_from_meta, world, sizes, "foreign", {"blocks": "net.body"}):
        assert equal(found, foreign_weights(seed=7))


@pytest.mark.parametrize(
    ("layout", "what", "compile"),
    [
        ("hsdp 2x2", "full", False),
        pytest.param("fsdp 2", "selective", True, marks=pytest.mark.oracle),
    ],
)
def test_names_and_values_are_the_same_with_recomputation_and_compilation(layout, what, compile):
    world, sizes = LAYOUTS[layout]
    options = {"activation_checkpoint": what, "compile": compile, "precision": "bf16"}
    for found in run_again(_from_meta, world, sizes, "transformer", options):
        assert equal(found, weights(seed=7))
