"""Checkpoints of several ranks: other numbers of them, what each has for itself, one that fails."""

from __future__ import annotations

import os
import threading
from itertools import islice
from typing import Any
from unittest import mock

import attrs
import pytest
import torch
import torch.distributed as dist
from lab import alone, lay_out, train
from pool import run_again
from saved import Elsewhere, Own, assert_same, build, everything, load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import forgekit as fk
from forgekit.data.documents import random_documents
from forgekit.data.stream import stream_documents
from forgekit.state import Layout, set_layout


def _resume(rank, world, directory):
    """Save beside training: the first sync, of the new directory, is held until that is over."""
    fsync, opened = os.fsync, threading.Event()

    def held(descriptor):
        assert opened.wait(20)
        fsync(descriptor)

    straight, state = train(build(world), 4), train(build(world), 2)
    with mock.patch.object(os, "fsync", held):
        pending = fk.checkpoint_save(state, directory)
        train(state, 2)  # its collectives run beside those of the save
        dist.barrier()
        assert not pending.done
        opened.set()
        path = pending.wait()
    resumed = train(fk.checkpoint_load(build(world, seed=1), directory), 2)
    for name, parameter in resumed.model.named_parameters():
        for value in resumed.optimizer.state[parameter].values():
            if value.ndim:
                assert value.placements == parameter.placements, name
    assert_same(everything(resumed), everything(straight))
    return path


def test_training_goes_on_beside_a_save_and_resumes_bitwise(tmp_path):
    paths = run_again(_resume, 2, tmp_path / "new")
    assert paths == [tmp_path / "new" / "step_00000002"] * 2
    assert sorted(os.listdir(tmp_path / "new")) == ["latest", "step_00000002"]


def _save(rank, world, directory):
    """After an evaluation, which leaves the root gathered; the state does not name its mesh."""
    state = train(build(world), 2)
    with torch.no_grad():
        state.model(torch.zeros(1, 6))
    assert world == 1 or not isinstance(state.model[2].weight, DTensor)
    state = fk.donate(state, mesh=None)
    fk.checkpoint_save(state, directory).wait()
    return everything(state)


@pytest.mark.parametrize(("world", "others"), [(3, (2, 1)), (1, (3,))])
def test_a_checkpoint_loads_on_any_number_of_ranks(tmp_path, world, others):
    expected = run_again(_save, world, tmp_path)[0]
    assert len([*tmp_path.glob("step_*/*.safetensors")]) == world
    for other in others:
        for found in run_again(load, other, tmp_path):
            assert_same(found, expected)


def _replicated(rank, world, directory):
    state = lay_out(nn.Linear(60, 50), {"dp_replicate": 2, "dp_shard": 1})
    fk.checkpoint_save(state, directory).wait()
    return everything(state)


def test_replicated_shards_are_written_once(tmp_path):
    expected = run_again(_replicated, 2, tmp_path)[0]
    assert_same(everything(fk.checkpoint_load(alone(nn.Linear(60, 50)), tmp_path)), expected)
    sizes = [shard.stat().st_size for shard in tmp_path.glob("step_*/*.safetensors")]
    assert sum(sizes) < 4 * (60 * 50 + 50) + 1000 * len(sizes)


# What is refused on all ranks


def _refuse(rank, world, directory):
    """A moment that lost its placement; what no file can hold, or what is lost, of one rank."""
    state = train(build(world), 1)
    parameter = next(iter(state.model.parameters()))
    state.optimizer.state[parameter]["exp_avg"] = torch.zeros(parameter.to_local().shape)
    message = r"^optimizer\.0\.weight\.exp_avg is a plain tensor .* torch\.zeros_like\(param"
    with pytest.raises(TypeError, match=message):
        fk.checkpoint_save(state, directory)
    state = build(world)
    if rank == 1:
        state.model.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"model\.phase is torch\.complex128, which safetens"):
        fk.checkpoint_save(state, directory)
    # As in a pipeline each rank holds a layer of its own; only the first one's has a gradient.
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    for kind in (Elsewhere, Own):
        model = nn.Sequential()
        model.add_module(str(rank), nn.Linear(3, 3))
        fully_shard(model, mesh=mesh["dp"])
        set_layout(model, Layout())
        optimizer = kind(model.parameters())
        state = fk.TrainState.create(model, optimizer, mesh=mesh)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if rank == 0 else None
        optimizer.step()
        state = fk.donate(state, step=2)
        if kind is Elsewhere:
            with pytest.raises(TypeError, match=r"^Elsewhere has no state after step 2; kept any"):
                fk.checkpoint_save(state, directory)
            assert not directory.exists()
        else:  # one that holds parameters without a gradient needs none
            fk.checkpoint_save(state, directory).wait()


