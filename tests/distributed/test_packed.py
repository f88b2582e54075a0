"""A base in four bits in each layout: the bits, gradients and merged weights of one process."""

from __future__ import annotations

import math
from functools import cache, partial

import packed
import pytest
import torch
from adapted import add_products, batches_of, loss_fn, move
from distributed.test_adapters import ranks_of, together
from lab import full, lay_out, mean_gradients
from pool import run_again

import forgekit as fk

reference = cache(packed.reference)

CASES = {"fsdp2": ("packed", {"dp_shard": 2}, {})}
LONG = {
    "hsdp": ("packed", {"dp_replicate": 2, "dp_shard": 2}, {}),
    "fsdp4": ("packed", {"dp_shard": 4}, {}),
    "cp2": ("packed", {"dp_shard": 1, "cp": 2}, {}),
    "pp2": ("packed", {"dp_shard": 1, "pp": 2}, {}),
    "fsdp2 pp2": ("packed", {"dp_shard": 2, "pp": 2}, {}),
    "recomputed": ("packed", {"dp_shard": 2}, {"activation_checkpoint": "full"}),
    "selective": ("packed", {"dp_shard": 2}, {"activation_checkpoint": "selective"}),
    "kept": ("packed", {"dp_shard": 2}, {"reshard_after_forward": False}),
}


def find(rank, world, folder, sizes, options):
    state = lay_out(move(packed.build()), sizes, partial(fk.adamw, weight_decay=0.5), **options)
    model, mesh = state.model, state.mesh
    drawn = fk.parallelize(packed.build(device="meta"), mesh, **options)
    found = {"drawn": whole(drawn)}
    turn, ranks = fk.data_ranks(mesh)
    mine = [row[turn] for row in batches_of(ranks)]
    found["gradients"] = mean_gradients(state, mine, loss_fn)
    fk.merge_lora(model)
    named = ((n, model.get_submodule(n.removesuffix(".weight"))) for n in packed.packed_of(model))
    found["merged"] = {name: full(layer.merged) for name, layer in named}
    fk.unmerge_lora(model)
    step = fk.make_step(loss_fn, schedule=fk.constant(0.1), max_norm=1.0)
    state, _ = step(state, mine)
    found["stepped"] = whole(state.model)
    found["saved"] = {name: full(p).clone() for name, p in state.model.named_parameters()}
    fk.checkpoint_save(state, folder / "run", blocking=True)
    other = fk.TrainState.create(drawn, fk.adamw(drawn, weight_decay=0.5), mesh=mesh)
    other = fk.checkpoint_load(other, folder / "run")
    found["resumed"] = all(
        torch.equal(full(p), full(q))
        for p, q in zip(other.model.parameters(), state.model.parameters(), strict=True)
    )
    other = fk.checkpoint_load(other, folder / "alone")
    found["of one"] = {name: full(p).clone() for name, p in other.model.named_parameters()}
    fk.load_huggingface(state.model, folder / "base")
    found["loaded"] = whole(state.model)
    return found


def whole(model):
    return {name: full(p).clone() for name, p in packed.packed_of(model).items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], value) for name, value in expected.items())


def start_alone(seed):
    model = move(packed.build())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.requires_grad:
                parameter += 0.01 * (seed + number)
    return fk.TrainState.create(model, fk.adamw(model, weight_decay=0.5))


def check(case, folder):
    _, sizes, options = case
    before = start_alone(1)
    fk.checkpoint_save(before, folder / "alone", blocking=True)
    fk.save_huggingface(fk.Transformer(packed.SPEC, seed=9), folder / "base")
    parts = run_again(find, ranks_of(sizes), folder, sizes, options)
    gradients = together(parts, "gradients")
    expected = reference(math.prod(sizes.get(name, 1) for name in ("dp_replicate", "dp_shard")))
    assert gradients.keys() == expected.keys()
    for name, wanted in expected.items():
        assert float((gradients[name] - wanted).abs().max() / wanted.abs().max()) < 1e-6, name
    alone = move(packed.build())
    assert same(together(parts, "drawn"), packed.packed_of(packed.build()))
    assert same(together(parts, "stepped"), packed.packed_of(alone))
    factors = {n: p.detach() for n, p in alone.named_parameters() if "lora_" in n}
    weights = add_products(packed.unpacked_base() | factors, packed.SCALES)
    for name, value in together(parts, "merged").items():
        assert torch.allclose(value, weights[name], rtol=0, atol=1e-6), name
    fk.load_huggingface(alone, folder / "base")
    assert same(together(parts, "loaded"), packed.packed_of(alone))
    assert all(part["resumed"] for part in parts)
    assert same(together(parts, "of one"), dict(before.model.named_parameters()))
    alone = fk.checkpoint_load(start_alone(2), folder / "run")
    assert same(together(parts, "saved"), dict(alone.model.named_parameters()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_packed_base_trains_as_in_one_process(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize("case", LONG.values(), ids=LONG.keys())
def test_a_packed_base_trains_as_in_one_process_in_more_layouts(case, tmp_path):
    check(case, tmp_path)
