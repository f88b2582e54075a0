"""Small layouts whose plans are held against runs on real ranks."""

from __future__ import annotations

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from tensordict import TensorDict

import forgekit as fk
from forgekit.run.plan.collectives import dimension_of
from forgekit.run.plan.steps import measure_step
from forgekit.run.plan.watch import StepWatch

SPEC = fk.TransformerSpec(
    vocab_size=64, dim=48, layers=4, heads=4, kv_heads=2, ffn_dim=64, max_seq_len=16
)
MOE = fk.MoESpec(experts=8, top_k=2, ffn_dim=16, shared=1, first=1, force_balance=True)


@attrs.frozen(kw_only=True)
class Cell:
    """A layout and what runs in it."""

    name: str
    world: int
    sizes: dict[str, int]
    options: dict[str, Any] = attrs.field(factory=dict)
    moe: bool = False
    lora: bool = False
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    micro_batches: int = 2

    def __str__(self) -> str:
        return self.name


def loss_fn(model, batch):
    return model(batch["input_ids"], head=partial(fk.linear_cross_entropy, labels=batch["labels"]))


def setup(cell):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": -1} | cell.sizes), device="cpu")
    with torch.device("meta"):
        spec = attrs.evolve(
            SPEC, moe=MOE if cell.moe else None, heads=cell.heads, kv_heads=cell.kv_heads
        )
        model = fk.Transformer(spec)
    if cell.lora:
        model = fk.add_lora(model, rank=4, alpha=8.0)
    model = fk.parallelize(model, mesh, **cell.options)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(loss_fn, schedule=fk.constant(1e-3))
    # One row: what a send still holds is not planned, and stays small beside a stage's parameters.
    ids = torch.arange(SPEC.max_seq_len).view(1, -1)
    batch = TensorDict(input_ids=ids, labels=ids.clone(), batch_size=[1])
    loader = [batch] * (2 * cell.micro_batches)
    return SimpleNamespace(state=state, step=step, loss_fn=loss_fn, loader=loader)


def measure(cell) -> dict[str, Any]:
    """Memory by category, collectives and FLOPs of a step, where this process is a rank."""
    with StepWatch() as watch:
        found = measure_step(setup(cell), watch, cell.micro_batches)
        dimensions = {call: dimension_of(call, found.state.mesh) for call in found.calls}
    return {
        "memory": found.memory,
        "collectives": collectives_of(found.calls, dimensions),
        "flops": dict(found.work.flops),
        "targets": found.targets,
    }


def collectives_of(calls, dimensions):
    """Count and bytes by kind and mesh dimension."""
    counts, sizes = Counter(), Counter()
    for call, count in calls.items():
        key = call.op, dimensions[call]
        counts[key] += count
        sizes[key] += count * call.size
    return {key: (counts[key], sizes[key]) for key in counts}


def run_cell(_rank, _world, cell):
    """What a rank of a real run measures; called on each."""
    return measure(cell)
