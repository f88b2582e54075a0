"""Streams that end after different steps end together, and each target counts once."""

from __future__ import annotations

import math

import pytest
import torch
from lab import (
    SPEC,
    full_tensors,
    global_batch,
    lay_out,
    logits_loss,
    reference_gradients,
    relative_error,
)
from pool import run_again

import forgekit as fk


def micro_batches(rank, count):
    return [global_batch(2, seed=number)[0][rank] for number in range(count)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


def train(rank, world, policy, lengths):
    """Steps of two micro-batches until the data have ended: targets and gradients of each."""
    state = lay_out(fk.Transformer(SPEC).double(), build=sgd)
    end = fk.run.DataEnd(policy)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.0), max_norm=math.inf, end=end)
    stream = iter(micro_batches(rank, lengths[rank]))  # without a length
    found = []
    for batches in fk.groups(stream, 2, end=end):
        state, metrics = step(state, batches)
        gradients = full_tensors(state.model, gradients=True)  # as SGD has used them
        found.append((float(metrics["targets"]), gradients))
    return found, len(list(stream))


# Micro-batches of each rank, steps, and what is left: one micro-batch was looked at.
ENDS = [("pad", (5, 2), 3, [0, 0]), ("drop", (5, 2), 1, [2, 0])]


@pytest.mark.parametrize(("policy", "lengths", "steps", "left"), ENDS)
def test_ranks_end_after_the_same_step_and_every_target_counts_once(policy, lengths, steps, left):
    by_rank = run_again(train, 2, policy, lengths)
    assert [len(found) for found, _ in by_rank] == [steps] * 2
    assert [rest for _, rest in by_rank] == left
    for step in range(steps):
        rows = [micro_batches(rank, lengths[rank])[2 * step : 2 * step + 2] for rank in range(2)]
        gradients, _ = reference_gradients(fk.Transformer(SPEC), rows)
        for found, _ in by_rank:
            labels = torch.cat([batch["labels"] for row in rows for batch in row])
            assert found[step][0] == (labels != -100).sum()
            assert relative_error(found[step][1], gradients) < 1e-10


def test_a_stream_without_anything_left_knows_what_padding_looks_like():
    stream = fk.data.stream_documents([[1, 2, 3]], 4, 1, eos_id=0, rank=0, world=1, epochs=1)
    assert [int((batch["labels"] != -100).sum()) for batch in stream] == [3]
    for batch in next(fk.groups(stream, 2, end=fk.run.DataEnd("pad"))):
        assert batch["input_ids"].shape == (1, 4)
        assert bool((batch["labels"] == -100).all())
        assert bool((batch["doc_ids"] == -1).all())


# Mistakes


def test_each_mistake_is_named():
    with pytest.raises(ValueError, match=r"policy is 'repeat'; it must be one of .pad., .drop."):
        fk.run.DataEnd("repeat")
    with pytest.raises(ValueError, match="partial 'drop' and end contradict each other"):
        fk.groups([1], 1, partial="drop", end=fk.run.DataEnd())
    with pytest.raises(RuntimeError, match="passed to make_step but not to groups"):
        fk.run.DataEnd().vote()
    loop = fk.groups(iter(micro_batches(0, 5)), 1, end=fk.run.DataEnd())
    next(loop)
    with pytest.raises(RuntimeError, match=r"passed to groups but not to make_step.*make_step"):
        next(loop)
    with pytest.raises(ValueError, match="stream ended before its first micro-batch"):
        list(next(fk.groups(iter(()), 1, end=fk.run.DataEnd())))
    stream = fk.data.stream_documents([[1, 2], [3, 4]], 4, 1, eos_id=0, rank=0, world=2, epochs=1)
    with pytest.raises(ValueError, match=r"one of 2 and ends on its own.*DataEnd"):
        fk.groups(stream, 1)
