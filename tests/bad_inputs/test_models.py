"""Sizes, meshes, schedules, losses and steps that have to be refused."""

from __future__ import annotations

import math
from functools import partial

import attrs
import pytest
import torch
from tensordict import TensorDict

import forgekit as fk

pytestmark = pytest.mark.bad_input

SPEC = fk.TransformerSpec(
    vocab_size=16, dim=24, layers=1, heads=6, kv_heads=2, ffn_dim=8, max_seq_len=8
)
IDS = torch.arange(6).reshape(2, 3)


def batch_of(**tensors):
    return TensorDict({"input_ids": IDS, "labels": IDS, **tensors}, batch_size=[2])


def create(**fields):
    model = fk.Transformer(SPEC)
    return fk.TrainState.create(model, fk.adamw(model), **fields)


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def returning(make):
    """A loss function that returns what ``make`` makes of the logits' sum."""
    return lambda model, batch: make(model(batch["input_ids"]).sum())


def accumulate(loss=loss_fn, batches=None, **options):
    return fk.accumulate(create(), [batch_of()] if batches is None else batches, loss, **options)


def step(**options):
    return fk.make_step(loss_fn, **{"schedule": fk.constant(0.1), **options})


def update(**options):
    totals = fk.Totals.of(targets=1, loss=1.0, grad_sq=1.0, loss_scale=1.0)
    return fk.update(create(), fk.clip(totals), **{"lr": 0.1, "totals": totals, **options})


def generate(**options):
    return fk.generate(fk.Transformer(SPEC), **{"input_ids": IDS, "max_new_tokens": 1, **options})


