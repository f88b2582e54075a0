"""All that a step needs is in its state: runs side by side give the bits of each alone."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from covering import first_of
from distributed.models import logits_loss
from lab import SPEC, lay_out, token_rows
from pool import run_again
from saved import assert_same, everything
from tensordict import TensorDict
from torch import Tensor

import forgekit as fk

WIDE = attrs.evolve(SPEC, vocab_size=40, dim=48, dropout=0.1)
STEPS = 2

RUNS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp": ({}, {}),
    "fp16": ({}, {"precision": "fp16"}),
    "recomputed": ({}, {"activation_checkpoint": "full"}),
    "tp": ({"tp": 2, "dp_shard": 1}, {}),
    "ring": ({"cp": 2, "dp_shard": 1}, {}),
    "zbv": ({"pp": 2, "dp_shard": 1}, {"pipeline_schedule": "zbv"}),
    "ep": ({"ep": 2}, {}),
}
"""Sizes of the mesh on two ranks, and options; every run has a model of its own."""

SIDE_BY_SIDE = [
    (2, ("ring", "ep")),
    (2, ("zbv", "tp")),
    (1, ("fp16", "recomputed", "fsdp")),
]
"""Each dimension of a mesh; FSDP, fp16 and recomputation run side by side in one process."""


def _model(name: str, number: int) -> fk.Transformer:
    spec = WIDE if number else attrs.evolve(SPEC, vocab_size=40)
    layers = 4 if name == "zbv" else 2  # two stages on a rank
    moe = fk.MoESpec(experts=4, top_k=2, ffn_dim=24, bias_rate=0.01) if name == "ep" else None
    return fk.Transformer(attrs.evolve(spec, layers=layers, moe=moe), seed=number)


def _state(name: str, number: int, world: int) -> fk.TrainState:
    sizes, options = RUNS[name]
    return attrs.evolve(
        lay_out(_model(name, number), sizes if world > 1 else {}, **options), seed=number
    )


def _batches(step: int, rank: int) -> list[TensorDict]:
    batches = [token_rows(2, 16, 40, seed=8 * step + 2 * rank + n) for n in range(2)]
    for batch in batches:
        batch["doc_ids"] = (batch["labels"] % 3).clamp(min=0).sort(1).values
    return batches


def _train(rank: int, world: int, runs: list[tuple[str, int]]) -> list[dict[str, Tensor]]:
    """Take the steps of all runs in turn, with the same batches; what each has left at its end."""
    states = [_state(name, number, world) for name, number in runs]
    step = fk.make_step(logits_loss, schedule=fk.constant(0.01), max_norm=0.5)
    seen: list[Any] = [None] * len(runs)
    for at in range(STEPS):
        batches = {r: _batches(at, r) for r in range(world)}  # the same tensors for every run
        for index, state in enumerate(states):
            mine = batches[fk.data_ranks(state.mesh)[0]]
            states[index], metrics = step(state, mine)
            metrics["evaluated"] = fk.evaluate(states[index], mine, logits_loss)["loss"]
            metrics = {f"metric {name}": value.clone() for name, value in metrics.items()}
            seen[index] = metrics | everything(states[index])
    return seen


@pytest.mark.parametrize(("world", "names"), first_of(SIDE_BY_SIDE[1:], SIDE_BY_SIDE))
def test_runs_side_by_side_give_the_bits_of_each_alone(world, names):
    runs = [(name, number % 2) for number, name in enumerate(names)]
    together = run_again(_train, world, runs)
    for index, run in enumerate(runs):
        for found, (alone,) in zip(together, run_again(_train, world, [run]), strict=True):
            assert all(value.isfinite().all() for value in found[index].values())
            assert_same(found[index], alone)
