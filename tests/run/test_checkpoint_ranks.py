"""Checkpoints of sharded states: resuming, other numbers of ranks, and failures of one rank."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from covering import in_turn, some_of
from lab import train
from ranks import run_again, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import forgekit as fk
from forgekit.checkpoints.directory import latest_checkpoint
from forgekit.checkpoints.load import checkpoint_load
from forgekit.checkpoints.save import checkpoint_save
from forgekit.checkpoints.state_dict import model_tensors
from forgekit.state import Layout, TrainState, donate, set_layout

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def build(world, seed=0, optimizer="fused adamw"):
    """Make a state over ``world`` ranks, 1 without a process group; no size divides evenly."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model.register_buffer("scale", torch.full((2,), float(seed)))
    mesh = None
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    return TrainState.create(model, OPTIMIZERS[optimizer](model.parameters()), mesh=mesh)


def everything(state):
    """Weights and moments as whole tensors by name, and the numbers."""
    weights = model_tensors(state.model)
    moments = {
        f"{name}.{key}": value
        for name, parameter in state.model.named_parameters()
        for key, value in state.optimizer.state[parameter].items()
    }
    whole = {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in (weights | moments).items()
    }
    return whole | {"step": torch.tensor(state.step), "samples": torch.tensor(state.samples)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def _resume(rank, world, directory, optimizer, blocking):
    straight = train(build(world, optimizer=optimizer), 4)
    state = train(build(world, optimizer=optimizer), 2)
    pending = checkpoint_save(state, directory, blocking=blocking)
    train(state, 2)  # its collectives run beside those of the save
    path = pending.wait()
    fresh = build(world, seed=1, optimizer=optimizer)
    resumed = train(checkpoint_load(fresh, directory), 2)
    for name, parameter in resumed.model.named_parameters():
        for value in resumed.optimizer.state[parameter].values():
            if value.ndim:
                assert value.placements == parameter.placements, name
    assert_same(everything(resumed) | {"scale": 0}, everything(straight) | {"scale": 0})
    return path


@pytest.mark.parametrize(("optimizer", "blocking"), in_turn(list(OPTIMIZERS), [True, False]))
def test_resumed_training_on_two_ranks_is_bitwise_the_same(tmp_path, optimizer, blocking):
    paths = run_again(_resume, 2, tmp_path, optimizer, blocking)
    assert paths == [tmp_path / "step_00000002"] * 2
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000002"]


def _save(rank, world, directory, optimizer):
    state = train(build(world, optimizer=optimizer), 2)
    checkpoint_save(state, directory).wait()
    return everything(state)


def _load(rank, world, directory, optimizer):
    return everything(checkpoint_load(build(world, seed=1, optimizer=optimizer), directory))


@pytest.mark.parametrize("optimizer", some_of(OPTIMIZERS, "momentum"))
def test_a_checkpoint_of_four_ranks_loads_on_any_number(tmp_path, optimizer):
    expected = run_again(_save, 4, tmp_path, optimizer)[0]
    assert len(list(tmp_path.glob("step_*/*.safetensors"))) == 4
    for world in (4, 3, 2, 1):
        for found in run_again(_load, world, tmp_path, optimizer):
            assert_same(found, expected)
    assert_same(_load(0, 1, tmp_path, optimizer), expected)


def test_a_checkpoint_of_one_process_loads_on_three_ranks(tmp_path):
    expected = _save(0, 1, tmp_path, "fused adamw")
    for found in run_again(_load, 3, tmp_path, "fused adamw"):
        assert_same(found, expected)


def _save_after_evaluation(rank, world, directory):
    state = train(build(world), 2)
    with torch.no_grad():
        state.model(torch.zeros(1, 6))
    assert not isinstance(state.model[2].weight, DTensor)
    checkpoint_save(state, directory).wait()
    return everything(state)


def test_a_model_left_gathered_by_an_evaluation_is_saved_in_shards(tmp_path):
    expected = run_again(_save_after_evaluation, 2, tmp_path)[0]
    assert_same(_load(0, 1, tmp_path, "fused adamw"), expected)


def _save_without_naming_the_mesh(rank, world, directory):
    state = donate(train(build(world), 2), mesh=None)
    checkpoint_save(state, directory).wait()
    return everything(state)


def test_shards_tell_the_ranks_if_the_state_has_no_mesh(tmp_path):
    expected = run_again(_save_without_naming_the_mesh, 2, tmp_path)[0]
    assert_same(_load(0, 1, tmp_path, "fused adamw"), expected)


def _train_beside_a_held_save(rank, world, directory):
    fsync, opened = os.fsync, threading.Event()

    def held(descriptor):
        assert opened.wait(20)
        fsync(descriptor)

    os.fsync = held
    try:
        state = train(build(world), 1)
        expected = everything(state)
        pending = checkpoint_save(state, directory)
        state = train(state, 3)
        dist.barrier()
        assert not pending.done
        opened.set()
        pending.wait()
    finally:
        opened.set()
        os.fsync = fsync
    assert_same(everything(checkpoint_load(state, directory)), expected)


def test_training_collectives_run_while_a_save_is_in_flight(tmp_path):
    run_ranks(_train_beside_a_held_save, 2, tmp_path)


def _stages(rank, world, directory):
    """Two pipeline stages, each with a layer that the other rank does not have."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(rank)
    model = nn.Sequential()
    model.add_module(str(rank), nn.Linear(4, 4))
    fully_shard(model, mesh=mesh["dp"])
    set_layout(model, Layout())
    state = TrainState.create(model, OPTIMIZERS["fused adamw"](model.parameters()), mesh=mesh)
    state.model(torch.ones(1, 4)).sum().backward()
    state.optimizer.step()
    checkpoint_save(state, directory).wait()
    expected = everything(state)
    torch.nn.init.zeros_(model.get_submodule(str(rank)).weight)
    assert_same(everything(checkpoint_load(state, directory)), expected)
    return expected


def test_pipeline_stages_write_one_checkpoint_that_one_process_loads(tmp_path):
    first, second = run_again(_stages, 2, tmp_path)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    state = TrainState.create(model, OPTIMIZERS["fused adamw"](model.parameters()))
    assert_same(everything(checkpoint_load(state, tmp_path)), first | second)


def _replicated(rank, world, directory):
    """Shards on two ranks, each held twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model.register_buffer("scale", torch.zeros(2))
    fully_shard(model, mesh=mesh)
    state = TrainState.create(model, OPTIMIZERS["fused adamw"](model.parameters()), mesh=mesh)
    state = train(state, 1)
    checkpoint_save(state, directory).wait()
    return everything(state)


def _size(directory):
    path = latest_checkpoint(directory)
    assert path is not None
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def test_replicated_shards_are_written_once(tmp_path):
    expected = run_again(_replicated, 4, tmp_path)[0]
    assert_same(_load(0, 1, tmp_path, "fused adamw"), expected)
    run_again(_save, 2, tmp_path / "sharded", "fused adamw")
    assert _size(tmp_path) == pytest.approx(_size(tmp_path / "sharded"), rel=0.1)


def _one_rank_mesh(rank, world, directory):
    state = build(1)
    fully_shard(state.model, mesh=init_device_mesh("cpu", (1,)))
    state = TrainState.create(
        state.model,
        OPTIMIZERS["fused adamw"](state.model.parameters()),
        mesh=init_device_mesh("cpu", (1,)),
    )
    state = train(state, 2)
    checkpoint_save(state, directory).wait()
    expected = everything(state)
    assert_same(everything(checkpoint_load(train(state, 1), directory)), expected)
    return expected


def test_a_mesh_of_one_rank_needs_no_partner(tmp_path):
    (expected,) = run_ranks(_one_rank_mesh, 1, tmp_path)
    assert_same(_load(0, 1, tmp_path, "fused adamw"), expected)


def _local_moments(rank, world, directory):
    state = train(build(world), 1)
    parameter = next(iter(state.model.parameters()))
    state.optimizer.state[parameter]["exp_avg"] = torch.zeros(parameter.to_local().shape)
    message = r"'exp_avg' of '0\.weight' is a plain tensor .* torch\.zeros_like\(parameter\)"
    with pytest.raises(TypeError, match=message):
        checkpoint_save(state, directory)


def test_a_moment_that_lost_its_placement_is_refused(tmp_path):
    run_again(_local_moments, 2, tmp_path)


def _save_after_shutdown(rank, world, folder):
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = fk.build_mesh(device="cpu")
    model = fk.parallelize(torch.nn.Linear(4, 4), mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    fk.shutdown()
    with pytest.raises(fk.CheckpointError, match=r"ranks \(0, 1\) .* before forgekit.shutdown"):
        fk.checkpoint_save(state, folder)


def test_a_save_after_the_process_groups_are_gone_says_so(tmp_path):
    run_ranks(_save_after_shutdown, 2, str(tmp_path), group=False)
