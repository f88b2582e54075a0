"""A step in several parts is one call of ``accumulate`` to the bit, for any model and layout."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import attrs
import pytest
import torch
from covering import in_turn
from lab import SPEC, alone, full_tensors, global_batch, lay_out, mean_gradients
from pool import on_ranks, run_again
from saved import everything
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk

EXPERTS = fk.MoESpec(experts=4, top_k=2, ffn_dim=24, aux_loss=0.1, z_loss=0.01, bias_rate=0.01)
EVEN = attrs.evolve(SPEC, vocab_size=40, dim=48, heads=4, dropout=0.3)


class Odd(nn.Module):
    """Uses a block twice, another only for long rows and a matrix never; one matrix is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.unused = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor(0.5))
        self.layers[1].weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embed(ids)).tanh()
        x = x + self.layers[3](x) if ids.shape[1] > 8 else x
        x = self.layers[0](x) + self.layers[1](x).tanh() * self.scale
        return self.head(self.layers[2](x))


def build_state(kind: str, layout: dict[str, int], options: dict[str, object]) -> fk.TrainState:
    moe = EXPERTS if kind == "experts" else None
    layers = 4 if "pp" in layout else 2
    model = Odd() if kind == "odd" else fk.Transformer(attrs.evolve(EVEN, moe=moe, layers=layers))
    if kind == "dora":
        fk.add_lora(model, rank=4, dora=True, targets="*.query")
    return lay_out(model, layout, **options) if layout else alone(model)


def rows(state: fk.TrainState, kind: str = "") -> list[TensorDict]:
    """Four micro-batches of 16 positions, which ranks can share; ragged numbers of targets."""
    reader, readers = fk.data_ranks(state.mesh)
    batches = [global_batch(readers, seed=seed)[1][reader] for seed in range(4)]
    if kind == "odd":
        batches[1] = TensorDict({key: value[:, :8] for key, value in batches[1].items()}, [2])
    if kind == "no targets":
        for batch in batches[:2]:
            batch["labels"].fill_(-100)
    return batches


def loss_of(model: nn.Module, batch: TensorDict) -> fk.Loss:
    loss = fk.cross_entropy(model(batch["input_ids"]), batch["labels"])
    return loss.with_metrics(rows=(len(batch), 1))


def first_is_nan() -> Callable[..., fk.Loss]:
    calls = itertools.count()

    def loss_fn(model: nn.Module, batch: TensorDict) -> fk.Loss:
        loss = loss_of(model, batch)
        return dataclasses.replace(loss, sum=loss.sum * (1.0 if next(calls) else math.nan))

    return loss_fn


def finish(state: fk.TrainState, totals: fk.Totals) -> tuple[fk.TrainState, dict[str, Tensor]]:
    totals = fk.reduce_totals(totals, state)
    results = full_tensors(state.model, gradients=True)
    results |= {str(key): value for key, value in totals.sums.items(True, True)}
    state = fk.update(state, fk.clip(totals, max_norm=1.0), lr=0.01, totals=totals)
    return state, results | everything(state)


def compare(rank, world, kind, layout, cut, options, sync, knows_last):
    whole, parts = (build_state(kind, layout, options) for _ in range(2))
    for number in range(3):  # the second one after what the first has left, a bad step too
        nan = kind == "nan" and number == 0
        if number == 1:  # which nobody ends
            fk.begin_step(parts, sync=sync).add(rows(parts, kind)[:2], loss_of)
        loss_fn = first_is_nan() if nan else loss_of
        totals = fk.accumulate(whole, rows(whole, kind), loss_fn, sync=sync)
        whole, expected = finish(whole, totals)
        batches, loss_fn = iter(rows(parts, kind)), first_is_nan() if nan else loss_of
        step = fk.begin_step(parts, sync=sync)  # without a block, as a server's requests come
        for call, size in enumerate(cut, start=1):
            part = [next(batches) for _ in range(size)]
            step.add(part, loss_fn, last=knows_last and call == len(cut))
            if parts.layout.stages is None:  # as rollouts do between two calls
                torch.rand(5)
                with torch.no_grad():
                    parts.model(torch.zeros(1, 16, dtype=torch.long))
        assert step.micro_batches == sum(cut)
        parts, results = finish(parts, step.end())
        assert results.keys() == expected.keys()
        # A block that runs twice reduces twice in a last backward, and once at an end.
        twice = kind == "odd" and layout and not knows_last
        for name, value in expected.items():
            found, wanted = (each.nan_to_num(7e7).double() for each in (results[name], value))
            same = torch.allclose(found, wanted, 1e-4, 1e-6) if twice else found.equal(wanted)
            assert same, f"{name} in step {number}"


HSDP = {"dp_replicate": 2, "dp_shard": 1}
CELLS = [
    ("experts", {}, (1, 2, 1), {}, "last"),
    ("odd", {}, (1, 3), {}, "last"),
    ("odd", {"dp_shard": 2}, (1, 1, 2), {"blocks": "layers"}, "last"),
    ("nan", {"dp_shard": 2}, (1, 3), {"precision": "bf16"}, "last"),
    ("odd", {"dp_shard": 2}, (2, 2), {"precision": "bf16", "blocks": "layers"}, "last"),
    ("no targets", {"dp_shard": 2}, (1, 3), {}, "every"),
    ("dora", HSDP, (3, 1), {}, "hsdp_last"),
    ("odd", HSDP, (1, 3), {"precision": "bf16", "blocks": "layers"}, "hsdp_last"),
    ("dense", {"tp": 2}, (2, 2), {}, "last"),
    ("dense", {"cp": 2}, (2, 2), {}, "last"),
    ("experts", {"dp_shard": 2, "ep": 2}, (2, 2), {}, "last"),
    ("dense", {"pp": 2}, (2, 2), {"pipeline_schedule": "zbv"}, "last"),
]


