"""Faults of pipelines."""

from __future__ import annotations

from functools import partial
from typing import Any

from faults.absent import KINDS, Absent, train_in_stages
from faults.planting import method, result
from faults.steps import divided_by_micro_batches, loss, norm_of, user_loss
from faults.table import Check, Fault
from faults.training import training
from faults.user_code import part, refusing
from torch.distributed.pipelining import schedules

import forgekit as fk


def _scaled(build: Any, schedule: Any, *args: Any, **options: Any) -> None:
    """Torch's default: gradients are divided by the number of micro-batches."""
    build(schedule, *args, **options | {"scale_grads": True})


def _one_more_loss(totals: fk.Totals) -> fk.Totals:
    """The loss of the call that finds shapes enters the sums."""
    return totals.plus(loss=totals["loss"] * 1.5, targets=totals["targets"] * 1.5)


CHECKS = training(["pp2-gpipe", "pp2-1f1b", "pp2-zbv"], "fp32") | refusing("pp")
CHECKS["stages"] = Check(measure=train_in_stages, alone=True)
STAGES = "pp2-1f1b fp32"
SCALED = method(schedules._PipelineSchedule, "__init__", _scaled)
OF_OWN_STAGE = norm_of(lambda square: square)
ONE_MORE = result("accumulate", _one_more_loss)
TERM = user_loss("a term over parameters")
TAKE = "[Ll]et the blocks take and return it"
ABSENT = {kind: part("model", partial(Absent, kind)) for kind in KINDS}
FAULTS = [
    Fault("divide by micro-batches", "pp2-gpipe fp32", SCALED, "gradients"),
    Fault("divide by micro-batches", "pp2-zbv fp32", SCALED, "gradients"),
    Fault("clip per stage: sgd grad_norm", STAGES, OF_OWN_STAGE, "sgd grad_norm"),
    Fault("clip per stage: sgd moved", STAGES, OF_OWN_STAGE, "sgd moved"),
    Fault("divide by micro-batches", STAGES, loss(divided_by_micro_batches), "gradients"),
    Fault("the rehearsal's loss counted", STAGES, ONE_MORE, "gradients"),
    Fault("a term over parameters of other stages", "user pp", TERM, "loss_fn reads a parameter"),
    *(Fault(f"{kind} of a part on another stage", "stages", ABSENT[kind], TAKE) for kind in KINDS),
]
