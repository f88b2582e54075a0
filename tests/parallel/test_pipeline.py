"""Cutting a model into stages: balance, names, what goes where, and what is refused."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
from lab import SPEC
from ranks import run_ranks
from torch import nn

import forgekit as fk
from forgekit.parallel.pipeline.split import balance, cost_of, split_model
from forgekit.parallel.pipeline.stage import Absent, Leaf
from forgekit.parallel.pipeline.stages import Stages

DEEP = attrs.evolve(SPEC, layers=4, dropout=0.1)


def _largest(costs, bounds, first, last):
    extra = [first, *[0] * (len(bounds) - 3), last] if len(bounds) > 2 else [first + last]
    return max(sum(costs[a:b]) + e for a, b, e in zip(bounds, bounds[1:], extra, strict=False))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_no_other_cut_has_a_cheaper_largest_stage(stages):
    generator = torch.Generator().manual_seed(stages)
    for _ in range(20):
        costs = torch.randint(1, 9, (7,), generator=generator).tolist()
        first, last = torch.randint(0, 20, (2,), generator=generator).tolist()
        every = (
            [0, *inner, len(costs)]
            for inner in itertools.combinations(range(1, len(costs)), stages - 1)
        )
        best = min(_largest(costs, bounds, first, last) for bounds in every)
        bounds = balance(costs, stages, first, last)
        assert _largest(costs, bounds, first, last) == best
        assert len(bounds) == stages + 1


def test_a_large_vocabulary_takes_blocks_from_the_last_stage():
    block = cost_of(fk.Transformer(DEEP).layers[0])
    spec = attrs.evolve(DEEP, layers=8, vocab_size=2 * int(block) // DEEP.dim)
    assert split_model(fk.Transformer(spec), "layers", 2, [0]).last_blocks == [
        "layers.4",
        "layers.7",
    ]


def _split(model, blocks="layers", stages=2, mine=(0,)):
    return split_model(model, blocks, stages, list(mine))


def test_a_rank_holds_its_stages_under_the_models_names():
    names = [name for name, _ in fk.Transformer(DEEP).named_parameters()]
    held = []
    for mine in ([0, 3], [1, 2]):
        model = fk.Transformer(DEEP)
        pieces = _split(model, stages=4, mine=mine)
        own = [name for name, _ in model.named_parameters()]
        in_stages = [name for m in _modules(pieces) for name, _ in m.named_parameters()]
        assert sorted(own) == sorted(in_stages)
        held += own
    assert sorted(held) == sorted(names)
    assert len(model.layers) == 4


def _modules(pieces):
    return [stage.module for stage in pieces.stages]


def test_dropout_is_in_one_stage_and_what_serves_blocks_in_all():
    model = fk.Transformer(DEEP)
    model.rotary = nn.Module()
    model.rotary.register_buffer("frequencies", torch.ones(2))
    model.act = nn.GELU()
    pieces = _split(model, stages=2, mine=[0, 1])
    first, last = _modules(pieces)
    assert isinstance(first.dropout, nn.Dropout)
    assert isinstance(last.dropout, Absent)
    assert isinstance(first.norm, Absent)
    assert first.rotary is last.rotary is model.rotary
    assert first.act is last.act is model.act
    assert isinstance(model.dropout, nn.Dropout)


def test_an_absent_part_answers_for_its_settings_and_no_more():
    linear = nn.Linear(3, 4)
    linear.kind = "sliding"
    absent = Absent(linear, "layers.3")
    assert absent.kind == "sliding"
    assert absent.in_features == 3
    assert not list(absent.parameters())
    assert not hasattr(absent, "weight")
    with pytest.raises(AttributeError, match=r"layers\.3, which another .* is read for 'weight'"):
        _ = absent.weight
    with pytest.raises(
        RuntimeError, match=r"layers\.3, which another .* holds, is called; a stage"
    ):
        absent(torch.ones(2))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 5, 8), (3, 7, 8)),
        ((2, 5, 5), (3, 7, 5)),  # as wide as long
        ((2, 4, 5, 8), (3, 4, 7, 8)),  # heads before positions
        ((5, 8), (7, 8)),  # without rows
        ((5,), (7,)),
        ((2,), (3,)),
        ((2, 8), (3, 8)),  # without positions
        ((), ()),
    ],
)
def test_shapes_follow_rows_and_positions(shape, expected):
    leaf = Leaf(shape, torch.float32)
    assert leaf.scaled((2, 5), (2, 5)) == leaf
    assert leaf.scaled((2, 5), (3, 7)) == Leaf(expected, torch.float32)


def test_shapes_follow_positions_that_tensor_parallelism_divides():
    assert Leaf((2, 4, 6), torch.float32).scaled((2, 8), (3, 10)).shape == (3, 5, 6)


def test_hooks_on_a_stage_are_not_hooks_on_the_model():
    """FSDP hooks each stage; the model it was copied from, and other stages, must not run them."""
    model = fk.Transformer(DEEP)
    pieces = _split(model, stages=2, mine=[0, 1])
    first, last = _modules(pieces)
    first.register_forward_hook(lambda *_: None)
    assert not model._forward_hooks
    assert not last._forward_hooks


class _Nested(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.net = nn.Module()
        self.net.stem = nn.Linear(3, 3)
        self.net.body = nn.Sequential(*(nn.Linear(3, 3) for _ in range(blocks)))
        self.top = nn.Linear(3, 2)

    def forward(self, x):
        return self.top(self.net.body(self.net.stem(x)))


def test_a_list_two_names_down_is_cut_with_its_neighbours():
    pieces = _split(_Nested(), "net.body", mine=[0, 1])
    first, last = _modules(pieces)
    assert isinstance(first.top, Absent)
    assert isinstance(last.net.stem, Absent)
    assert pieces.last_blocks == ["net.body.0", "net.body.1"]
    own = _Nested()
    _split(own, "net.body", mine=[1])
    held = {name for name, _ in own.named_parameters()}
    assert held == {f"{m}.{p}" for m in ("net.body.1", "top") for p in ("weight", "bias")}


def test_fewer_blocks_than_stages_are_refused():
    message = r"'layers' has 4 blocks for 8 pipeline stages; .* Use at least 8 blocks, or .* most 4"
    with pytest.raises(ValueError, match=message):
        _split(fk.Transformer(DEEP), stages=8)


def test_parameters_around_the_blocks_are_refused():
    model = _Nested()
    model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"_Nested holds the parameters \['scale'\] in itself"):
        _split(model, "net.body")
    model = _Nested()
    model.net.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"\['scale'\] in itself, or around the list"):
        _split(model, "net.body")


def test_tied_parameters_are_refused():
    with pytest.raises(
        ValueError, match=r"embedding\.weight and output\.weight are one tensor, or"
    ):
        _split(fk.Transformer(attrs.evolve(DEEP, tied=True)))
    model = _Nested()
    model.net.body[1] = model.net.body[0]
    with pytest.raises(ValueError, match=r"net\.body\.0\.weight and .* are one tensor"):
        _split(model, "net.body")
    model = _Nested()
    model.net.body[0].weight = model.net.stem.weight  # both in the first stage
    _split(model, "net.body")


def _call_the_model(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(pp=world), device="cpu")
    model = fk.Transformer(DEEP)
    Stages(model, mesh, "zbv")
    shown = f"2 of 4 pipeline stages \\({rank}, {3 - rank}\\) of Transformer"
    with pytest.raises(RuntimeError, match=f"this rank holds {shown}, so it cannot be called"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def test_a_model_of_which_a_rank_holds_stages_cannot_be_called():
    run_ranks(_call_the_model, 2)


def _without_layers(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(pp=world), device="cpu")
    message = r"no list 'layers' to .* split into pipeline stages; .* blocks=; .*\['net\.body'\]"
    with pytest.raises(ValueError, match=message):
        fk.parallelize(_Nested(), mesh)
    fk.parallelize(_Nested(), mesh, blocks="net.body")


def test_a_pipeline_of_a_model_without_layers_asks_for_their_name():
    run_ranks(_without_layers, 2)
