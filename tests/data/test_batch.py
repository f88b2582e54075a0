"""What a micro-batch must be, and the steps that make one."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from forgekit.data.batch import check_batch, collate, mask_batch, shift_labels

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
    "empty": (batch_of(), ValueError, 'batch has no "input_ids"; it has nothing'),
    "dict": ({"input_ids": IDS}, TypeError, "batch is a dict; a micro-batch is a TensorDict"),
    "sample": (
        TensorDict({"input_ids": IDS[0]}),
        ValueError,
        r"has batch_size \[\]; a micro-batch",
    ),
    "flat": (
        batch_of(input_ids=IDS[:, 0], labels=IDS),
        ValueError,
        r'"input_ids" has shape \(2,\); it must be \[b s\], rows by positions',
    ),
    "short": (
        batch_of(input_ids=IDS, labels=IDS[:, 1:]),
        ValueError,
        r'"labels" has shape \(2, 2\); it must be \[b s\] like input_ids, here \(2, 3\)',
    ),
    "documents": (full_batch().set("doc_ids", IDS[:, :1]), ValueError, r'"doc_ids" has shape'),
    "positions": (full_batch().set("position_ids", IDS[:, :1]), ValueError, '"position_ids" has s'),
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


@pytest.mark.bad_input
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
    "none": ([], "there are no samples to collate"),
    "keys": (
        [{"a": IDS}, {"a": IDS, "b": IDS}],
        '^sample 1 has "a" int64 .2, 3., "b" int64 .2, 3.; sample 0 has "a" int64 .2, 3.. All',
    ),
    "shapes": (
        [{"a": IDS}, {"a": IDS[:1]}],
        r'^sample 1 has "a" int64 \[1, 3\]; sample 0 has "a" int64 \[2, 3\]. All must have',
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("samples", "message"), BAD_SAMPLES.values(), ids=BAD_SAMPLES)
def test_samples_that_do_not_stack_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        collate(samples)
