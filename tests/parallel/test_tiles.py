"""A feed-forward in tiles of positions: the same gradient in every layout, and less is kept."""

from __future__ import annotations

import attrs
import pytest
import torch
from lab import SPEC, global_batch, lay_out, logits_loss, mean_gradients, reference_gradients
from lab import relative_error as error
from pool import run_again

import forgekit as fk

EVEN = attrs.evolve(SPEC, vocab_size=38)  # which tp 2 divides
MIXED = attrs.evolve(SPEC, layers=2, moe=fk.MoESpec(experts=4, top_k=2, ffn_dim=8, first=1))
DEEP = attrs.evolve(EVEN, layers=4)


def _batches(readers):
    """``[micro-batch][reader]``, of 16 positions: three tiles of them differ in size."""
    return [global_batch(readers, seed=seed)[1] for seed in range(2)]


def _gradients(rank, world, spec, sizes, options):
    state = lay_out(fk.Transformer(spec).double(), sizes, mlp_tiles=3, **options)
    tiles = [block.mlp_tiles for block in state.model.layers]
    reader, readers = fk.data_ranks(state.mesh)
    rows = [row[reader] for row in _batches(readers)]
    return tiles, mean_gradients(state, rows, logits_loss)


CASES = {
    "one": (1, EVEN, {}, {}),
    "tp": (2, EVEN, {"tp": 2}, {}),
    "cp full": (2, EVEN, {"cp": 2}, {"activation_checkpoint": "full"}),
    "pp": (2, DEEP, {"pp": 2}, {"pipeline_schedule": "interleaved_zero_bubble"}),
    "experts": (2, MIXED, {}, {}),
    "fsdp": (4, EVEN, {"dp_shard": 2, "tp": 2}, {"activation_checkpoint": "selective"}),
}


@pytest.mark.parametrize("case", CASES)
def test_tiles_change_no_gradient(case):
    world, spec, sizes, options = CASES[case]
    readers = world if not sizes else sizes.get("dp_shard", 1)
    expected, _ = reference_gradients(fk.Transformer(spec), _batches(readers))
    for tiles, gradients in run_again(_gradients, world, spec, sizes, options):
        assert tiles == [3, 1] if spec is MIXED else 3 in tiles
        assert error(gradients, {name: expected[name] for name in gradients}) < 1e-13


def _kept(rank, world, tiles):
    """Bytes that a block keeps for backward, and the largest tensor of its feed-forward."""
    spec = attrs.evolve(EVEN, layers=1, ffn_dim=512)
    block = lay_out(fk.Transformer(spec), {}, mlp_tiles=tiles).model.layers[0]
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x, turns = torch.zeros(1, 64, spec.dim, requires_grad=True), torch.ones(64, 1, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, turns, turns).sum()
    return sum(kept.values())


def test_a_tile_keeps_its_input_alone():
    (whole,), (tiled,) = run_again(_kept, 1, 1), run_again(_kept, 1, 4)
    # gate, silu(gate), up and their product, of 64 positions and 512 channels
    assert whole - tiled >= 4 * 64 * 512 * 4
