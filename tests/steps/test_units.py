"""Gradients and norms in units of the mean loss per target, the same in every layout."""

from __future__ import annotations

import attrs
import pytest
import torch
from covering import some_of
from lab import SPEC, build_state, full, global_batch, lay_out, logits_loss, reference_gradients
from pool import run_again

import forgekit as fk

LAYOUTS = {
    "tp2": ({"tp": 2}, 2),
    "pp2-fsdp2": ({"pp": 2}, 4),
    "fsdp2": ({}, 2),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 1}, 2),
    "cp2": ({"cp": 2}, 2),
    "pp2": ({"pp": 2}, 2),
    "tp2-fsdp2": ({"tp": 2}, 4),
}
EVEN = attrs.evolve(SPEC, vocab_size=38)


def _rows(readers):
    """Sequences of 16 positions, as pipelines and slices need them."""
    return [global_batch(readers, seed=seed)[1] for seed in range(3)]


def _measure(rank, world, layout):
    state = lay_out(fk.Transformer(EVEN).double(), layout)
    reader, readers = fk.data_ranks(state.mesh)
    batches = [row[reader] for row in _rows(readers)]
    totals = fk.reduce_totals(fk.accumulate(state, batches, logits_loss), state)
    norms = fk.grad_norms(state, totals)
    layers = fk.metrics.layer_norms(state, totals)
    found = {n: full(g).clone() for n, g in fk.gradients(state, totals).items()}
    return found, norms, layers, float(fk.clip(totals).grad_norm)


@pytest.mark.parametrize("name", some_of(LAYOUTS, *(LAYOUTS.keys() - {"tp2", "pp2-fsdp2"})))
def test_gradients_and_norms_are_those_of_one_process(name):
    layout, world = LAYOUTS[name]
    found = run_again(_measure, world, layout)
    model_ranks = layout.get("tp", 1) * layout.get("cp", 1) * layout.get("pp", 1)
    expected, _ = reference_gradients(fk.Transformer(EVEN), _rows(world // model_ranks))
    largest = max(float(g.abs().max()) for g in expected.values())
    everything = {n: g for gradients, *_ in found for n, g in gradients.items()}
    assert everything.keys() == expected.keys()
    for gradients, norms, layers, total in found:
        for n, gradient in gradients.items():
            assert float((gradient - expected[n]).abs().max()) < 1e-10 * largest
        assert {n: float(v) for n, v in norms.items()} == pytest.approx(
            {n: float(g.norm()) for n, g in expected.items()}, rel=1e-9, abs=1e-12
        )
        layer = [g for n, g in expected.items() if n.startswith("layers.0.")]
        assert float(layers["grad_norm/layers.0"]) == pytest.approx(
            float(torch.cat([g.flatten() for g in layer]).norm()), rel=1e-9
        )
        assert float(sum(n.square() for n in layers.values()) ** 0.5) == pytest.approx(total)


def test_of_frozen_parameters_and_without_targets_norms_are_zero():
    state, batch = build_state({}, 1), global_batch(1)[0][0]
    state.model.embedding.weight.requires_grad_(False)
    totals = fk.reduce_totals(fk.accumulate(state, [batch], logits_loss), state)
    assert "embedding.weight" not in fk.gradients(state, totals)
    assert float(fk.grad_norms(state, totals)["embedding.weight"]) == 0.0
    batch["labels"].fill_(-100)
    totals = fk.reduce_totals(fk.accumulate(state, [batch], logits_loss), state)
    assert all(float(norm) == 0.0 for norm in fk.grad_norms(state, totals).values())
    assert all(not gradient.any() for gradient in fk.gradients(state, totals).values())
