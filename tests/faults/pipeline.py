"""Faults of pipelines."""

from __future__ import annotations

from functools import partial
from typing import Any

import verified
from distributed import models
from faults.absent import KINDS, Absent, train_in_stages
from faults.planting import function, method, value
from faults.steps import divided_by_micro_batches, local_square
from faults.table import Check, Fault
from faults.training import training
from faults.user_code import USER, refusing
from torch.distributed.pipelining import schedules

import forgekit as fk

__all__ = ["CHECKS", "FAULTS"]


def _scaled(build: Any, schedule: Any, *args: Any, **options: Any) -> None:
    """Torch's default: gradients are divided by the number of micro-batches."""
    build(schedule, *args, **options | {"scale_grads": True})


def _norm_of_own_stage(reduce: Any, totals: fk.Totals, state: fk.TrainState, **options: Any) -> Any:
    """Everything added up over the ranks but the norm."""
    return reduce(totals, state, **options).plus(grad_sq=local_square(state))


def _one_more_loss(accumulate: Any, *args: Any, **options: Any) -> Any:
    """The loss of the call that finds shapes enters the sums."""
    totals = accumulate(*args, **options)
    return totals.plus(loss=totals["loss"] * 1.5, targets=totals["targets"] * 1.5)


CHECKS = training(["pp2-gpipe", "pp2-1f1b", "pp2-zbv"], "fp32") | refusing("pp")
CHECKS["stages"] = Check(measure=train_in_stages, alone=True)
SCALED = method(schedules._PipelineSchedule, "__init__", _scaled)
FAULTS = [
    Fault("divide by micro-batches", "pp2-gpipe fp32", SCALED, seen="gradients", quick=True),
    Fault("divide by micro-batches", "pp2-zbv fp32", SCALED, seen="gradients"),
    *(
        Fault(
            f"clip per stage: {seen}",
            "pp2-1f1b fp32",
            function("reduce_totals", _norm_of_own_stage),
            seen=seen,
        )
        for seen in ("sgd grad_norm", "sgd moved")
    ),
    Fault(
        "divide by micro-batches",
        "pp2-1f1b fp32",
        value(models.LOSSES, "logits", divided_by_micro_batches),
        seen="gradients",
    ),
    Fault(
        "the rehearsal's loss counted",
        "pp2-1f1b fp32",
        function("accumulate", _one_more_loss),
        seen="gradients",
    ),
    Fault(
        "a term over parameters of other stages",
        "user pp",
        value(USER, "loss", partial(verified.loss_fn, "a term over parameters")),
        seen="loss_fn reads a parameter of the model",
    ),
    *(
        Fault(
            f"{kind} of a part on another stage",
            "stages",
            value(USER, "model", partial(Absent, kind)),
            seen="[Ll]et the blocks take and return it",
        )
        for kind in KINDS
    ),
]
