"""Streams that end after different steps end together, and each target counts once."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from lab import SPEC, full_tensors, logits_loss, reference_gradients, relative_error
from pool import RankError, run_again, run_ranks
from tensordict import TensorDict

import forgekit as fk

LENGTHS = (5, 2, 3)
"""Micro-batches of each rank; two make a group."""


def micro_batches(rank: int) -> list[TensorDict]:
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(rank))
    batches = []
    for _ in range(LENGTHS[rank]):
        ids = draw(0, SPEC.vocab_size, (2, 9))
        batches.append(TensorDict({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, [2]))
    return batches


def train(rank, world, policy, lengths):
    """Steps until the data have ended: targets and gradients of each."""
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    model = fk.parallelize(fk.Transformer(SPEC).double(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = fk.TrainState.create(model, optimizer, mesh=mesh)
    end = fk.run.DataEnd(policy)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.0), max_norm=math.inf, end=end)
    stream = iter(micro_batches(rank)[: lengths[rank]])  # without a length
    found = []
    for batches in fk.groups(stream, 2, end=end):
        state, metrics = step(state, batches)
        gradients = full_tensors(state.model, gradients=True)  # as SGD has used them
        found.append((float(metrics["targets"]), gradients))
    return found, len(list(stream))


def expected(step: int):
    """Targets of a step and the gradient of their mean loss."""
    rows = [batch for rank in range(3) for batch in micro_batches(rank)[2 * step : 2 * step + 2]]
    gradients, _ = reference_gradients(fk.Transformer(SPEC).double(), [rows])
    return sum(batch["labels"].numel() for batch in rows), gradients


@pytest.mark.parametrize(
    ("policy", "steps", "left"), [("pad", 3, [0, 0, 0]), ("drop", 1, [2, 0, 0])]
)
def test_ranks_end_after_the_same_step_and_every_target_counts_once(policy, steps, left):
    by_rank = run_ranks(train, 3, policy, LENGTHS)
    assert [len(found) for found, _ in by_rank] == [steps] * 3
    # One micro-batch was looked at.
    assert [rest for _, rest in by_rank] == left
    for index in range(steps):
        targets, gradients = expected(index)
        for found, _ in by_rank:
            assert found[index][0] == targets
            assert relative_error(found[index][1], gradients) < 1e-10


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_streams_that_end_after_the_same_step_are_no_error_and_bring_no_empty_step(policy):
    for found, _ in run_ranks(train, 2, policy, (2, 2)):
        assert [targets for targets, _ in found] == [4 * 2 * 8]


def test_an_uneven_end_is_an_error_on_every_rank_if_asked_for():
    with pytest.raises(RankError) as caught:
        run_ranks(train, 2, "error", (4, 2))
    for rank in (0, 1):
        assert f"rank {rank} of 2" in str(caught.value)
    assert str(caught.value).count("the data of 1 of 2 ranks have ended and the others'") == 2


def stream_train(rank, world):
    documents = [[number] * 7 for number in range(1, 4)]  # three, so one rank has two
    stream = fk.data.stream_documents(documents, 4, 1, eos_id=0, rank=rank, world=world, epochs=1)
    model = fk.Transformer(SPEC).double()
    mesh = fk.build_mesh(fk.MeshSpec(), device="cpu")
    model = fk.parallelize(model, mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    end = fk.run.DataEnd("pad")
    step = fk.make_step(logits_loss, schedule=fk.constant(0.0), end=end)
    targets = []
    for batches in fk.groups(stream, 1, end=end):
        state, metrics = step(state, batches)
        targets.append(int(metrics["targets"]))
    return targets, stream.rows, state.samples


def test_document_streams_of_one_epoch_train_on_every_document_once():
    (steps, rows, samples), (others, fewer, same) = run_again(stream_train, 2)
    assert steps == others
    assert sum(steps) == 3 * 7
    assert all(steps)
    # A stream knows its own rows only: 4 and 2, of which each rank made a number of its own.
    assert rows > fewer > 0
    assert samples == same == 2 * len(steps)


def empty_train(rank, world):
    stream = fk.data.stream_documents([[1, 2, 3]], 4, 1, eos_id=0, rank=0, world=1, epochs=1)
    end = fk.run.DataEnd("pad")
    for batch in stream:
        assert int((batch["labels"] != -100).sum()) == 3
    group = next(fk.groups(stream, 2, end=end))  # nothing is left, so padding alone
    for batch in group:
        assert batch["input_ids"].shape == (1, 4)
        assert bool((batch["labels"] == -100).all())
        assert bool((batch["doc_ids"] == -1).all())


def test_a_stream_without_anything_left_knows_what_padding_looks_like():
    run_ranks(empty_train, 1)


# Mistakes


def test_each_mistake_is_named():
    with pytest.raises(ValueError, match=r"policy is 'repeat'; it is one of .pad., .drop."):
        fk.run.DataEnd("repeat")
    with pytest.raises(ValueError, match="partial 'drop' and end contradict each other"):
        fk.groups([1], 1, partial="drop", end=fk.run.DataEnd())
    with pytest.raises(RuntimeError, match="passed to make_step but not to groups; pass the same"):
        fk.run.DataEnd().vote()
    endless = iter(micro_batches(0))
    loop = fk.groups(endless, 1, end=fk.run.DataEnd())
    next(loop)
    with pytest.raises(RuntimeError, match=r"passed to groups but not to make_step.*make_step"):
        next(loop)
    with pytest.raises(ValueError, match="stream ended before its first micro-batch"):
        list(next(fk.groups(iter(()), 1, end=fk.run.DataEnd())))
    stream = fk.data.stream_documents([[1, 2], [3, 4]], 4, 1, eos_id=0, rank=0, world=2, epochs=1)
    with pytest.raises(ValueError, match=r"one of 2 and ends on its own.*DataEnd"):
        fk.groups(stream, 1)
