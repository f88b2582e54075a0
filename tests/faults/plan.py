"""Differences between what a plan says of a step and what real ranks do in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plan_cells
import torch
import torch.distributed as dist
from faults.planting import value
from faults.table import Check, Fault

import forgekit as fk

LOSS = plan_cells.loss_fn
CELL = plan_cells.Cell(name="fsdp2", world=2, sizes={})


def _measure(rank: int, world: int) -> Any:
    return plan_cells.measure(CELL)


def _compare(by_rank: Sequence[Any]) -> str:
    """What differs between the plan, made in this process, and the first rank."""
    from plan.test_plan import job_of

    from forgekit.plan.plan import plan_ranks

    (planned,) = plan_ranks(job_of(CELL))
    return plan_cells.differences(CELL, planned, by_rank[0])


def _one_collective_more(model: Any, batch: Any) -> fk.Loss:
    dist.all_reduce(torch.ones(3))
    return LOSS(model, batch)


def _one_product_more(model: Any, batch: Any) -> fk.Loss:
    torch.ones(8, 8) @ torch.ones(8, 8)
    return LOSS(model, batch)


CHECKS = {"plan": Check(measure=_measure, judge=_compare)}
LOSSES = (_one_collective_more, _one_product_more, plan_cells.logits_loss)
SUM, PRODUCT, LOGITS = (value(plan_cells, "loss_fn", loss) for loss in LOSSES)
FAULTS = [
    Fault("a collective that no plan has", "plan", SUM, "collectives differ"),
    Fault("a product that no plan has", "plan", PRODUCT, "^FLOPs differ"),
    Fault("more is kept for the backward", "plan", LOGITS, "(activations|temporary) differ"),
]
