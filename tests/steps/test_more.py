"""A step in several calls of ``accumulate`` is one call to the bit, for any model and layout."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from lab import SPEC, alone, full, global_batch, lay_out, mean_gradients, relative_error
from pool import run_again
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk

EXPERTS = fk.MoESpec(experts=4, top_k=2, ffn_dim=24, aux_loss=0.1, z_loss=0.01, bias_rate=0.01)
EVEN = attrs.evolve(SPEC, vocab_size=40, dim=48, heads=4, dropout=0.3)


class Odd(nn.Module):
    """Uses a block twice and another only for long rows, has a buffer and a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.head = nn.Linear(16, 40)
        self.register_buffer("scale", torch.tensor(0.5))
        self.layers[1].weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layers[0](self.embed(ids)).tanh()
        if ids.shape[1] > 8:
            x = x + self.layers[3](x)
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


class FirstIsNan:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: TensorDict) -> fk.Loss:
        self.calls += 1
        loss = loss_of(model, batch)
        return fk.Loss(loss.sum * (math.nan if self.calls == 1 else 1.0), loss.count, loss.metrics)


def finish(state: fk.TrainState, totals: fk.Totals) -> tuple[fk.TrainState, dict[str, Tensor]]:
    totals = fk.reduce_totals(totals, state)
    parameters = dict(state.model.named_parameters())
    results = {n: full(p.grad) for n, p in parameters.items() if p.grad is not None}
    results |= {str(key): value for key, value in totals.flat.items()}
    results["samples"] = torch.tensor(totals.samples)
    state = fk.update(state, fk.clip(totals, max_norm=1.0), lr=0.01, totals=totals)
    results |= {f"updated {name}": full(p.detach()).clone() for name, p in parameters.items()}
    return state, results | {"skipped": state.skipped, "scale": state.loss_scale}


def compare(rank, world, kind, layout, cut, options, sync):
    whole, parts = (build_state(kind, layout, options) for _ in range(2))
    for step in range(2):  # the second one after what the first has left, a bad step too
        nan = kind == "nan" and step == 0
        totals = fk.accumulate(
            whole, rows(whole, kind), FirstIsNan() if nan else loss_of, sync=sync
        )
        whole, expected = finish(whole, totals)
        batches, loss_fn, totals = iter(rows(parts, kind)), FirstIsNan() if nan else loss_of, None
        for call, size in enumerate(cut):
            part, more = [next(batches) for _ in range(size)], call < len(cut) - 1
            totals = fk.accumulate(parts, part, loss_fn, sync=sync, more=more, onto=totals)
            if more and parts.layout.stages is None:  # as rollouts do between two calls
                torch.rand(5)
                with torch.no_grad():
                    parts.model(torch.zeros(1, 16, dtype=torch.long))
        parts, results = finish(parts, totals)
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal(results[name].nan_to_num(7e7), value.nan_to_num(7e7))
            assert same, f"{name} in step {step}"


HSDP = {"dp_replicate": 2, "dp_shard": 1}
CELLS = [
    ("experts", {}, (1, 2, 1), {}, "last"),
    ("odd", {}, (1, 3), {}, "last"),
    ("odd", {"dp_shard": 2}, (1, 1, 2), {"blocks": "layers"}, "last"),
    ("nan", {"dp_shard": 2}, (1, 3), {"precision": "bf16"}, "last"),
    ("no targets", {"dp_shard": 2}, (1, 3), {}, "every"),
    ("dora", HSDP, (3, 1), {}, "hsdp_last"),
    ("dense", {"tp": 2}, (2, 2), {}, "last"),
    ("dense", {"cp": 2}, (2, 2), {}, "last"),
    ("experts", {"dp_shard": 2, "ep": 2}, (2, 2), {}, "last"),
    ("dense", {"pp": 2}, (2, 2), {"pipeline_schedule": "zbv"}, "last"),
]


@pytest.mark.parametrize(("kind", "layout", "cut", "options", "sync"), CELLS)
def test_several_calls_are_one_to_the_bit(kind, layout, cut, options, sync):
    world = math.prod(size for name, size in layout.items() if name != "ep")
    run_again(compare, world, kind, layout, cut, options, sync)


def reduced_apart(rank, world, sync):
    """Without ``more`` each call reduces."""
    state = lay_out(fk.Transformer(EVEN).double())
    expected, batches = mean_gradients(state, rows(state), loss_of), rows(state)
    first = fk.accumulate(state, batches[:1], loss_of, sync=sync)
    found = mean_gradients(state, batches[1:], loss_of, sync=sync, onto=first)
    assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize("sync", ["last", "every"])
def test_calls_that_reduce_each_for_itself_add_up(sync):
    run_again(reduced_apart, 2, sync)


def refusals(rank, world):
    state = lay_out(fk.Transformer(EVEN)) if world > 1 else alone(fk.Transformer(EVEN))

    def held():
        return fk.accumulate(state, rows(state)[:1], loss_of, more=True)

    def refused(totals):
        with pytest.raises(ValueError, match="onto: the gradients that belong to these totals are"):
            fk.accumulate(state, rows(state)[1:], loss_of, onto=totals)
        assert not any(p.grad is not None for p in state.model.parameters())

    def fail(model, batch):
        raise KeyError("reward")

    with pytest.raises((ValueError, RuntimeError), match="more=True"):
        fk.reduce_totals(held(), state)
    totals = held()
    with pytest.raises(KeyError, match="reward"):
        fk.accumulate(state, rows(state)[1:], fail, onto=totals)
    refused(totals)
    totals = held()
    fk.accumulate(state, rows(state)[:1], loss_of)  # clears
    refused(totals)
    totals = held()
    for parameter in state.model.parameters():  # which frees them: none is left to compare
        parameter.grad = None
    if world == 1:  # FSDP holds gradients back elsewhere
        refused(totals)
    refused(fk.reduce_totals(fk.accumulate(state, rows(state), loss_of), state))
    # After all of that a step is what it always is.
    fresh = lay_out(fk.Transformer(EVEN)) if world > 1 else alone(fk.Transformer(EVEN))
    wanted, here = (mean_gradients(each, rows(each), loss_of) for each in (fresh, state))
    assert all(torch.equal(here[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("world", [1, 2])
def test_totals_that_cannot_go_on_are_refused(world):
    run_again(refusals, world)


def seeds(rank, world, layout):
    """What each of two micro-batches begins to draw from, on this rank."""
    state, seen = lay_out(fk.Transformer(EVEN), layout), []

    def loss_fn(model, batch):
        seen.append(torch.initial_seed())
        return loss_of(model, batch)

    fk.accumulate(state, rows(state)[:2], loss_fn, audit=False)
    return seen[-2:]  # before them a pipeline rehearses


@pytest.mark.parametrize(("name", "count"), [("dp_shard", 4), ("cp", 4), ("pp", 4), ("tp", 2)])
def test_dropout_draws_other_numbers_for_other_rows_positions_and_layers(name, count):
    assert len({seed for by_rank in run_again(seeds, 2, {name: 2}) for seed in by_rank}) == count
