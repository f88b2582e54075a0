"""Small layouts whose plans are held against runs on real ranks."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from lab import lay_out, logits_loss
from tensordict import TensorDict

import forgekit as fk
from forgekit.plan.plan import PlannedRank, measure_step
from forgekit.plan.watch import StepWatch

MOE = fk.MoESpec(experts=8, top_k=2, ffn_dim=24, shared=1, first=1)


@attrs.frozen(kw_only=True)
class Shape:
    """A model and its micro-batches."""

    dim: int
    layers: int
    vocab_size: int
    ffn_dim: int
    positions: int
    rows: int
    micro_batches: int
    heads: int = 4
    kv_heads: int = 2


WIDE = Shape(dim=64, layers=4, vocab_size=512, ffn_dim=160, positions=64, rows=4, micro_batches=4)
LONG = Shape(dim=32, layers=5, vocab_size=200, ffn_dim=96, positions=192, rows=1, micro_batches=8)


@attrs.frozen(kw_only=True)
class Cell:
    """A layout and what runs in it.

    Attributes:
        documents: Of each row, apart from each other; None for rows without ``doc_ids``.
        has_logits: Whether the loss takes logits, instead of a head that never holds them.
    """

    name: str
    world: int
    sizes: dict[str, int]
    shape: Shape = WIDE
    options: dict[str, Any] = attrs.field(factory=dict)
    spec: dict[str, Any] = attrs.field(factory=dict)
    moe: bool = False
    lora: dict[str, Any] | None = None
    documents: int | None = None
    has_logits: bool = False

    def __str__(self) -> str:
        return self.name


def loss_fn(model, batch):
    documents = {"doc_ids": batch.get("doc_ids"), "position_ids": batch.get("position_ids")}
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], **documents, head=head)


def setup(cell):
    shape = attrs.asdict(cell.shape)
    positions, rows, count = (shape.pop(n) for n in ("positions", "rows", "micro_batches"))
    moe = MOE if cell.moe else None
    spec = fk.TransformerSpec(**shape, max_seq_len=positions, moe=moe, **cell.spec)
    with torch.device("meta"):
        model = fk.Transformer(spec)
    if cell.lora is not None:
        model = fk.add_lora(model, rank=4, alpha=8.0, **cell.lora)
    state = lay_out(model, {"dp_shard": -1} | cell.sizes, **cell.options)
    ids = torch.arange(rows * positions).view(rows, positions) % spec.vocab_size
    batch = TensorDict(input_ids=ids, labels=ids.clone(), batch_size=[rows])
    if cell.documents is not None:
        each = torch.arange(positions) * cell.documents // positions
        batch["doc_ids"] = each.repeat(rows, 1)
        batch["position_ids"] = (torch.arange(positions) % (positions // 2)).repeat(rows, 1)
    return step_of(state, logits_loss if cell.has_logits else loss_fn, [batch] * (2 * count))


def step_of(state, loss_fn, loader):
    """What a recipe's ``setup`` returns."""
    step = fk.make_step(loss_fn, schedule=fk.constant(1e-3))
    return SimpleNamespace(state=state, step=step, loss_fn=loss_fn, loader=loader)


class PatientWatch(StepWatch):
    """Does not take for gradients what threads of gloo still hold where a backward pass ends."""

    def _follow(self) -> None:
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            time.sleep(0.05)
        super()._follow()


def measure(cell) -> PlannedRank:
    """What a step does, where this process is a rank."""
    with PatientWatch() as watch:
        return attrs.evolve(
            measure_step(setup(cell), watch, cell.shape.micro_batches), agreed_names=None
        )


def differences(cell, planned, real):
    """What a plan says otherwise than a real rank does, in words."""
    said = ["collectives differ"] * (planned.traffic != real.traffic)
    # Packed documents under cp: a plan takes each rank to hold what the first one holds.
    has_same_flops = cell.documents is not None or planned.work.flops == real.work.flops
    said += ["FLOPs differ"] * (not has_same_flops)
    said += ["targets differ"] * (planned.targets != real.targets)
    numbers = [{**one.memory, **one.work.kernels} for one in (planned, real)]
    said += [f"{name} differ" for name in numbers[1] if is_far(*(n[name] for n in numbers))]
    return ", ".join(said)


def is_far(planned, real):
    return abs(planned - real) > 0.1 * real


def run_cells(_rank, _world, cells):
    """What a rank of a real run measures in each cell; called on each."""
    return [measure(cell) for cell in cells]
