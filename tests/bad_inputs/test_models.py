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


TOTAL = "^a loss has a sum, count or metric of shape"
CASES = [
    (
        lambda: step(schedule=lambda _: math.nan)(create(), [batch_of()]),
        "^the learning rate of step 0",
    ),
    (
        lambda: fk.accumulate(create(), [batch_of()[0]], loss_fn),
        r"^a micro-batch is .* Use TensorDict",
    ),
    (lambda: fk.accumulate(create(), [batch_of()], loss_fn, sync="lst"), "^sync is 'lst'"),
    (returning(lambda total: fk.Loss(total.detach(), 1)), "does not depend on any trainable param"),
    (returning(lambda total: fk.Loss(total, 1, {"a": torch.ones(3)})), rf"{TOTAL} .* Sum it first"),
    (
        returning(lambda total: fk.Loss(total, 1, {"lr": 1.0})),
        r"^a loss reports \['lr'\].*; rename",
    ),
    (
        lambda: fk.accumulate(create(), [batch_of(labels=IDS.bfloat16())], loss_fn),
        r"^labels hold torch\.bfloat16, in which not all of .* move a batch with .to\(device\)",
    ),
    (partial(generate, stop=[[]]), r"^stop holds \[\]; .* sequences of at least one token id"),
]


@pytest.mark.parametrize(("call", "message"), CASES)
def test_what_cannot_be_trained_is_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
