"""Streams in a state: each rank's position is saved, and returns to that rank or to none."""

from __future__ import annotations

from itertools import islice
from typing import Any

import attrs
import pytest
import torch
from pool import run_again, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forgekit as fk
from forgekit.checkpoints.load import checkpoint_load
from forgekit.checkpoints.save import checkpoint_save
from forgekit.data.documents import random_documents
from forgekit.data.groups import groups
from forgekit.data.stream import stream_documents
from forgekit.ranks import CheckpointError
from forgekit.state import TrainState


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Streaming(TrainState):
    stream: Any = attrs.field(repr=False)


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Sampling(Streaming):
    own: Any = attrs.field(repr=False, metadata={"per_rank": True})
    common: Any = attrs.field(repr=False, metadata={"per_rank": False})


def _loss(model, batch):
    where = {key: batch[key] for key in ("position_ids", "doc_ids")}
    return fk.cross_entropy(model(batch["input_ids"], **where), batch["labels"])


def _train(rank, world, directory, saved_at, steps):
    mesh = fk.build_mesh(device="cpu") if world > 1 else None
    spec = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 2, "ffn_dim": 16, "max_seq_len": 16}
    model = fk.Transformer(fk.TransformerSpec(vocab_size=50, **spec), seed=0)
    model = model if mesh is None else fk.parallelize(model, mesh)
    stream = stream_of(rank, world)
    state = Streaming.create(model, fk.adamw(model), mesh=mesh, stream=stream)
    state = checkpoint_load(state, directory)
    step = fk.make_step(_loss, schedule=fk.constant(0.1), max_norm=1.0)
    losses = []
    for batches in islice(groups(state.stream, stream.micro_batches(4 * world)), steps):
        state, metrics = step(state, batches)
        losses.append(metrics["loss"].item())
        if state.step == saved_at:
            checkpoint_save(state, directory, blocking=True)
    assert state.samples == state.stream.rows * world
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_on_a_stream_resumes_bitwise(tmp_path, world):
    straight = run_again(_train, world, tmp_path / "straight", None, 6)[0]
    first = run_again(_train, world, tmp_path / "resumed", 2, 3)[0]
    assert first == straight[:3]
    assert run_again(_train, world, tmp_path / "resumed", None, 4)[0] == straight[2:]
    assert len(set(straight)) == 6


class Rollouts:
    """A user's stream: numbers and a tensor, and nothing of forgekit."""

    def __init__(self, start):
        self.at = start
        self.reward = torch.full((2,), float(start))

    def __iter__(self):
        while True:
            self.at += 1
            self.reward += self.at
            yield self.at

    def state_dict(self):
        return {"at": self.at, "reward": self.reward}

    def load_state_dict(self, state):
        self.at, self.reward = state["at"], state["reward"]


def build(world, kind=Streaming, **fields):
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return kind.create(model, optimizer, mesh=mesh, **fields)


def stream_of(rank, world, seed=0, **options):
    documents = random_documents(50, 40, longest=30, seed=seed)
    return stream_documents(documents, 16, 2, eos_id=0, rank=rank, world=world, **options)


def pull(stream, count):
    return [batch["input_ids"].tolist() for batch, _ in zip(stream, range(count), strict=False)]


def _save(rank, world, directory):
    state = build(world, stream=stream_of(rank, world))
    for group in groups(state.stream, 2):
        assert len(list(group)) == 2
        if state.stream.rows >= 3 * 2 * 2:
            break
    pending = checkpoint_save(state, directory)
    following = pull(state.stream, 5)  # beside the save, which must not see it
    pending.wait()
    return following


def _resume(rank, world, directory, workers=0):
    state = build(world, stream=stream_of(rank, world, workers=workers))
    state = checkpoint_load(state, directory)
    with state.stream:
        return pull(state.stream, 5)


def test_each_rank_goes_on_where_it_stood(tmp_path):
    expected = run_again(_save, 3, tmp_path)
    assert len({str(following) for following in expected}) == 3
    assert run_again(_resume, 3, tmp_path) == expected
    assert run_again(_resume, 3, tmp_path, 1) == expected


def _refuse(rank, world, directory, message, stream):
    state = build(world, stream=stream(rank, world))
    weights = [p.clone() for p in state.model.parameters()]
    with pytest.raises(CheckpointError, match=message):
        checkpoint_load(state, directory)
    return [p.equal(q) for p, q in zip(state.model.parameters(), weights, strict=True)]


def _swapped(rank, world):
    return stream_of(rank if rank == 0 else 3 - rank, world)


def _other(rank, world):
    return stream_of(rank, world, seed=1)


def test_another_number_of_ranks_is_refused_before_anything_is_read(tmp_path):
    run_again(_save, 3, tmp_path)
    message = r"'stream' is of each of 3 ranks there and of each of 2 ranks here\..* as many ranks"
    assert all(all(kept) for kept in run_ranks(_refuse, 2, tmp_path, message, stream_of))


def test_what_one_rank_refuses_all_ranks_refuse(tmp_path):
    run_again(_save, 3, tmp_path)
    message = r"rank 1: ValueError: .* position is that of reader 1 of 3, and this is reader 2 of 3"
    run_ranks(_refuse, 3, tmp_path, message, _swapped)
    run_ranks(_refuse, 3, tmp_path, r"rank 0: .* position is in other documents", _other)


def _save_marked(rank, world, directory):
    def fields(start):
        return {"own": torch.tensor([start]), "common": Rollouts(start), "stream": Rollouts(start)}

    state = build(world, Sampling, **fields(10 * rank))
    for rollouts in (state.stream, state.common):
        next(iter(rollouts))
    checkpoint_save(state, directory, blocking=True)
    state = checkpoint_load(build(world, Sampling, **fields(77)), directory)
    own = state.own.tolist(), state.stream.at, state.stream.reward.tolist()
    return *own, state.common.at


def test_streams_and_marked_fields_are_each_ranks_own_and_others_the_first_ones(tmp_path):
    """A stream of the user's own needs no mark and keeps its tensors."""
    first, second = run_ranks(_save_marked, 2, tmp_path)
    assert first == ([0], 1, [1.0, 1.0], 1)
    assert second == ([10], 11, [21.0, 21.0], 1)
