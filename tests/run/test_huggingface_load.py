"""Directories of transformers, read into a Transformer in any layout."""

from __future__ import annotations

import attrs
import pytest
import torch
from covering import some_of
from lab import full, relative_error
from pool import run_again
from run.huggingface_models import EXPORTED, MODELS, load, logits_of, save_model, some_ids

import forgekit as fk
from forgekit.model.moe import MoE


@pytest.mark.parametrize("kind", some_of(MODELS, *EXPORTED))
def test_logits_equal_those_of_transformers(kind, tmp_path):
    expected = logits_of(save_model(kind, tmp_path), some_ids())
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load(tmp_path)
    assert relative_error({"": logits_of(ours, some_ids())}, {"": expected}) < 1e-5
    experts = [block.experts for block in ours.modules() if isinstance(block, MoE)]
    is_scaled = ours.spec.rope_scaling is not None
    for one in experts:  # routing is no small part of it
        one.down.data.zero_()
    ours.spec = attrs.evolve(ours.spec, rope_scaling=None)  # nor is the scaling
    if experts or is_scaled:
        assert relative_error({"": logits_of(ours, some_ids())}, {"": expected}) > 1e-2


def add_dora(model):
    return fk.add_lora(model, rank=2, dora=True, targets=("*.query", "*.down"))


def test_lengths_of_rows_are_those_of_the_weights_that_were_read(tmp_path):
    theirs, ids = save_model("Llama", tmp_path), some_ids()
    model = add_dora(fk.Transformer(fk.huggingface_spec(tmp_path), seed=3))
    fk.load_huggingface(model, tmp_path)
    expected = logits_of(theirs, ids)
    assert relative_error({"": logits_of(model.eval(), ids)}, {"": expected}) < 1e-5
    with torch.no_grad():  # an adapter that has learned keeps its lengths
        query, down = model.layers[0].attention.query, model.layers[1].attention.query
        query.lora_B.fill_(0.1)
        query.lora_magnitude_vector.fill_(0.7)
        down.lora_magnitude_vector.fill_(0.7)
    fk.load_huggingface(model, tmp_path)
    assert bool((query.lora_magnitude_vector == 0.7).all())
    assert torch.equal(down.lora_magnitude_vector, down.weight.norm(dim=1))


def _load_with_lengths(rank, world, directory, sizes):
    mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
    with torch.device("meta"):
        model = add_dora(fk.Transformer(fk.huggingface_spec(directory)))
    model = fk.parallelize(model, mesh)
    fk.load_huggingface(model, directory)
    return {n: full(p).detach() for n, p in model.named_parameters() if "magnitude" in n}


@pytest.mark.parametrize("dimension", some_of(["dp_shard", "tp", "pp"], "dp_shard", "pp"))
def test_every_layout_takes_them_of_the_whole_weights(dimension, tmp_path):
    save_model("Llama", tmp_path, vocab_size=32)
    weights = dict(load(tmp_path).named_parameters())
    held = run_again(_load_with_lengths, 2, tmp_path, {"dp_shard": 1, dimension: 2})
    found = {name: lengths for one in held for name, lengths in one.items()}
    assert len(found) == 6
    for name, lengths in found.items():
        weight = weights[name.replace("lora_magnitude_vector", "weight")]
        assert torch.equal(lengths, weight.norm(dim=1)), name
