"""A checkpoint goes through layouts and comes back bitwise the same."""

from __future__ import annotations

import pytest
import torch
from covering import first_of
from distributed.cells import LaidOut, merge, own_batches
from distributed.matrix import LAYOUTS, Cell
from distributed.models import logits_loss
from pool import run_again
from saved import assert_same, everything

import forgekit as fk

WAYS = [  # the layouts of each way have the same model
    ["fsdp2", "tp2", "pp2-1f1b", "cp2-ring", "fsdp2"],
    ["tp2-fsdp2", "hsdp2x2", "pp2-tp2", "tp2-fsdp2"],
    ["pp2-zbv", "pp4-1f1b", "pp2-interleaved_1f1b", "pp2-zbv"],
    ["ep2", "ep2-fsdp2", "ep2"],
]


CHAIN_WAY = ["fsdp2", "tp2", "pp2-1f1b", "cp2-ring"]
LONG_CHAIN = ["fsdp4", "fsdp2", "tp2", "pp2-1f1b", "fsdp4"]
EVERY = [*((way, "adamw") for way in WAYS), (CHAIN_WAY, "chain"), (LONG_CHAIN, "chain")]
SOME = [(WAYS[3], "adamw"), (CHAIN_WAY, "chain")]


def chained(model):
    """Muon for the matrices of the layers, AdamW for all else, each with its own settings."""
    blocks = {name: p for name, p in model.named_parameters() if name.startswith("layers.")}
    matrices = [p for p in blocks.values() if p.ndim == 2]
    held = set(matrices)
    rest = [p for p in model.parameters() if p not in held]
    muon = torch.optim.Muon([{"params": matrices, "lr_scale": 3.0}], weight_decay=0.2)
    return fk.chain_optimizers(muon, torch.optim.AdamW(rest, weight_decay=0.3, fused=True))


OPTIMIZERS = {"adamw": fk.adamw, "chain": chained}


def _state(layout, seed, optimizer):
    cell = Cell(layout, LAYOUTS[layout].micros[0], "ragged", False, "none", "logits")
    return cell, LaidOut(cell, seed=seed).state(OPTIMIZERS[optimizer])


def _train(rank, world, layout, directory, optimizer):
    cell, state = _state(layout, 0, optimizer)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.01))
    for number in range(2):
        state, _ = step(state, own_batches(cell, state.mesh, number))
    fk.checkpoint_save(state, directory).wait()
    return everything(state)


def _pass_on(rank, world, layout, source, target, optimizer):
    _, state = _state(layout, 1, optimizer)
    state = fk.checkpoint_load(state, source)
    fk.checkpoint_save(state, target).wait()
    return everything(state)


@pytest.mark.parametrize(
    ("way", "optimizer"),
    first_of(SOME, EVERY),
    ids=lambda value: value if isinstance(value, str) else ">".join(value),
)
def test_a_checkpoint_comes_back_from_other_layouts_bitwise_the_same(tmp_path, way, optimizer):
    directory = tmp_path / "0"
    saved = merge(run_again(_train, LAYOUTS[way[0]].world, way[0], directory, optimizer))
    assert saved["step"] == 2
    for number, layout in enumerate(way[1:], start=1):
        source, directory = directory, tmp_path / str(number)
        world = LAYOUTS[layout].world
        found = merge(run_again(_pass_on, world, layout, source, directory, optimizer))
        assert_same(found, saved)
