"""Directories of transformers, read into a Transformer in any layout."""

from __future__ import annotations

import attrs
import pytest
from oracle import relative_error
from run.huggingface_models import MODELS, logits_of, save_model, some_ids

import forgekit as fk
from forgekit.model.moe import MoE


def load(directory, **changes):
    model = fk.Transformer(attrs.evolve(fk.huggingface_spec(directory), **changes), seed=5)
    fk.load_huggingface(model, directory)
    return model.eval()


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_transformers(kind, tmp_path):
    theirs = save_model(kind, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, ids = load(tmp_path), some_ids()
    expected = logits_of(theirs, ids)
    assert relative_error({"": logits_of(ours, ids)}, {"": expected}) < 1e-5
    for _, block in ours.named_modules():
        if isinstance(block, MoE):  # routing is no small part of it
            block.experts.down.data.zero_()
    if "rope_parameters" in MODELS[kind]:  # nor is the scaling
        ours.spec = attrs.evolve(ours.spec, rope_scaling=None)
    if "Moe" in kind or "rope_parameters" in MODELS[kind]:
        assert relative_error({"": logits_of(ours, ids)}, {"": expected}) > 1e-2
