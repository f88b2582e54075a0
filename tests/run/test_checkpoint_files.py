"""What a checkpoint's files are: safetensors and JSON, exact, and opened by any tool."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest
import torch
from ranks import run_again
from safetensors.torch import load_file
from torch import nn

import forgekit as fk

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@attrs.frozen(kw_only=True, slots=True, eq=False)
class State(fk.TrainState):
    extra: dict


def build(extra, step=0):
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = State.create(model, optimizer, extra=extra)
    return fk.donate(state, step=step, samples=step)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def odd_values():
    """Each dtype in two shapes, and what no decimal notation keeps."""
    values = {}
    for dtype in DTYPES:
        whole = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
        values |= {f"{dtype} 2-D": whole, f"{dtype} 0-D": whole[0, 1].clone()}
    third = torch.tensor(1 / 3, dtype=torch.float64)
    payload = torch.tensor(0x7FF8_0000_0000_1234, dtype=torch.int64).view(torch.float64)
    return values | {
        "0-d float64": third,
        "a NaN with a payload": payload,
        "negative zero": torch.tensor(-0.0),
        "inf": torch.tensor([math.inf, -math.inf]),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).view(2, 3).t(),
    }


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    values = odd_values()
    fk.checkpoint_save(build(values), tmp_path, blocking=True)
    loaded = fk.checkpoint_load(build(odd_values() | {"inf": torch.zeros(2)}, 1), tmp_path).extra
    assert loaded.keys() == values.keys()
    for name, value in values.items():
        assert (loaded[name].shape, loaded[name].dtype) == (value.shape, value.dtype), name
        assert bits(loaded[name]) == bits(value), name


def test_any_tool_opens_a_checkpoint(tmp_path):
    state = build({"a": torch.arange(3.0)}, 1)
    state.model(torch.ones(3)).sum().backward()
    state.optimizer.step()
    path = fk.checkpoint_save(state, tmp_path).wait()
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "rank_00000.safetensors",
    ]
    tensors = load_file(path / "rank_00000.safetensors")
    torch.testing.assert_close(tensors["model.weight"], state.model.weight.detach(), rtol=0, atol=0)
    moment = state.optimizer.state[state.model.bias]["exp_avg"]
    torch.testing.assert_close(tensors["optimizer.bias.exp_avg"], moment, rtol=0, atol=0)
    assert json.loads((path / "manifest.json").read_text())["fields"]["step"] == 1


def refuse(rank, world, directory):
    """Only the last rank has what no file can hold."""
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    model = fk.parallelize(nn.Linear(4, 4), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = torch.complex128 if rank == world - 1 else torch.float32
    extra = {"phase": torch.ones(2, dtype=dtype)}
    state = State.create(model, optimizer, extra=extra, mesh=mesh)
    with pytest.raises(
        TypeError, match=r"state\.extra\.phase is torch\.complex128, which safetens"
    ):
        fk.checkpoint_save(state, directory)
    state = fk.donate(state, extra={"phase": torch.ones(2)})
    return fk.checkpoint_save(state, directory).wait().name


def test_what_no_file_can_hold_is_refused_on_all_ranks_before_a_file_is_written(tmp_path):
    with pytest.raises(TypeError, match=r"torch\.complex64"):
        fk.checkpoint_save(build({"a": torch.ones(2, dtype=torch.complex64)}), tmp_path / "one")
    assert not (tmp_path / "one").exists()
    assert run_again(refuse, 2, str(tmp_path / "two")) == ["step_00000000"] * 2
    assert len(list((tmp_path / "two").glob("step_*"))) == 1


def test_a_value_that_is_the_same_twice_comes_back_twice(tmp_path):
    shared = torch.arange(4.0)
    fk.checkpoint_save(build({"a": shared, "b": shared, "c": shared[1:]}), tmp_path, blocking=True)
    extra = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(3)}
    loaded = fk.checkpoint_load(build(extra, 1), tmp_path).extra
    assert [loaded[name].tolist() for name in "abc"] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]


def write(directory, names):
    for name in names:
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"something")


@pytest.mark.parametrize(
    "names", [["step_00000007/.metadata", "step_00000007/__0_0.distcp"], ["step_00000007/model.pt"]]
)
def test_a_folder_of_an_unknown_format_is_not_taken_for_an_empty_one(tmp_path, names):
    write(tmp_path, names)
    state = build({})
    with pytest.raises(
        fk.CheckpointError, match=r"step_00000007 may be one, and its manifest.json is missing"
    ):
        fk.checkpoint_load(state, tmp_path)
    write(url := tmp_path / "url", names)
    with pytest.raises(fk.CheckpointError, match=r"step_00000007 may be one"):
        fk.checkpoint_load(state, f"file://{url}")


def test_what_a_dead_upload_left_is_no_unknown_format(tmp_path):
    write(tmp_path, ["step_00000007/data-0a1b2c3d/rank_00000.safetensors"])
    state = build({})
    assert fk.checkpoint_load(state, f"file://{tmp_path}") is state
