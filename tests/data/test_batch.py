"""What a micro-batch must be, and the functions that make, pad and slice one."""

from __future__ import annotations

import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from forgekit.data.batch import (
    apply_transforms,
    check_batch,
    collate,
    mask_batch,
    pad_positions,
    shard_sequence,
    shift_labels,
    slice_positions,
    unshard_sequence,
)

IDS = torch.arange(6).reshape(2, 3)


def batch_of(**tensors):
    return TensorDict(tensors, batch_size=[2])


def full_batch(**tensors):
    given = {"input_ids": IDS, "labels": IDS, "position_ids": IDS, "doc_ids": IDS}
    return batch_of(**(given | {"source": torch.tensor([0, 1])} | tensors))


def test_labels_are_the_next_tokens_and_share_no_memory():
    shifted = shift_labels(batch_of(input_ids=IDS, position_ids=IDS + 10, source=IDS[:, 0]))
    check_batch(shifted)
    assert shifted["input_ids"].tolist() == [[0, 1], [3, 4]]
    assert shifted["labels"].tolist() == [[1, 2], [4, 5]]
    assert shifted["position_ids"].tolist() == [[10, 11], [13, 14]]
    assert shifted["source"].tolist() == [0, 3]
    shifted["labels"].zero_()
    assert shifted["input_ids"].tolist() == [[0, 1], [3, 4]]
    assert IDS.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_no_label_crosses_documents_or_reaches_padding():
    documents = torch.tensor([[0, 0, 1, 1, -1, -1]])
    ids = torch.arange(6, dtype=torch.uint8)[None]
    batch = TensorDict({"input_ids": ids, "doc_ids": documents}, batch_size=[1])
    assert shift_labels(batch)["labels"].tolist() == [[1, -100, 3, -100, -100]]


def test_padding_and_masking_fill_each_key_in_its_way():
    batch = full_batch(doc_ids=torch.tensor([[0, 0, 1], [0, 0, 0]]), labels=IDS + 1)
    padded = pad_positions(batch, multiple=4, token=9)
    assert padded["input_ids"].tolist() == [[0, 1, 2, 9], [3, 4, 5, 9]]
    assert padded["labels"].tolist() == [[1, 2, 3, -100], [4, 5, 6, -100]]
    assert padded["doc_ids"].tolist() == [[0, 0, 1, -1], [0, 0, 0, -1]]
    assert padded["position_ids"][:, 3].tolist() == [0, 0]
    assert padded["source"].tolist() == [0, 1]
    assert pad_positions(batch, 5, multiple=4)["labels"].shape == (2, 8)
    assert pad_positions(padded, multiple=2)["labels"].equal(padded["labels"])
    masked = mask_batch(batch)
    assert masked["labels"].eq(-100).all()
    assert masked["doc_ids"].eq(-1).all()
    assert masked["input_ids"].equal(IDS)
    assert batch["labels"].equal(IDS + 1)
    assert batch["doc_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]


def sequences(positions, rows=2):
    ids = torch.arange(rows * positions).reshape(rows, positions)
    tensors = {
        "input_ids": ids,
        "labels": ids + 1,
        "mine": TensorDict({"weights": ids[..., None] * torch.ones(3)}, [rows, positions]),
        "source": torch.arange(rows),
        "pair": torch.arange(rows * (positions + 1)).reshape(rows, -1),
        "teacher_ids": ids[..., None].expand(-1, -1, 3).clone(),
    }
    return TensorDict(tensors, batch_size=[rows])


@given(
    world=st.integers(1, 9),
    chunk=st.integers(1, 5),
    rows=st.integers(1, 3),
    method=st.sampled_from(["zigzag", "contiguous"]),
)
@settings(max_examples=30, deadline=None)
def test_slices_are_a_partition_and_join_to_the_whole(world, chunk, rows, method):
    batch = sequences(2 * world * chunk, rows)
    slices = [shard_sequence(batch, rank=r, world=world, method=method) for r in range(world)]
    assert {part["input_ids"].shape for part in slices} == {(rows, 2 * chunk)}
    positions = torch.cat([part["input_ids"][0] for part in slices])
    assert positions.sort().values.tolist() == list(range(2 * world * chunk))
    for part in slices:
        assert part["teacher_ids"][..., 2].equal(part["input_ids"])
        assert part["mine"].batch_size == part["input_ids"].shape
        assert part["mine", "weights"][..., 1].equal(part["input_ids"].float())
    joined = unshard_sequence(slices, method=method)
    assert joined.batch_size == batch.batch_size
    assert (joined == batch).all()
    if method == "zigzag":  # as many pairs of a query and a key on each rank
        assert len({int((part["input_ids"][0] + 1).sum()) for part in slices}) == 1


def test_what_a_tensor_of_another_name_holds_is_declared_and_never_guessed():
    """A table of as many columns as there are positions would be sliced by its shape alone."""
    batch, table = sequences(8, rows=2), torch.arange(16.0).view(2, 8)
    apart = batch.clone().update({"table": table[:, None]})
    assert shard_sequence(apart, rank=1, world=2)["table"].equal(table[:, None])
    plain = batch.clone().update({"table": table})
    assert (shard_sequence(plain, rank=0, world=1) == plain).all()
    with pytest.raises(ValueError, match=r'"table" has shape \(2, 8\), but ranks share 8 pos'):
        shard_sequence(plain, rank=0, world=2)


def test_chunks_by_hand():
    ids = torch.arange(12)
    taken = [slice_positions(ids, rank=rank, world=3).tolist() for rank in range(3)]
    assert taken == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert slice_positions(ids, rank=2, world=3, method="contiguous").tolist() == [8, 9, 10, 11]


FIRST = operator.itemgetter(slice(1))
BAD = {
    'has no "labels"; it has "input_ids"': lambda: check_batch(batch_of(input_ids=IDS)),
    r'"input_ids" has shape \(2, 3, 1\)': lambda: check_batch(full_batch(input_ids=IDS[..., None])),
    r'"labels" has shape \(2, 2\); it must be': lambda: check_batch(full_batch(labels=IDS[:, 1:])),
    '"labels" is torch.float16': lambda: check_batch(full_batch(labels=IDS.half())),
    "torch.uint8, which cannot store -100": lambda: mask_batch(full_batch(labels=IDS.byte())),
    'batch has "labels" already': lambda: shift_labels(full_batch()),
    r'"input_ids" has shape \(2, 1\); shift': lambda: shift_labels(batch_of(input_ids=IDS[:, :1])),
    "a row has 3 positions, more than 2": lambda: pad_positions(full_batch(), 2),
    'batch has no "labels"': lambda: pad_positions(batch_of(input_ids=IDS), 4),
    "sample 1 has .*'b': .*, but sample 0": lambda: collate([{"a": IDS}, {"a": IDS, "b": IDS}]),
    r"must return a TensorDict with .*\[2\]": lambda: apply_transforms(full_batch(), [FIRST]),
    "18 pos.* by 8; .*16 and 24": lambda: shard_sequence(sequences(18), rank=0, world=4),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_batches_are_named(message):
    with pytest.raises((ValueError, TypeError), match=message):
        BAD[message]()
