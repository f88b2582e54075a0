"""What a micro-batch must be, and the functions that make, pad and slice one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import SPEC
from tensordict import TensorDict

import forgekit as fk
from forgekit.data.batch import (
    apply_transforms,
    check_batch,
    collate,
    join_positions,
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


def full_batch():
    return batch_of(
        input_ids=IDS, labels=IDS, position_ids=IDS, doc_ids=IDS, source=torch.tensor([0, 1])
    )


def test_whole_batches_pass():
    check_batch(full_batch())
    check_batch(batch_of(input_ids=IDS.int(), labels=IDS.int()))


BAD = {
    "labels": (
        batch_of(input_ids=IDS, doc_ids=IDS),
        ValueError,
        'batch has no "labels"; it has "input_ids", "doc_ids". forgekit.shift_labels adds them.',
    ),
    "ids": (
        batch_of(labels=IDS),
        ValueError,
        'batch has no "input_ids"; it has "labels". Name the',
    ),
    "deep": (
        batch_of(input_ids=IDS[..., None], labels=IDS),
        ValueError,
        r'"input_ids" has shape \(2, 3, 1\); it must be \[b s\], .* forgekit\.data\.collate st',
    ),
    "dict": ({"input_ids": IDS}, TypeError, "batch is a dict; a micro-batch is a TensorDict"),
    "short": (
        batch_of(input_ids=IDS, labels=IDS[:, 1:]),
        ValueError,
        r'"labels" has shape \(2, 2\); it must be \[b s\] like input_ids, here \(2, 3\)',
    ),
    "source": (
        full_batch().set("source", IDS),
        ValueError,
        r'"source" .* must be \[b\], here \(2,',
    ),
    "float": (
        full_batch().set("labels", IDS.half()),
        TypeError,
        r"torch.float16; .* \.to\(device\)",
    ),
    "bool": (full_batch().set("input_ids", IDS > 1), TypeError, '"input_ids" holds torch.bool'),
}


@pytest.mark.parametrize(("batch", "error", "message"), BAD.values(), ids=BAD)
def test_bad_batches_are_named(batch, error, message):
    with pytest.raises(error, match=message):
        check_batch(batch)


def test_labels_are_the_next_tokens_and_share_no_memory():
    shifted = shift_labels(batch_of(input_ids=IDS, position_ids=IDS + 10, source=IDS[:, 0]))
    assert shifted["input_ids"].tolist() == [[0, 1], [3, 4]]
    assert shifted["labels"].tolist() == [[1, 2], [4, 5]]
    assert shifted["position_ids"].tolist() == [[10, 11], [13, 14]]
    assert shifted["source"].tolist() == [0, 3]
    check_batch(shifted)
    shifted["labels"].zero_()
    assert shifted["input_ids"].tolist() == [[0, 1], [3, 4]]
    assert IDS.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_no_label_crosses_documents_or_reaches_padding():
    documents = torch.tensor([[0, 0, 1, 1, -1, -1]])
    batch = TensorDict({"input_ids": torch.arange(6)[None], "doc_ids": documents}, batch_size=[1])
    assert shift_labels(batch)["labels"].tolist() == [[1, -100, 3, -100, -100]]


def test_bad_shifts_are_refused():
    with pytest.raises(ValueError, match=r'batch has "labels" already; .* del batch\["labels"\]'):
        shift_labels(full_batch())
    with pytest.raises(ValueError, match=r'"input_ids" has shape \(2, 1\); shifting needs'):
        shift_labels(batch_of(input_ids=IDS[:, :1]))
    with pytest.raises(ValueError, match='batch has no "input_ids"'):
        shift_labels(batch_of(labels=IDS))


def test_a_masked_batch_carries_no_loss_and_leaves_the_original():
    batch = full_batch()
    masked = mask_batch(batch)
    assert masked["labels"].eq(-100).all()
    assert masked["doc_ids"].eq(-1).all()
    assert masked["input_ids"].equal(IDS)
    assert batch["labels"].equal(IDS)
    assert batch["doc_ids"].equal(IDS)
    with pytest.raises(ValueError, match='batch has no "labels"'):
        mask_batch(batch_of(input_ids=IDS))


@pytest.mark.parametrize("kind", [TensorDict, dict])
def test_samples_are_stacked(kind):
    samples = [kind({"input_ids": row, "source": row[0]}) for row in IDS]
    batch = collate(samples)
    assert batch.batch_size == torch.Size([2])
    assert batch["input_ids"].equal(IDS)
    assert batch["source"].tolist() == [0, 3]


BAD_SAMPLES = {
    "keys": (
        [{"a": IDS}, {"a": IDS, "b": IDS}],
        '^sample 1 has "a" int64 .2, 3., "b" int64 .2, 3.; sample 0 has "a" int64 .2, 3.. All',
    ),
    "shapes": (
        [{"a": IDS}, {"a": IDS[:1].float()}],
        r'^sample 1 has "a" float32 \[1, 3\]; sample 0 has "a" int64 \[2, 3\]. All must have',
    ),
}


@pytest.mark.parametrize(("samples", "message"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_samples_that_do_not_stack_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        collate(samples)


def rows_of(ids, documents=None):
    """A micro-batch of these tokens, shifted."""
    tensors = {"input_ids": torch.tensor(ids)}
    if documents is not None:
        tensors["doc_ids"] = torch.tensor(documents)
    return shift_labels(TensorDict(tensors, [len(ids)]))


def test_padding_fills_each_key_in_its_way():
    batch = rows_of([[5, 6, 7, 8], [1, 2, 3, 4]], [[0, 0, 1, 1], [0, 0, 0, 0]])
    batch["source"] = torch.tensor([3, 4])
    padded = pad_positions(batch, multiple=4, token=9)
    assert padded["input_ids"].tolist() == [[5, 6, 7, 9], [1, 2, 3, 9]]
    assert padded["labels"].tolist() == [[6, -100, 8, -100], [2, 3, 4, -100]]
    assert padded["doc_ids"].tolist() == [[0, 0, 1, -1], [0, 0, 0, -1]]
    assert padded["source"].tolist() == [3, 4]
    assert batch["labels"].shape == (2, 3)
    assert pad_positions(padded, multiple=2)["labels"].tolist() == padded["labels"].tolist()


def test_padding_that_cannot_be_is_refused():
    with pytest.raises(
        ValueError, match="a row has 3 positions, more than 2; truncate or drop long"
    ):
        pad_positions(rows_of([[1, 2, 3, 4]]), 2)
    with pytest.raises(ValueError, match="positions 6 must be divisible by multiple 4"):
        pad_positions(rows_of([[1, 2, 3, 4]]), 6, multiple=4)


def test_padded_positions_change_no_gradient():
    model = fk.Transformer(SPEC).double()
    short = rows_of([[5, 6, 7, 8], [1, 2, 3, 4]])
    gradients = []
    for batch in (short, pad_positions(short, 8)):
        loss = fk.cross_entropy(model(batch["input_ids"]), batch["labels"])
        gradients.append((loss.sum, torch.autograd.grad(loss.sum, list(model.parameters()))))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_a_transform_that_returns_something_else_is_named():
    def forgets(batch):
        batch["labels"]

    with pytest.raises(TypeError, match="the transform forgets returned a NoneType; return the Te"):
        apply_transforms(rows_of([[1, 2, 3]]), [forgets])
    with pytest.raises(ValueError, match=r"made rows \[1\] of \[2\]; samples are counted in rows"):
        apply_transforms(rows_of([[1, 2, 3], [4, 5, 6]]), [lambda batch: batch[:1]])


METHODS = ("zigzag", "contiguous")


def sequences(positions, rows=2):
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
    batch = sequences(2 * world * chunk, rows)
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


@pytest.mark.parametrize("method", METHODS)
def test_nested_tensors_are_sliced_alike(method):
    """Choices of experts by layer, for example."""
    batch = sequences(8)
    choice = torch.arange(48).view(2, 8, 3)
    batch["replay"] = TensorDict({"layers.1": choice, "layers.3": choice + 50}, [2])
    parts = [shard_sequence(batch, rank=rank, world=2, method=method) for rank in range(2)]
    taken = parts[1]["replay", "layers.1"]
    assert torch.equal(taken, slice_positions(choice, rank=1, world=2, method=method, dim=1))
    whole = unshard_sequence(parts, method=method)
    for layer in ("layers.1", "layers.3"):
        assert torch.equal(whole["replay", layer], batch["replay", layer])


BAD_SLICES = {
    "zigzag": (
        {"world": 4},
        r"18 positions must be divisible by 2 \* world = 8 to be sharded zigzag; the nearest are",
    ),
    "contiguous": (
        {"world": 4, "method": "contiguous"},
        r"18 positions must be divisible by world = 4 to be sharded contiguous; .* are 16 and 20.",
    ),
    "rank": ({"rank": 3, "world": 3}, r"rank 3 must lie in range\(world=3\)"),
    "method": (
        {"world": 3, "method": "striped"},
        """method is 'striped'; it is one of "zigzag", "contiguous".""",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD_SLICES.values(), ids=BAD_SLICES)
def test_slices_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        shard_sequence(sequences(18), **{"rank": 0, **options})


def test_slices_that_do_not_belong_together_are_refused():
    first, second = (shard_sequence(sequences(8), rank=r, world=2) for r in range(2))
    with pytest.raises(
        ValueError,
        match=r'slice 1 has "input_ids".*; slice 0 has .*"labels" int64',
    ):
        unshard_sequence([first, second.exclude("labels")])
    with pytest.raises(
        ValueError,
        match=r'slice 1 has "input_ids" int64 \[2, 2\].* int64 \[2, 4\]',
    ):
        unshard_sequence([first, shard_sequence(sequences(4), rank=1, world=2)])
