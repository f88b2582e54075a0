"""A step and an evaluation through a pipeline, against one process in float64."""

from __future__ import annotations

import os
import re
import traceback
from functools import partial

import attrs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from covering import first_of
from distributed.models import logits_loss
from lab import SPEC, lay_out, mean_gradients, reference_gradients, relative_error, token_rows
from pool import RankError, on_ranks, run_again, run_ranks
from torch import nn

import forgekit as fk
from forgekit.model.transformer import Block
from forgekit.verification.measure import plain_backward

DEEP = attrs.evolve(SPEC, layers=4)  # two stages on a rank


def _batches(count, places=6, seed=0):
    """Ragged targets, the second micro-batch without any, two documents a row and padding."""
    batches = [token_rows(2, places, SPEC.vocab_size, 9 * seed + n) for n in range(count)]
    for batch in batches:
        batch["doc_ids"] = (torch.arange(places) >= places // 2).long().repeat(2, 1)
        batch["doc_ids"][1, -1] = -1
    for batch in batches[1:2]:
        batch["labels"].fill_(-100)
    return batches


def _expected(batches):
    """Gradients of the mean, and the loss, of one process; torch alone."""
    return reference_gradients(fk.Transformer(DEEP), [batches])


def _state(schedule, model=None, **sizes):
    model = fk.Transformer(DEEP).double() if model is None else model
    return lay_out(model, {"pp": 2, **sizes}, pipeline_schedule=schedule)


def _error(state, batches, expected):
    found = mean_gradients(state, batches, logits_loss)
    assert found.keys() == dict(state.model.named_parameters()).keys()
    return relative_error(found, {name: expected[name] for name in found})


class _Stream(list):
    """Notes when each micro-batch is pulled."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            self.events.append(f"pull {number}")
            yield batch


def _check_lazy(rank, world):
    state, batches, events = _state("1f1b"), _Stream(_batches(4)), []
    fk.accumulate(state, batches[:], logits_loss)  # shapes are known from here on
    batches.events = events

    def note(_module, _args, out):
        events.append("forward")
        out.register_hook(lambda _: events.append("backward"))

    state.layout.stages.modules[0].register_forward_hook(note)
    fk.accumulate(state, batches, logits_loss)
    pulls = [event for event in events if event != "backward"]
    assert pulls == [event for n in range(4) for event in (f"pull {n}", "forward")]
    return events


def test_a_micro_batch_is_pulled_when_its_first_stage_is_about_to_run():
    first, _ = run_again(_check_lazy, 2)
    ahead = ["pull 0", "forward", "pull 1", "forward", "backward", "pull 2", "forward"]
    assert first[:7] == ahead


@pytest.mark.parametrize(
    ("schedule", "count"),
    first_of(
        [("1f1b", 1), ("zbv", 3)],
        [("1f1b", 1), ("interleaved_1f1b", 5), ("zbv", 3), ("dualpipev", 2)],
    ),
)
@on_ranks(2, keep=True)
def test_evaluation_takes_any_number_of_micro_batches_of_any_shapes(rank, world, schedule, count):
    batches = [batch for n in range(count) for batch in _batches(1, places=3 + n % 3, seed=n)]
    (_, loss), state = _expected(batches), _state(schedule)
    for given in (batches, iter(batches)):
        found = fk.evaluate(state, given, logits_loss)
        torch.testing.assert_close(found["loss"], loss, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="evaluate got no micro-batch"):
        fk.evaluate(state, [], logits_loss)
    batches = _batches(4)  # what evaluation learned serves a step
    assert _error(state, batches, _expected(batches)[0]) < 1e-10


def _twice(model, batch):
    return fk.cross_entropy(model(batch["input_ids"]) + model(batch["input_ids"]), batch["labels"])


def _careful(model, batch):
    """What raises has to leave through ``except Exception``."""
    try:
        return _twice(model, batch)
    except Exception:
        return fk.Loss(torch.zeros(()), 0)


LOSSES = {
    "no call": (lambda model, batch: fk.Loss(torch.zeros(()), 0), "returned without calling its m"),
    "two calls": (_twice, "loss_fn called its model twice"),
    "no loss": (lambda model, batch: model(batch["input_ids"]).sum(), "loss_fn returned a Tensor"),
    "no such argument": (lambda model, batch: model(batch["input_ids"], mask=1), "'mask'"),
}


@on_ranks(2, timeout_s=30)
def test_what_cannot_run_is_refused_on_all_ranks_and_the_step_can_be_tried_again(rank, world):
    """Of what cannot run all ranks say so, before anything has run; then a step is what it is."""
    state = _state("1f1b")
    batches, refused = _batches(4), (ValueError, TypeError, RuntimeError)
    mine, others = _batches(2 + rank), _batches(4, places=6 + rank)
    given = {
        "a step got no micro-batch": [],
        r"1 micro-batches do not fit .* '1f1b' on 2 ranks": batches[:1],
        r"rank 0 has 2 of shape \(2, 6\), .*; rank 1 has 3 of shape \(2, 6\), ": mine,
        r"rank 0 has 4 of shape \(2, 6\), .*; rank 1 has 4 of shape \(2, 7\), ": others,
    }
    with pytest.raises(TypeError, match=r"'generator' has no len\(\)"):
        fk.accumulate(state, (batch for batch in batches), logits_loss)
    for message, wrong in given.items():
        with pytest.raises(refused, match=message):
            fk.accumulate(state, wrong, logits_loss)
        assert all(p.grad is None for p in state.model.parameters())
    for loss_fn, message in LOSSES.values():
        with pytest.raises(refused, match=message):
            fk.accumulate(state, batches, loss_fn)
    fk.evaluate(state, batches, _careful)
    assert _error(state, batches, _expected(batches)[0]) < 1e-10


def _order(rank, world):
    """What this rank sends and receives in an evaluation, in order."""
    state, batches, order = _state("zbv"), _batches(5), []

    def noting(name, call, *args):
        order.append(name)
        return call(*args)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("isend", "recv"):
            patch.setattr(dist, name, partial(noting, name, getattr(dist, name)))
        fk.evaluate(state, batches, logits_loss)
    return order


def test_an_evaluation_sends_in_the_order_in_which_the_other_rank_receives():
    """NCCL matches what two ranks exchange by one order for both directions; gloo does not."""
    first, second = run_ranks(_order, 2)
    assert [{"isend": "recv", "recv": "isend"}[name] for name in first] == second
    assert {"isend", "recv"} == set(first)


@on_ranks(2, timeout_s=30)
def test_ranks_that_evaluate_different_micro_batches_all_say_so(rank, world):
    state, batches = _state("zbv"), _batches(5)
    for other in ([*batches[:3], *_batches(1, places=5), *batches[3:]], batches[:4]):
        with pytest.raises(ValueError, match="ranks of a pipeline got different micro-ba"):
            fk.evaluate(state, iter(other if rank else batches), logits_loss)
    found = fk.evaluate(state, batches, logits_loss)
    torch.testing.assert_close(found["loss"], _expected(batches)[1], rtol=1e-12, atol=0)


class _Trip(Exception):
    pass


class _Tripping(torch.autograd.Function):
    """Raises on its way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, upstream):
        raise _Trip


