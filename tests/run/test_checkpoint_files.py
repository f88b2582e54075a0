"""What a checkpoint's files are: safetensors and JSON, exact, and opened by any tool."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest
import torch
from pool import run_again
from safetensors.torch import load_file
from saved import build as build_plain
from saved import save
from torch import nn

import forgekit as fk
from forgekit.safetensors_files import DTYPES


@attrs.frozen(kw_only=True, slots=True, eq=False)
class State(fk.TrainState):
    extra: dict


def build(extra, mesh=None):
    model = nn.Linear(4, 4)
    model = model if mesh is None else fk.parallelize(model, mesh)
    return State.create(model, torch.optim.Adam(model.parameters()), mesh=mesh, extra=extra)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def odd_values():
    """Each dtype in two shapes, what no decimal notation keeps, and one value several times."""
    values = {}
    for dtype in DTYPES:
        whole = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
        values |= {f"{dtype} 2-D": whole, f"{dtype} 0-D": whole[0, 1].clone()}
    payload = torch.tensor(0x7FF8_0000_0000_1234, dtype=torch.int64).view(torch.float64)
    shared = torch.arange(4.0)
    return values | {
        "0-d float64": torch.tensor(1 / 3, dtype=torch.float64),
        "a NaN with a payload": payload,
        "negative zero": torch.tensor(-0.0),
        "inf": torch.tensor([math.inf, -math.inf]),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "shared": shared,
        "again": shared,
        "a part": shared[1:],
    }


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    values = odd_values()
    assert len(values) == 2 * 12 + 9
    fk.checkpoint_save(build(values), tmp_path, blocking=True)
    zeros = {name: torch.zeros_like(value) for name, value in values.items()}
    loaded = fk.checkpoint_load(build(zeros), tmp_path).extra
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert (loaded[name].shape, loaded[name].dtype) == (value.shape, value.dtype), name
        assert bits(loaded[name]) == bits(value), name


def test_any_tool_opens_a_checkpoint(tmp_path):
    state = save(tmp_path, 1)
    path = tmp_path / "step_00000001"
    assert {file.name for file in path.iterdir()} == {"manifest.json", "rank_00000.safetensors"}
    tensors = load_file(path / "rank_00000.safetensors")
    weight, bias = state.model[0].weight.detach(), state.model[2].bias
    torch.testing.assert_close(tensors["model.0.weight"], weight, rtol=0, atol=0)
    moment = state.optimizer.state[bias]["exp_avg"]
    torch.testing.assert_close(tensors["optimizer.2.bias.exp_avg"], moment, rtol=0, atol=0)
    assert json.loads((path / "manifest.json").read_text())["fields"]["step"] == 1


def refuse(rank, world, directory):
    """Only the last rank has what no file can hold."""
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu") if world > 1 else None
    dtype = torch.complex128 if rank == world - 1 else torch.float32
    state = build({"phase": torch.ones(2, dtype=dtype)}, mesh)
    message = r"state\.extra\.phase is torch\.complex128, which safetens"
    with pytest.raises(TypeError, match=message):
        fk.checkpoint_save(state, directory)
    assert not Path(directory).exists()


@pytest.mark.parametrize("world", [1, 2])
def test_what_no_file_can_hold_is_refused_on_all_ranks_before_a_file_is_written(tmp_path, world):
    run_again(refuse, world, str(tmp_path / "new"))


@pytest.mark.parametrize("name", [".metadata", "model.pt"])
def test_a_folder_of_an_unknown_format_is_not_taken_for_an_empty_one(tmp_path, name):
    (tmp_path / "step_00000007").mkdir()
    (tmp_path / "step_00000007" / name).write_bytes(b"something")
    message = r"step_00000007 may be one, and its manifest.json is missing"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(build_plain(), tmp_path)
