"""Splitting a model into stages: balance, names, what goes where, and what is refused."""

from __future__ import annotations

import itertools

import attrs
import pytest
import torch
from lab import SPEC
from pool import run_ranks
from torch import nn

import forgekit as fk
from forgekit.parallel.pipeline.split import balance, cost_of, split_model
from forgekit.parallel.pipeline.stage import Absent, Leaf

DEEP = attrs.evolve(SPEC, layers=4, dropout=0.1)


def _largest(costs, bounds, first, last):
    whole = [first + costs[0], *costs[1:-1], costs[-1] + last]
    return max(sum(whole[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_no_other_split_has_a_cheaper_largest_stage(stages):
    generator = torch.Generator().manual_seed(stages)
    for _ in range(20):
        costs = torch.randint(1, 9, (7,), generator=generator).tolist()
        first, last = torch.randint(0, 20, (2,), generator=generator).tolist()
        inner = itertools.combinations(range(1, 7), stages - 1)
        best = min(_largest(costs, [0, *bounds, 7], first, last) for bounds in inner)
        bounds = balance(costs, stages, first, last)
        assert _largest(costs, bounds, first, last) == best
        assert len(bounds) == stages + 1


def test_a_large_vocabulary_takes_blocks_from_the_last_stage():
    block = cost_of(fk.Transformer(DEEP).layers[0])
    spec = attrs.evolve(DEEP, layers=8, vocab_size=2 * int(block) // DEEP.dim)
    pieces = split_model(fk.Transformer(spec), "layers", 2, [0])
    assert pieces.last_blocks == ["layers.4", "layers.7"]


def _modules(model, blocks="layers", stages=2, mine=(0, 1)):
    return [stage.module for stage in split_model(model, blocks, stages, list(mine)).stages]


def test_dropout_is_in_one_stage_and_what_serves_blocks_in_all():
    model = fk.Transformer(DEEP)
    model.rotary = nn.Module()
    model.rotary.register_buffer("frequencies", torch.ones(2))
    first, last = _modules(model)
    assert isinstance(first.dropout, nn.Dropout)
    assert isinstance(last.dropout, Absent)
    assert isinstance(first.norm, Absent)
    assert first.rotary is last.rotary is model.rotary
    # FSDP hooks each stage; the model it was copied from, and other stages, must not run them.
    first.register_forward_hook(lambda *_: None)
    assert not model._forward_hooks
    assert not last._forward_hooks
    # Code between the blocks may ask an absent one for its settings.
    model.layers[3].kind = "sliding"
    assert _modules(model)[0].layers[3].kind == "sliding"


SCALED = {(2, 8, 3): (3, 10, 3), (2, 8, 8): (3, 10, 8), (2, 4, 3): (3, 5, 3), (8,): (10,), (): ()}
"""Among them as wide as long, positions that tensor parallelism divides, and without rows."""


@pytest.mark.parametrize("shape", SCALED)
def test_shapes_follow_rows_and_positions(shape):
    leaf = Leaf(shape, torch.float32)
    assert leaf.scaled((2, 8), (3, 10)) == Leaf(SCALED[shape], torch.float32)


class _Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Module()
        self.net.stem = nn.Linear(3, 3)
        self.net.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.top = nn.Linear(3, 2)


def test_a_list_two_names_down_is_split_with_its_neighbours():
    model = _Nested()
    model.net.body[0].weight = model.net.stem.weight  # both in the first stage
    first, last = _modules(model, "net.body")
    assert isinstance(first.top, Absent)
    assert isinstance(last.net.stem, Absent)
    model = _Nested()
    _modules(model, "net.body", mine=[1])
    held = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert held == {"net.body.1", "top"}


def test_parameters_of_no_single_stage_are_refused():
    for name in ("", "net"):
        model = _Nested()
        model.get_submodule(name).scale = nn.Parameter(torch.ones(3))
        message = r"_Nested has the parameters \['scale'\] outside the mod"
        with pytest.raises(ValueError, match=message):
            _modules(model, "net.body")
    model = _Nested()
    model.net.body[1] = model.net.body[0]
    with pytest.raises(ValueError, match=r"net\.body\.0\.weight and .* are one tensor or .* pp=1"):
        _modules(model, "net.body")


def _set_up(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(pp=world), device="cpu")
    message = r"no list 'layers' to .* split into pipeline stages; .* blocks=: .*\['net\.body'\]"
    with pytest.raises(ValueError, match=message):
        fk.parallelize(_Nested(), mesh)
    model = fk.parallelize(_Nested(), mesh, blocks="net.body")
    shown = rf"the pipeline stages \[{rank}\] of 2 of _Nested"
    with pytest.raises(RuntimeError, match=f"this rank holds {shown}, so it cannot be called"):
        model(torch.zeros(1, 3))


def test_blocks_have_to_be_named_and_a_model_in_stages_cannot_be_called():
    run_ranks(_set_up, 2)