@pytest.mark.parametrize(("cell", "knows_last"), in_turn(CELLS, [False, True, False]), ids=str)
def test_several_parts_are_one_call_to_the_bit(cell, knows_last):
    kind, layout, cut, options, sync = cell
    world = math.prod(size for name, size in layout.items() if name != "ep")
    run_again(compare, world, kind, layout, cut, options, sync, knows_last)


def calls_and_fails(model, batch):
    loss_of(model, batch)
    raise KeyError("gone")


@pytest.mark.parametrize("sync", ["last", "hsdp_last"])
@on_ranks(2, keep=True)
def test_an_evaluation_that_raises_between_two_parts_loses_nothing(rank, world, sync):
    """An evaluation between two parts raises, and the caller goes on with the step."""
    whole, parts = (build_state("dense", HSDP, {}) for _ in range(2))
    for _ in range(2):
        whole, expected = finish(whole, fk.accumulate(whole, rows(whole), loss_of, sync=sync))
        with fk.begin_step(parts, sync=sync) as step:
            step.add(rows(parts)[:2], loss_of)
            with pytest.raises(KeyError, match="gone"):
                fk.evaluate(parts, rows(parts)[:1], calls_and_fails)
            step.add(rows(parts)[2:], loss_of)
        parts, results = finish(parts, step.totals)
        assert all(torch.equal(results[name], value) for name, value in expected.items())


@pytest.mark.parametrize("how", ["hook", "audit"])
@on_ranks(2, keep=True)
def test_a_step_does_not_outlive_its_gradients(rank, world, how):
    """What clears a step's gradients and then raises has ended the step all the same."""
    state = lay_out(fk.Transformer(EVEN))
    step = fk.begin_step(state)
    step.add(rows(state)[:1], loss_of)
    if how == "hook":
        hook = next(state.model.parameters()).register_hook(lambda gradient: gradient)
        with pytest.raises(ValueError, match="has a gradient hook"):
            fk.begin_step(state)
        hook.remove()
    else:
        with pytest.raises(ValueError, match="ranks differ in seed"):
            fk.audit(attrs.evolve(state, seed=rank), rows(state)[0], loss_of)
    with pytest.raises(ValueError, match="this step is replaced by a newer step"):
        step.end()


def has_gradients(state):
    return any(p.grad is not None for p in state.model.parameters())


def refusals(rank, world):
    state, fresh = ((lay_out if world > 1 else alone)(fk.Transformer(EVEN)) for _ in range(2))
    first, rest = rows(state)[:1], rows(state)[1:]

    def fail(model, batch):
        raise KeyError("reward")

    def refused(step, phase):
        had = has_gradients(state)
        step.abandon()  # a server's `except` need not know what became of its step
        assert has_gradients(state) == had
        for use in (lambda: step.add(rows(state), loss_of), step.end, step.__enter__):
            with pytest.raises(ValueError, match=f"this step is {phase}; .*forgekit.begin_step"):
                use()

    def no_totals(step, phase):
        with pytest.raises(ValueError, match=f"{phase}; totals"):
            _ = step.totals

    def interrupted():
        yield first, loss_of
        raise KeyError("queue")

    def add(step, parts):
        no_totals(step, "in progress")
        for part in parts:
            step.add(*part)

    for parts, error, match in (
        ([([], loss_of)], ValueError, "got no micro-batch"),
        ([(first, loss_of), (rest, fail)], KeyError, "reward"),
        (interrupted(), KeyError, "queue"),
    ):
        with pytest.raises(error, match=match), fk.begin_step(state) as step:
            add(step, parts)
        refused(step, "abandoned")
        no_totals(step, "this step is abandoned")
        assert not has_gradients(state)
    step = fk.begin_step(state)
    step.add(first, loss_of)
    step.abandon()
    assert not has_gradients(state)
    with fk.begin_step(state) as step:
        step.add(first, loss_of, last=True)
        with pytest.raises(ValueError, match=r"the previous add\(\) had last=True"):
            step.add(rest, loss_of)
    refused(step, "over")

    def ended(step):
        step.add(first, loss_of)
        step.end()
        raise KeyError("late")

    with pytest.raises(KeyError, match="late"), fk.begin_step(state) as step:
        ended(step)
    assert step.totals["targets"] > 0  # what has ended stays, as after `abandon`
    refused(step, "over")
    cleared = fk.begin_step(state)
    cleared.add(first, loss_of)
    totals = fk.accumulate(state, rows(state), loss_of)  # as a look at gradients in between
    no_totals(cleared, "replaced by a newer step")
    refused(cleared, "replaced by a newer step")
    assert has_gradients(state)
    assert totals["targets"] > 0
    # After all of that a step is what it always is.
    wanted, here = (mean_gradients(each, rows(each), loss_of) for each in (fresh, state))
    assert all(torch.equal(here[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_is_used_once_and_within_its_block(world):
    run_again(refusals, world)


def seeds(rank, world, layout):
    """What each of two micro-batches begins to draw from, on this rank."""
    state, seen = lay_out(fk.Transformer(EVEN), layout), []

    def loss_fn(model, batch):
        seen.append(torch.initial_seed())
        return loss_of(model, batch)

    fk.accumulate(state, rows(state)[:2], loss_fn)
    return seen[-2:]  # before them a pipeline rehearses


@pytest.mark.parametrize(("name", "count"), [("dp_shard", 4), ("cp", 4), ("pp", 4), ("tp", 2)])
def test_dropout_draws_other_numbers_for_other_rows_positions_and_layers(name, count):
    assert len({seed for by_rank in run_again(seeds, 2, {name: 2}) for seed in by_rank}) == count
