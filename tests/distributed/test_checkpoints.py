"""A checkpoint goes through layouts and comes back bitwise the same."""

from __future__ import annotations

import pytest
import torch
from distributed.cells import LaidOut, lay_out, merge, own_batches
from distributed.matrix import LAYOUTS, Cell
from distributed.models import logits_loss
from ranks import run_ranks

import forgekit as fk

WAYS = [  # the layouts of each way have the same model
    ["fsdp2", "tp2", "pp2-1f1b", "cp2-ring", "fsdp2"],
    ["tp2-fsdp2", "hsdp2x2", "pp2-tp2", "tp2-fsdp2"],
    ["pp2-zbv", "pp4-1f1b", "pp2-interleaved_1f1b", "pp2-zbv"],
    ["ep2", "ep2-fsdp2", "ep2"],
]


def _state(layout, seed):
    cell = Cell(layout, LAYOUTS[layout].micros[0], "ragged", False, "none", "logits")
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **cell.row.sizes}), device="cpu")
    laid_out = LaidOut(lay_out(cell, mesh, seed=seed), mesh)
    return cell, laid_out, fk.TrainState.create(laid_out.model, fk.adamw(laid_out.model), mesh=mesh)


def _contents(laid_out, state):
    """Full weights and moments, and the counters."""
    tensors = dict(state.model.named_parameters())
    moments = {
        f"{name}.{key}": value
        for name, parameter in tensors.items()
        for key, value in state.optimizer.state[parameter].items()
    }
    counters = {"step": state.step, "samples": state.samples, "targets": int(state.targets)}
    return {"tensors": laid_out.send(tensors | moments), **counters}


def _train(rank, world, layout, directory):
    cell, laid_out, state = _state(layout, seed=0)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.01))
    for index in range(2):
        state, _ = step(state, own_batches(cell, state.mesh, index))
    fk.checkpoint_save(state, directory).wait()
    return _contents(laid_out, state)


def _pass_on(rank, world, layout, source, target):
    _, laid_out, state = _state(layout, seed=1)
    state = fk.checkpoint_load(state, source)
    fk.checkpoint_save(state, target).wait()
    return _contents(laid_out, state)


@pytest.mark.parametrize("way", WAYS, ids=">".join)
def test_a_checkpoint_comes_back_from_other_layouts_bitwise_the_same(tmp_path, way):
    directory = tmp_path / "0"
    saved = merge(run_ranks(_train, LAYOUTS[way[0]].world, way[0], directory))
    assert saved["step"] == 2
    for number, layout in enumerate(way[1:], start=1):
        source, directory = directory, tmp_path / str(number)
        world = LAYOUTS[layout].world
        found = merge(run_ranks(_pass_on, world, layout, source, directory))
        tensors, expected = found.pop("tensors"), saved["tensors"]
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)
        assert found == {name: saved[name] for name in found}