class _Trips(list):
    """Micro-batches, and a loss function, that fail on one rank at the ``at``-th call."""

    def __init__(self, batches, state, where, at):
        super().__init__(batches)
        self.where, self.at, self.calls = where, at, 0
        block = next(m for m in state.layout.stages.modules[-1].layers if isinstance(m, Block))
        block.register_forward_pre_hook(partial(self.count, "in a block"))
        block.register_forward_hook(partial(self.count, "in backward"))

    def count(self, where, *given):
        if self.where != where:
            return None
        self.calls += 1
        if self.calls != self.at:
            return None
        if where == "in backward":
            return _Tripping.apply(given[-1])
        raise KeyboardInterrupt if where == "before the call" else _Trip

    def loss(self, model, batch):
        self.count("before the call")
        loss = logits_loss(model, batch)
        self.count("after the call")
        return loss

    def __iter__(self):
        for batch in super().__iter__():
            self.count("in the data")
            yield batch


class _Short(list):
    def __len__(self):
        return 4


TORN = {
    r"micro-batch 2 has shape \(2, 5\), the first one": lambda b: b[:2] + _batches(2, places=5),
    "a micro-batch must be .*; got a dict without": lambda b: [*b[:3], dict(b[3])],
    r"batches has len\(\) 4 but yielded only 3": lambda b: _Short(b[:3]),
}


BROKEN = [
    (2, "1f1b", "before the call", 3, 0, fk.accumulate),
    (2, "zbv", "in backward", 2, 0, fk.accumulate),
    (2, "zbv", "in a block", 6, 1, fk.evaluate),
    *((2, "1f1b", message, 0, 0, fk.accumulate) for message in TORN),
    (4, "1f1b", "in the data", 3, 1, fk.accumulate),
]


