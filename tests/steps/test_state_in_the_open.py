"""All that a step needs is in its state: runs side by side give the bits of each alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
import torch
from covering import first_of
from distributed.experts import Routed
from distributed.models import logits_loss
from lab import SPEC, lay_out
from pool import run_again
from tensordict import TensorDict
from torch import Tensor

import forgekit as fk
from forgekit.tensors import local

WIDE = attrs.evolve(SPEC, vocab_size=40, dim=48, dropout=0.1)
STEPS = 2

RUNS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp": ({}, {}),
    "fp16": ({}, {"precision": "fp16"}),
    "recomputed": ({}, {"activation_checkpoint": "full"}),
    "tp": ({"tp": 2, "dp_shard": 1}, {}),
    "ring": ({"cp": 2, "dp_shard": 1}, {}),
    "zbv": ({"pp": 2, "dp_shard": 1}, {"pipeline_schedule": "zbv"}),
    "ep": ({"ep": 2}, {"plan": {"layers.*.feed_forward.experts": "expert"}}),
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
    model = fk.Transformer(attrs.evolve(spec, layers=layers), seed=number)
    if name == "ep":
        for layer in model.layers:
            layer.feed_forward = Routed(spec.dim, spec.ffn_dim)
        fk.init_weights(model, seed=number)
    return model


def _state(name: str, number: int, world: int) -> fk.TrainState:
    sizes, options = RUNS[name]
    if world == 1:
        sizes, options = {}, {**options, "plan": None}
    return attrs.evolve(lay_out(_model(name, number), sizes, **options), seed=number)


def _batches(step: int, rank: int) -> list[TensorDict]:
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(step * 8 + rank))
    batches = []
    for _ in range(2):
        ids, documents = draw(0, 40, (2, 16)), draw(0, 3, (2, 16)).sort(1).values
        labels = ids.roll(-1, 1).masked_fill(draw(0, 4, (2, 16)) == 0, -100)
        items = {"input_ids": ids, "labels": labels, "doc_ids": documents}
        batches.append(TensorDict(items, [2]))
    return batches


def _seen(state: fk.TrainState, metrics: Any) -> dict[str, Tensor]:
    """Everything that a step leaves on this rank."""
    values = {f"metric {name}": value.clone() for name, value in metrics.items()}
    for name, parameter in state.model.named_parameters():
        values[name] = local(parameter).detach().clone()
        for key, moment in state.optimizer.state[parameter].items():
            values[f"{name} {key}"] = local(moment).clone()
    scalars = (state.targets, state.skipped, state.loss_scale, state.good_steps)
    return values | {f"scalar {i}": value.clone() for i, value in enumerate(scalars)}


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
            seen[index] = _seen(states[index], metrics)
    return seen


@pytest.mark.parametrize(("world", "names"), first_of(SIDE_BY_SIDE[1:], SIDE_BY_SIDE))
def test_runs_side_by_side_give_the_bits_of_each_alone(world, names):
    runs = [(name, number % 2) for number, name in enumerate(names)]
    together = run_again(_train, world, runs)
    for index, run in enumerate(runs):
        for found, (alone,) in zip(together, run_again(_train, world, [run]), strict=True):
            assert all(value.isfinite().all() for value in found[index].values())
            assert found[index].keys() == alone.keys()
            different = [n for n in alone if not torch.equal(found[index][n], alone[n])]
            assert not different