def test_what_one_rank_cannot_save_is_refused_on_all_before_a_file_is_written(tmp_path):
    run_again(_refuse, 2, tmp_path / "new")


# Streams, and other fields of which each rank has its own


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Streaming(fk.TrainState):
    stream: Any = attrs.field(repr=False)


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Sampling(Streaming):
    own: Any = attrs.field(repr=False, metadata={"per_rank": True})
    common: Any = attrs.field(repr=False, metadata={"per_rank": False})


def stream_of(rank, world, seed=0, **options):
    documents = random_documents(50, 40, longest=30, seed=seed)
    return stream_documents(documents, 16, 2, eos_id=0, rank=rank, world=world, **options)


def streaming(world, stream, kind=Streaming, **fields):
    state = alone(nn.Linear(16, 3)) if world == 1 else lay_out(nn.Linear(16, 3))
    return kind.create(state.model, state.optimizer, mesh=state.mesh, stream=stream, **fields)


def go_on(state, steps):
    """Pull groups of two micro-batches; what a run without a stop pulls is what counts."""
    pulled = islice(fk.groups(state.stream, 2), steps)
    return [[batch["input_ids"].tolist() for batch in group] for group in pulled]


def _stream(rank, world, directory):
    state = streaming(world, stream_of(rank, world))
    first = go_on(state, 3)
    pending = fk.checkpoint_save(state, directory)
    following = go_on(state, 3)  # beside the save, which must not see it
    pending.wait()
    for workers in (0, 1):
        state = streaming(world, stream_of(rank, world, workers=workers))
        state = fk.checkpoint_load(state, directory)
        with state.stream:
            assert go_on(state, 3) == following
    for other, message in (
        (stream_of(0, world), "rank 1: .* the position belongs to reader 1 of 2, but this is"),
        (stream_of(rank, world, seed=1), "rank 0: .* position is in other documents"),
    ):
        with pytest.raises(fk.CheckpointError, match=message):
            fk.checkpoint_load(streaming(world, other), directory)
    return first, following


def test_each_rank_goes_on_in_its_stream_where_it_stood_or_all_refuse(tmp_path):
    pulled = run_again(_stream, 2, tmp_path)
    assert pulled[0] != pulled[1]
    state = streaming(1, stream_of(0, 1))
    before = everything(state)
    message = r"'stream' is of each of 2 ranks there and of each of 1 ranks here\..* as many ranks"
    with pytest.raises(fk.CheckpointError, match=message):
        fk.checkpoint_load(state, tmp_path)
    assert_same(everything(state), before)


class Rollouts:
    """A user's stream: numbers and a tensor, and nothing of forgekit."""

    def __init__(self, start):
        self.at, self.reward = start, torch.full((2,), float(start))

    def __iter__(self):
        while True:
            self.at += 1
            self.reward += self.at
            yield self.at

    def state_dict(self):
        return {"at": self.at, "reward": self.reward}

    def load_state_dict(self, state):
        self.at, self.reward = state["at"], state["reward"]


def sampling(world, start):
    fields = {"own": torch.tensor([start]), "common": Rollouts(start), "stream": Rollouts(start)}
    return streaming(world, kind=Sampling, **fields)


def _save_marked(rank, world, directory):
    state = sampling(world, 10 * rank)
    for rollouts in (state.stream, state.common):
        next(iter(rollouts))
    fk.checkpoint_save(state, directory, blocking=True)
    state = fk.checkpoint_load(sampling(world, 77), directory)
    return state.own.tolist(), state.stream.at, state.stream.reward.tolist(), state.common.at


def test_streams_and_marked_fields_are_each_ranks_own_and_others_the_first_ones(tmp_path):
    """A stream of the user's own needs no mark and keeps its tensors."""
    ranks = run_again(_save_marked, 2, tmp_path)
    assert ranks == [([0], 1, [1.0, 1.0], 1), ([10], 11, [21.0, 21.0], 1)]
