"""Settings, losses and prompts of a training script that have to be refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from tensordict import TensorDict

import forgekit as fk

SPEC = fk.TransformerSpec(
    vocab_size=16, dim=24, layers=1, heads=6, kv_heads=2, ffn_dim=8, max_seq_len=8
)
IDS = torch.arange(6).reshape(2, 3)


def create():
    model = fk.Transformer(SPEC)
    return fk.TrainState.create(model, fk.adamw(model))


def batch_of(**tensors):
    return TensorDict({"input_ids": IDS, "labels": IDS, **tensors}, batch_size=[2])


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def returning(make):
    """A step's sums for a loss function that returns what ``make`` makes of the logits' sum."""
    loss = lambda model, batch: make(model(batch["input_ids"]).sum())  # noqa: E731
    return lambda: fk.accumulate(create(), [batch_of()], loss)


def step(**options):
    return fk.make_step(loss_fn, **{"schedule": fk.constant(0.1), **options})


def generate(**options):
    return fk.generate(fk.Transformer(SPEC), **{"prompts": IDS, "max_new_tokens": 1, **options})


CASES = {
    "a schedule that gives NaN": (
        lambda: step(schedule=lambda _: math.nan)(create(), [batch_of()]),
        ValueError,
        "^the learning rate of step 0 is nan; it must be finite and not negative",
    ),
    "a sample for a batch": (
        lambda: fk.accumulate(create(), [batch_of()[0]], loss_fn),
        TypeError,
        r"^a micro-batch is a TensorDict with batch_size \[\]; .* Use TensorDict\(tensors, batch_s",
    ),
    "a mistyped time of reduction": (
        lambda: fk.accumulate(create(), [batch_of()], loss_fn, sync="lst"),
        ValueError,
        "^sync is 'lst'",
    ),
    "a loss without a graph": (
        returning(lambda total: fk.Loss(total.detach(), 1)),
        ValueError,
        "^the loss that loss_fn returned does not depend on any trainable parameter; a micro-batch",
    ),
    "a metric of several numbers": (
        returning(lambda total: fk.Loss(total, 1, {"a": torch.ones(3)})),
        ValueError,
        r"^a loss has a sum, count or metric of shape \(3,\); each is a number .* Sum it first",
    ),
    "a metric with a name that is taken": (
        returning(lambda total: fk.Loss(total, 1, {"lr": 1.0})),
        ValueError,
        r"^a loss reports \['lr'\], names that every step reports; rename",
    ),
    "labels that were cast": (
        lambda: fk.accumulate(create(), [batch_of(labels=IDS.bfloat16())], loss_fn),
        TypeError,
        r"^labels hold torch\.bfloat16, in which not all of .* move a batch with .to\(device\)",
    ),
    "an end without tokens": (
        partial(generate, stop=[[]]),
        ValueError,
        r"^stop holds \[\]; it must hold sequences of at least one token id",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), CASES.values(), ids=CASES)
def test_what_cannot_be_trained_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
