"""Prompt masks and padding against tables by hand and a plain loop over tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import SPEC
from tensordict import TensorDict

import forgekit as fk
from forgekit.data.batch import apply_transforms

START, STOP = 1, 2


def rows(ids, documents=None) -> TensorDict:
    """A micro-batch of these tokens, shifted."""
    tensors = {"input_ids": torch.tensor(ids)}
    if documents is not None:
        tensors["doc_ids"] = torch.tensor(documents)
    return fk.shift_labels(TensorDict(tensors, [len(ids)]))


def by_loop(batch: TensorDict, stop: int | None) -> list[list[int]]:
    """Walk along each row and remember whether an answer is going on."""
    wanted = []
    for row in batch:
        documents = row["doc_ids"].tolist() if "doc_ids" in row else [0] * row["labels"].numel()
        is_answer, before, out = False, None, []
        columns = row["input_ids"].tolist(), row["labels"].tolist(), documents
        for token, label, document in zip(*columns, strict=True):
            if document != before:
                is_answer = False
            if token == stop:
                is_answer = False
            if token == START:
                is_answer = True
            before = document
            out.append(label if is_answer else -100)
        wanted.append(out)
    return wanted


@given(st.data(), st.sampled_from([STOP, None]), st.booleans())
def test_answers_alone_carry_a_loss(data, stop, packed):
    shape = data.draw(st.tuples(st.integers(1, 3), st.integers(2, 12)))
    tokens = st.lists(st.integers(0, 4), min_size=shape[1], max_size=shape[1])
    ids = [data.draw(tokens) for _ in range(shape[0])]
    documents = [sorted(data.draw(tokens)) for _ in range(shape[0])] if packed else None
    batch = rows(ids, documents)
    masked = fk.data.mask_prompts(batch, START, stop)
    assert masked["labels"].tolist() == by_loop(batch, stop)
    assert torch.equal(masked["input_ids"], batch["input_ids"])
    for row, label_row in zip(masked, batch, strict=True):  # and one row at a time
        assert torch.equal(fk.data.mask_prompts(label_row, START, stop)["labels"], row["labels"])


def test_two_turns_and_a_second_document_by_hand():
    batch = rows([[9, 1, 5, 2, 8, 1, 6, 7, 7]], [[0, 0, 0, 0, 0, 0, 0, 3, 3]])
    masked = fk.data.mask_prompts(batch, START, STOP)["labels"].tolist()
    assert masked == [[-100, 5, 2, -100, -100, 6, -100, -100]]


def test_a_mask_before_labels_is_refused():
    with pytest.raises(ValueError, match=r'batch has no "labels"; it has "input_ids".*shift_lab'):
        fk.data.mask_prompts(TensorDict({"input_ids": torch.ones(2, 3)}, [2]), START)
    with pytest.raises(ValueError, match=r"start and stop are both 1; .*another token"):
        fk.data.mask_prompts(rows([[1, 2, 3]]), START, START)


def test_padding_fills_each_key_in_its_way():
    batch = rows([[5, 6, 7, 8], [1, 2, 3, 4]], [[0, 0, 1, 1], [0, 0, 0, 0]])
    batch["source"] = torch.tensor([3, 4])
    padded = fk.data.pad_positions(batch, multiple=4, token=9)
    assert padded["input_ids"].tolist() == [[5, 6, 7, 9], [1, 2, 3, 9]]
    assert padded["labels"].tolist() == [[6, -100, 8, -100], [2, 3, 4, -100]]
    assert padded["doc_ids"].tolist() == [[0, 0, 1, -1], [0, 0, 0, -1]]
    assert padded["source"].tolist() == [3, 4]
    assert batch["labels"].shape == (2, 3)
    assert fk.data.pad_positions(padded, multiple=2)["labels"].tolist() == padded["labels"].tolist()


def test_padding_that_cannot_be_is_refused():
    with pytest.raises(
        ValueError, match="a row has 3 positions, more than 2; truncate or drop long"
    ):
        fk.data.pad_positions(rows([[1, 2, 3, 4]]), 2)
    with pytest.raises(ValueError, match="positions 6 must be divisible by multiple 4"):
        fk.data.pad_positions(rows([[1, 2, 3, 4]]), 6, multiple=4)
    with pytest.raises(ValueError, match=r'batch has no "labels"'):
        fk.data.pad_positions(TensorDict({"input_ids": torch.ones(2, 3)}, [2]), 8)


def test_padded_positions_change_no_gradient():
    model = fk.Transformer(SPEC).double()
    short = rows([[5, 6, 7, 8], [1, 2, 3, 4]])
    gradients = []
    for batch in (short, fk.data.pad_positions(short, 8)):
        loss = fk.cross_entropy(model(batch["input_ids"]), batch["labels"])
        gradients.append((loss.sum, torch.autograd.grad(loss.sum, list(model.parameters()))))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_transforms_run_in_their_order():
    add = partial(_scale_and_add, factor=1, more=1)
    double = partial(_scale_and_add, factor=2, more=0)
    batch = rows([[1, 2, 3]])
    assert apply_transforms(batch, (add, double))["input_ids"].tolist() == [[4, 6]]
    assert apply_transforms(batch, (double, add))["input_ids"].tolist() == [[3, 5]]


def _scale_and_add(batch, factor, more):
    return TensorDict({**batch, "input_ids": batch["input_ids"] * factor + more}, batch.batch_size)


def test_a_transform_that_returns_something_else_is_named():
    def forgets(batch):
        batch["labels"]

    with pytest.raises(TypeError, match="the transform forgets returned a NoneType; return the Te"):
        apply_transforms(rows([[1, 2, 3]]), [forgets])
    with pytest.raises(ValueError, match=r"made rows \[1\] of \[2\]; samples are counted in rows"):
        apply_transforms(rows([[1, 2, 3], [4, 5, 6]]), [lambda batch: batch[:1]])
