"""Checkpoints of sharded states: resuming, other numbers of ranks, and failures of one rank."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from lab import train
from pool import run_again, run_ranks
from saved import adamw, assert_same, build, everything, momentum
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import forgekit as fk


def _resume(rank, world, directory):
    straight, state = train(build(world), 4), train(build(world), 2)
    pending = fk.checkpoint_save(state, directory)
    train(state, 2)  # its collectives run beside those of the save
    path = pending.wait()
    resumed = train(fk.checkpoint_load(build(world, seed=1), directory), 2)
    for name, parameter in resumed.model.named_parameters():
        for value in resumed.optimizer.state[parameter].values():
            if value.ndim:
                assert value.placements == parameter.placements, name
    assert_same(everything(resumed), everything(straight))
    return path


def test_resumed_training_on_two_ranks_is_bitwise_the_same(tmp_path):
    paths = run_again(_resume, 2, tmp_path)
    assert paths == [tmp_path / "step_00000002"] * 2
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000002"]


def _save(rank, world, directory):
    """After an evaluation, which leaves the root gathered; the state does not name its mesh."""
    state = train(build(world), 2)
    with torch.no_grad():
        state.model(torch.zeros(1, 6))
    assert world == 1 or not isinstance(state.model[2].weight, DTensor)
    state = fk.donate(state, mesh=None)
    fk.checkpoint_save(state, directory).wait()
    return everything(state)


def _load(rank, world, directory):
    return everything(fk.checkpoint_load(build(world, seed=1), directory))


@pytest.mark.parametrize(("world", "others"), [(4, (4, 3, 2, 1)), (1, (3,))])
def test_a_checkpoint_of_four_ranks_or_one_loads_on_any_number(tmp_path, world, others):
    expected = run_again(_save, world, tmp_path)[0]
    assert len(list(tmp_path.glob("step_*/*.safetensors"))) == world
    for other in others:
        for found in run_again(_load, other, tmp_path):
            assert_same(found, expected)
    assert_same(_load(0, 1, tmp_path), expected)


def _train_beside_a_held_save(rank, world, directory):
    fsync, opened = os.fsync, threading.Event()

    def held(descriptor):
        assert opened.wait(20)
        fsync(descriptor)

    os.fsync = held
    try:
        state = train(build(world), 1)
        expected = everything(state)
        pending = fk.checkpoint_save(state, directory)
        state = train(state, 3)
        dist.barrier()
        assert not pending.done
        opened.set()
        pending.wait()
    finally:
        opened.set()
        os.fsync = fsync
    assert_same(everything(fk.checkpoint_load(state, directory)), expected)


def test_training_collectives_run_while_a_save_is_in_flight(tmp_path):
    """The first sync, which is held, is that of the new directory: nothing is written before."""
    run_ranks(_train_beside_a_held_save, 2, tmp_path / "new")


def _replicated(rank, world, directory):
    """Shards on two ranks, each held twice."""
    torch.manual_seed(0)
    model = nn.Linear(60, 50)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh)
    state = fk.TrainState.create(model, momentum(model.parameters()), mesh=mesh)
    fk.checkpoint_save(state, directory).wait()
    return everything(state)


def test_replicated_shards_are_written_once(tmp_path):
    expected = run_again(_replicated, 4, tmp_path)[0]
    model = nn.Linear(60, 50)
    state = fk.TrainState.create(model, momentum(model.parameters()))
    assert_same(everything(fk.checkpoint_load(state, tmp_path)), expected)
    shards = [*tmp_path.glob("step_*/*.safetensors")]
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(shard.stat().st_size for shard in shards) < size + 1000 * len(shards)


def _one_rank_mesh(rank, world, directory):
    mesh = init_device_mesh("cpu", (1,))
    state = build(1)
    fully_shard(state.model, mesh=mesh)
    state = fk.TrainState.create(state.model, adamw(state.model.parameters()), mesh=mesh)
    state = train(state, 2)
    fk.checkpoint_save(state, directory).wait()
    expected = everything(state)
    assert_same(everything(fk.checkpoint_load(train(state, 1), directory)), expected)
    return expected


def test_a_mesh_of_one_rank_needs_no_partner(tmp_path):
    (expected,) = run_ranks(_one_rank_mesh, 1, tmp_path)
    assert_same(_load(0, 1, tmp_path), expected)


def _local_moments(rank, world, directory):
    state = train(build(world), 1)
    parameter = next(iter(state.model.parameters()))
    state.optimizer.state[parameter]["exp_avg"] = torch.zeros(parameter.to_local().shape)
    message = r"^optimizer\.0\.weight\.exp_avg is a plain tensor .* torch\.zeros_like\(param"
    with pytest.raises(TypeError, match=message):
        fk.checkpoint_save(state, directory)


def test_a_moment_that_lost_its_placement_is_refused(tmp_path):
    run_again(_local_moments, 2, tmp_path)
