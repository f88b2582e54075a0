"""Several calls of ``accumulate`` for models and losses that are not ours, held to one call."""

from __future__ import annotations

import math

import attrs
import pytest
import torch
from lab import SPEC, alone, full, global_batch, lay_out
from pool import run_again
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk
from forgekit.mesh import data_ranks

EVEN = attrs.evolve(SPEC, vocab_size=40, dim=48, heads=4)


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


def build_state(kind: str, world: int, layout: dict[str, int]) -> fk.TrainState:
    model = Odd() if kind == "odd" else fk.Transformer(attrs.evolve(EVEN, dropout=0.2))
    if kind == "dora":
        fk.add_lora(model, rank=4, dora=True, targets="*.query")
    options = {"blocks": "layers"} if kind == "odd" else {}
    return alone(model) if world == 1 else lay_out(model, layout, **options)


def rows(state: fk.TrainState, kind: str) -> list[TensorDict]:
    reader, readers = data_ranks(state.mesh)
    batches = [global_batch(readers, seed=seed)[1][reader] for seed in range(3)]
    if kind == "odd":
        batches[1] = TensorDict({key: value[:, :8] for key, value in batches[1].items()}, [2])
    if kind == "no targets":
        for batch in batches[:2]:
            batch["labels"].fill_(-100)
    return batches


class LossOf:
    """With NaN in the first micro-batch."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, 0

    def __call__(self, model: nn.Module, batch: TensorDict) -> fk.Loss:
        loss = fk.cross_entropy(model(batch["input_ids"]), batch["labels"])
        if self.kind == "nan" and not self.calls:
            loss = fk.Loss(loss.sum * math.nan, loss.count)
        self.calls += 1
        return loss


def finish(state: fk.TrainState, totals: fk.Totals) -> tuple[fk.TrainState, dict[str, Tensor]]:
    totals = fk.reduce_totals(totals, state)
    parameters = dict(state.model.named_parameters())
    results = {n: full(p.grad) for n, p in parameters.items() if p.grad is not None}
    results |= {str(key): value for key, value in totals.flat.items()}
    state = fk.update(state, fk.clip(totals, max_norm=1.0), lr=0.01, totals=totals)
    results |= {f"updated {name}": full(p.detach()).clone() for name, p in parameters.items()}
    return state, results | {"skipped": state.skipped, "scale": state.loss_scale}


def compare(rank: int, world: int, kind: str, layout: dict[str, int]) -> None:
    whole, parts = build_state(kind, world, layout), build_state(kind, world, layout)
    for step in range(2):  # the second one after what the first has left, a bad step too
        kind_now = kind if step == 0 or kind != "nan" else ""
        totals = fk.accumulate(whole, rows(whole, kind), LossOf(kind_now))
        whole, expected = finish(whole, totals)
        loss_fn, batches = LossOf(kind_now), rows(parts, kind)
        totals = fk.accumulate(parts, batches[:1], loss_fn, more=True)
        if kind != "odd":
            fk.generate(parts.model, torch.zeros(1, 2, dtype=torch.long), max_new_tokens=2)
        parts, results = finish(parts, fk.accumulate(parts, batches[1:], loss_fn, onto=totals))
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal(results[name].nan_to_num(7e7), value.nan_to_num(7e7))
            assert same, f"{name} in step {step}"


KINDS = ("odd", "nan", "no targets", "dora")
CELLS = [("odd", {}), ("nan", {}), *((kind, {"dp_shard": 2}) for kind in KINDS)]


@pytest.mark.parametrize(("kind", "layout"), CELLS, ids=str)
def test_two_calls_are_one_for_any_model(kind, layout):
    if layout:
        run_again(compare, 2, kind, layout)
    else:
        compare(0, 1, kind, layout)