def _tripped(rank, world, schedule, where, at, wrong, act, path):
    """The rank that raises ends; what the others wait for does not come."""
    state, batches = _state(schedule, dp_shard=world // 2), _batches(4)
    fk.accumulate(state, batches, logits_loss)  # no rehearsal
    trips = _Trips(batches, state, where if rank == wrong else "", at)
    given = TORN[where](batches) if where in TORN and rank == wrong else trips
    refused = (ValueError, TypeError) if where in TORN else (_Trip, KeyboardInterrupt)
    with pytest.raises(refused if rank == wrong else RuntimeError) as raised:
        act(state, given, trips.loss)
    shown = "".join(traceback.format_exception(raised.value))
    for again in (fk.accumulate, fk.evaluate):  # at once: nothing is waited for
        with pytest.raises(RuntimeError, match="an exception broke off an earlier schedule"):
            again(state, batches, logits_loss)
    assert act is fk.evaluate or all(p.grad is None for p in state.model.parameters())
    if rank == wrong:
        assert "direct cause" not in shown
        path.write_text(shown)
        os._exit(1)


@pytest.mark.parametrize(
    ("world", "schedule", "where", "at", "wrong", "act"), first_of(BROKEN[:-3], BROKEN)
)
def test_an_exception_in_a_stage_ends_its_rank_and_a_process_that_goes_on_is_refused(
    tmp_path, world, schedule, where, at, wrong, act
):
    """In the middle of a schedule; the others see a lost connection, and are refused as well."""
    path = tmp_path / "trace"
    with pytest.raises(RankError, match=rf"rank {wrong} died"):
        run_ranks(_tripped, world, schedule, where, at, wrong, act, path, timeout_s=20)
    assert re.search(where if where in TORN else "raise (_Trip|Keyb)", path.read_text())


class _Turn(nn.Linear):
    """Neither its output nor the gradient of its input is contiguous."""

    def forward(self, x):
        return super().forward(x.mT.cumsum(-1).mT).tanh().mT.contiguous().mT


class _Foreign(nn.Module):
    """Blocks elsewhere, the first of them frozen; it returns a view in a mapping."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        body = nn.ModuleList(_Turn(6, 6) for _ in range(4))
        self.net = nn.ModuleDict({"stem": nn.Embedding(SPEC.vocab_size, 6), "body": body})
        self.top = nn.Linear(6, SPEC.vocab_size)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.net.stem.requires_grad_(False)
        body[0].requires_grad_(False)

    def forward(self, input_ids):
        x = self.net.stem(input_ids)
        for layer in self.net.body:
            x = layer(x)
        x = F.dropout(x, 0.3 if input_ids.shape[1] < 6 else 0.0)
        return {"logits": self.top(x)[:, slice(0, None)], "hidden": x}


def _foreign_loss(model, batch):
    return fk.cross_entropy(model(input_ids=batch["input_ids"])["logits"], batch["labels"])


def _autocast_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _foreign_loss(model, batch)


@pytest.mark.parametrize(
    ("schedule", "loss_fn", "dtype"),
    [("zbv", _foreign_loss, torch.float64), ("1f1b", _autocast_loss, torch.float32)],
)
@on_ranks(2, keep=True)
def test_a_foreign_model_with_frozen_blocks_autocast_and_dropout(
    rank, world, schedule, loss_fn, dtype
):
    model, batches = _Foreign().to(dtype), _batches(4)
    plain_backward(model, batches, loss_fn)
    expected = {n: p.grad.double() for n, p in model.named_parameters() if p.requires_grad}
    model = _Foreign().to(dtype)
    state = lay_out(model, {"pp": world}, pipeline_schedule=schedule, blocks="net.body")
    found = mean_gradients(state, batches, loss_fn)
    assert found.keys() == {n for n, p in state.model.named_parameters() if p.requires_grad}
    # Under autocast far below what bfloat16 rounds away.
    bound = 1e-10 if dtype == torch.float64 else 1e-6
    assert relative_error(found, {n: expected[n] for n in found}) < bound
    short = _batches(4, places=5)  # the rehearsal draws numbers of its own
    draws = [mean_gradients(state, short, loss_fn) for _ in range(2)]
    assert relative_error(*draws) == 0.0
