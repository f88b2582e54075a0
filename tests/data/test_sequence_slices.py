"""Slices of a sequence: each position on one rank, equal work for causal masks, exact inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forgekit.data.sequence_slices import (
    join_positions,
    shard_sequence,
    slice_positions,
    unshard_sequence,
)

METHODS = ("zigzag", "contiguous")


def batch_of(positions: int, rows: int = 2) -> TensorDict:
    ids = torch.arange(rows * positions).reshape(rows, positions)
    return TensorDict(
        {
            "input_ids": ids,
            "labels": ids + 1,
            "doc_ids": ids // 3,
            "weights": ids[..., None] * torch.ones(3),
            "source": torch.arange(rows),
            "pair": torch.arange(rows * (positions + 1)).reshape(rows, -1),
        },
        batch_size=[rows],
    )


@given(
    world=st.integers(1, 9),
    chunk=st.integers(1, 5),
    rows=st.integers(1, 3),
    method=st.sampled_from(METHODS),
)
@settings(max_examples=60, deadline=None)
def test_slices_are_a_partition_and_join_to_the_whole(world, chunk, rows, method):
    batch = batch_of(2 * world * chunk, rows)
    slices = [shard_sequence(batch, rank=r, world=world, method=method) for r in range(world)]
    assert {part["input_ids"].shape for part in slices} == {(rows, 2 * chunk)}
    positions = torch.cat([part["input_ids"][0] for part in slices])
    assert positions.sort().values.tolist() == list(range(2 * world * chunk))
    joined = unshard_sequence(slices, method=method)
    assert set(joined.keys()) == set(batch.keys())
    assert all(torch.equal(joined[key], batch[key]) for key in batch.keys())  # noqa: SIM118
    assert joined.batch_size == batch.batch_size


@given(world=st.integers(2, 9), chunk=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_zigzag_gives_each_rank_as_many_pairs(world, chunk):
    slices = [
        slice_positions(torch.arange(2 * world * chunk), rank=r, world=world) for r in range(world)
    ]
    assert len({int((part + 1).sum()) for part in slices}) == 1
    assert all((part.diff() > 0).all() for part in slices)


def test_chunks_by_hand():
    ids = torch.arange(12)
    assert [slice_positions(ids, rank=r, world=3).tolist() for r in range(3)] == [
        [0, 1, 10, 11],
        [2, 3, 8, 9],
        [4, 5, 6, 7],
    ]
    assert slice_positions(ids, rank=2, world=3, method="contiguous").tolist() == [8, 9, 10, 11]
    assert join_positions([ids[6:], ids[:6]], method="contiguous").tolist() == [
        *range(6, 12),
        *range(6),
    ]


def test_what_has_no_places_stays():
    batch = batch_of(8)
    part = shard_sequence(batch, rank=1, world=2)
    assert part["source"].tolist() == [0, 1]
    assert part["pair"].shape == (2, 9)
    assert part["weights"].shape == (2, 4, 3)
    assert part["weights"][0, :, 0].tolist() == [2, 3, 4, 5]
    assert batch["input_ids"].shape == (2, 8)


@pytest.mark.parametrize("method", METHODS)
def test_nested_tensors_are_sliced_alike(method):
    """Choices of experts by layer, for example."""
    batch = batch_of(8)
    choice = torch.arange(48).view(2, 8, 3)
    batch["replay"] = TensorDict({"layers.1": choice, "layers.3": choice + 50}, [2])
    parts = [shard_sequence(batch, rank=rank, world=2, method=method) for rank in range(2)]
    taken = parts[1]["replay", "layers.1"]
    assert torch.equal(taken, slice_positions(choice, rank=1, world=2, method=method, dim=1))
    whole = unshard_sequence(parts, method=method)
    for layer in ("layers.1", "layers.3"):
        assert torch.equal(whole["replay", layer], batch["replay", layer])


@pytest.mark.parametrize("method", METHODS)
def test_one_rank_keeps_any_number_of_places(method):
    batch = batch_of(7)
    part = shard_sequence(batch, rank=0, world=1, method=method)
    assert torch.equal(part["input_ids"], batch["input_ids"])
    assert torch.equal(unshard_sequence([part], method=method)["labels"], batch["labels"])


BAD = {
    "zigzag": (
        {"world": 4},
        r"18 positions must be divisible by 2 \* world = 8 to be sharded zigzag; the nearest are",
    ),
    "contiguous": (
        {"world": 4, "method": "contiguous"},
        r"18 positions must be divisible by world = 4 to be sharded contiguous; .* are 16 and 20.",
    ),
    "short": (
        {"world": 10},
        r"18 positions .* 2 \* world = 20 .*; the nearest is 20\.",
    ),
    "rank": ({"rank": 3, "world": 3}, r"rank 3 must lie in range\(world=3\)"),
    "negative": ({"rank": -1, "world": 3}, "rank -1 must lie in range"),
    "method": (
        {"world": 3, "method": "striped"},
        """method is 'striped'; it is one of "zigzag", "contiguous".""",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_slices_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        shard_sequence(batch_of(18), **{"rank": 0, **options})


def test_batches_without_positions_are_refused():
    with pytest.raises(ValueError, match=r'no "input_ids"; it has "labels"\. Name'):
        shard_sequence(TensorDict({"labels": torch.ones(1, 2)}, batch_size=[1]), rank=0, world=2)
    flat = TensorDict({"input_ids": torch.ones(4)}, batch_size=[4])
    with pytest.raises(ValueError, match=r'"input_ids" has shape \(4,\); it must be \[b s\]'):
        shard_sequence(flat, rank=0, world=2)


def test_slices_that_do_not_belong_together_are_refused():
    first, second = (shard_sequence(batch_of(8), rank=r, world=2) for r in range(2))
    with pytest.raises(ValueError, match="there are no slices to join"):
        unshard_sequence([])
    with pytest.raises(ValueError, match="method is 'ring'; it is one of"):
        unshard_sequence([first, second], method="ring")
    with pytest.raises(
        ValueError,
        match=r'slice 1 has "input_ids".*; slice 0 has .*"labels" int64',
    ):
        unshard_sequence([first, second.exclude("labels")])
    with pytest.raises(
        ValueError,
        match=r'slice 1 has "input_ids" int64 \[2, 2\].* int64 \[2, 4\]',
    ):
        unshard_sequence([first, shard_sequence(batch_of(4), rank=1, world=2)])