SIZES = ("vocab_size", "dim", "layers", "heads", "kv_heads", "ffn_dim", "max_seq_len")
MESH = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
LR = "must be finite and not negative"
SPECS = {
    **{
        f"{name} below zero": (
            partial(attrs.evolve, SPEC, **{name: -1}),
            ValueError,
            rf"^{name} is -1; it must be at least 1\.$",
        )
        for name in SIZES
    },
    **{
        f"{name} {size}": (
            partial(fk.MeshSpec, **{name: size}),
            ValueError,
            rf"^{name} is {size}; a mesh dimension is at least 1, or -1 once\.$",
        )
        for name in MESH
        for size in (0, -2)
    },
    **{
        f"{name} {value}": (
            partial(attrs.evolve, SPEC, **{name: value}),
            ValueError,
            rf"^{name} is {value}; it must be .*finite",
        )
        for name, values in {"rope_theta": (0, math.nan), "norm_eps": (-1.0, math.nan)}.items()
        for value in values
    },
    "heads that nothing divides": (
        partial(attrs.evolve, SPEC, kv_heads=7),
        ValueError,
        r"^kv_heads 7 must divide heads 6; it can be one of \[1, 2, 3, 6\]\.$",
    ),
    "two sizes that are left": (
        partial(fk.MeshSpec, dp_replicate=-1, tp=-1, dp_shard=1),
        ValueError,
        r"^dp_replicate and tp are both -1; only one can be what is left\.$",
    ),
}
RATES = {
    "constant": lambda **given: fk.constant(given.get("peak", 0.1)),
    "linear": lambda **given: fk.optim.linear(**{"peak": 0.1, "total": 8, **given}),
    "cosine": lambda **given: fk.optim.cosine(**{"peak": 0.1, "total": 8, **given}),
    "wsd": lambda **given: fk.wsd(**{"peak": 0.1, "warmup": 1, "decay": 2, "total": 8, **given}),
    "warmup_linear": lambda **given: fk.optim.warmup_linear(
        **{"peak": 0.1, "warmup": 1, "total": 8, **given}
    ),
    "warmup_cosine": lambda **given: fk.warmup_cosine(
        **{"peak": 0.1, "warmup": 1, "total": 8, **given}
    ),
}
SETTINGS = {
    **{
        f"{schedule} with a peak of {value!r}": (
            partial(RATES[schedule], peak=value),
            ValueError,
            rf"^peak is {value!r}; it must be finite and not negative\.$",
        )
        for schedule in RATES
        for value in (-0.1, math.nan, math.inf)
    },
    "a run of no steps": (
        lambda: fk.wsd(1.0, warmup=0, decay=0, total=0),
        ValueError,
        "^warmup 0 .* must fit into total 0, with a decay of at least 1 step",
    ),
    **{
        f"a bound of {bound}": (
            partial(step, max_norm=bound),
            ValueError,
            rf"^max_norm is {bound}; it must be positive\. inf does not clip\.$",
        )
        for bound in (0, -1.0, math.nan)
    },
    **{
        f"a rate of {rate}": (
            partial(update, lr=rate),
            ValueError,
            rf"^the learning rate of step 0 is {rate}; it {LR}",
        )
        for rate in (-1.0, math.nan, math.inf)
    },
    **{
        f"a schedule that gives {rate}": (
            lambda rate=rate: step(schedule=lambda _: rate)(create(), [batch_of()]),
            ValueError,
            rf"^the learning rate of step 0 is {rate}; it {LR}",
        )
        for rate in (-1.0, math.nan)
    },
    **{
        f"spikes of {value} {name}": (
            partial(fk.SpikeLimit, **{name: value}),
            ValueError,
            message,
        )
        for name, value, message in (
            ("sigmas", -1.0, r"^sigmas is -1\.0; it must be positive and finite, like 6\.0"),
            ("sigmas", math.nan, r"^sigmas is nan; it must be positive and finite, like 6\.0"),
            ("sigmas", math.inf, r"^sigmas is inf; it must be positive and finite, like 6\.0"),
            ("window", 0, "^least is 32 good steps and window 0; .* the window must hold them"),
            ("least", -3, "^least is -3 good steps and window 128; a deviation needs at least 2"),
        )
    },
    "a way back from a good step": (
        lambda: fk.run.roll_back(create(), "never"),
        ValueError,
        "^step 0 was good, so there is nothing to roll back from",
    ),
}
STEPS = {
    "an optimizer of another model": (
        lambda: fk.TrainState.create(fk.Transformer(SPEC), fk.adamw(fk.Transformer(SPEC))),
        ValueError,
        r"^the optimizer holds a parameter of shape .* Build the optimizer from the model after pa",
    ),
    "a sample for a batch": (
        partial(accumulate, batches=[batch_of()[0]]),
        TypeError,
        r"^a micro-batch is a TensorDict with batch_size \[\]; .* Use TensorDict\(tensors, batch_s",
    ),
    "a batch for the list": (
        lambda: accumulate(batches=batch_of()),
        TypeError,
        r"^batches is one TensorDict of batch_size \[2\]; a step takes a list .* Pass \[batch\]",
    ),
    "no micro-batch": (
        partial(accumulate, batches=[]),
        ValueError,
        "^a step got no micro-batch; every rank must bring at least one",
    ),
    "a loss of None": (
        partial(accumulate, lambda model, batch: None),
        TypeError,
        r"^loss_fn returned a NoneType; a step needs forgekit\.Loss\(sum, count\), the summed loss",
    ),
    "a loss of several numbers": (
        partial(accumulate, lambda model, batch: fk.Loss(model(batch["input_ids"]), 1)),
        ValueError,
        r"^the loss that loss_fn returned has a sum of shape \(2, 3, 16\); .* Sum it: Loss\(losses",
    ),
    "labels that were cast": (
        partial(accumulate, batches=[batch_of(labels=IDS.bfloat16())]),
        TypeError,
        r"^labels hold torch\.bfloat16; they must hold signed integers\. Move a batch with",
    ),
    "one source for many": (
        lambda: fk.losses_by_source(loss_fn, "code"),
        TypeError,
        r"^sources is the text 'code'; pass a sequence of names: order\.sources",
    ),
    "tokens without an expert": (
        lambda: fk.model.dispatch_local(
            torch.ones(3, 1), torch.tensor([0, 1]), 2, lambda x, counts: x
        ),
        ValueError,
        r"^tokens have shape \(3, 1\) and expert_ids \(2,\); expert_ids must be \[n\], one for",
    ),
    "a loss without a graph": (
        partial(accumulate, returning(lambda total: fk.Loss(total.detach(), 1))),
        ValueError,
        "^the loss that loss_fn returned does not depend on any trainable parameter; a micro-batch",
    ),
    "a metric of several numbers": (
        partial(accumulate, returning(lambda total: fk.Loss(total, 1, {"a": torch.ones(3)}))),
        ValueError,
        r"^a loss has a sum, count or metric of shape \(3,\); each is a number .* Sum it first",
    ),
    "a metric with a name that is taken": (
        partial(accumulate, returning(lambda total: fk.Loss(total, 1, {"lr": 1.0}))),
        ValueError,
        r"^a loss reports \['lr'\], names that every step reports; rename",
    ),
    "one name for two metrics": (
        lambda: fk.Loss(torch.ones(()), 1, {"a": 1}) + fk.Loss(torch.ones(()), 1, {"a": 1}),
        ValueError,
        r"^both losses report \['a'\]; rename one of each",
    ),
    "totals that were not reduced": (
        lambda: fk.clip(fk.Totals.of(targets=1, loss=1.0), max_norm=1.0),
        KeyError,
        r"totals have no 'grad_sq'; they have \['loss', .*forgekit\.reduce_totals\(totals, state\)",
    ),
    "an evaluation of nothing": (
        lambda: fk.evaluate(create(), [], loss_fn),
        ValueError,
        "^evaluate got no micro-batch; every rank must bring at least one",
    ),
    "an evaluation without a loss": (
        lambda: fk.evaluate(create(), [batch_of()], lambda model, batch: 3.0),
        TypeError,
        r"^loss_fn returned a float; a step needs forgekit\.Loss\(sum, count\), the summed loss",
    ),
    "more places than the model takes": (
        lambda: fk.Transformer(SPEC)(torch.zeros(1, 9, dtype=torch.int64)),
        ValueError,
        r"^input_ids has 9 positions; max_seq_len is 8\. Shorten",
    ),
    "a prompt without tokens": (
        partial(generate, input_ids=[[1], []]),
        ValueError,
        r"^prompt 1 has shape \(0,\); it must be \[s\], s >= 1\.",
    ),
    "no prompts": (partial(generate, input_ids=[]), ValueError, r"^prompts is \[\]; it must hold"),
    "an end without tokens": (
        partial(generate, stop=[[]]),
        ValueError,
        r"^stop holds \[\]; it must hold sequences of at least one token id",
    ),
}
TABLES = {"sizes": SPECS, "settings": SETTINGS, "step": STEPS}
CASES = {f"{table}: {name}": row for table, rows in TABLES.items() for name, row in rows.items()}


@pytest.mark.parametrize(("call", "error", "message"), CASES.values(), ids=CASES)
def test_what_cannot_be_trained_is_refused(call, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        call()
    assert not list(tmp_path.iterdir())
