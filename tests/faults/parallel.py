"""Faults of layouts: what ranks share, and how."""

from __future__ import annotations

from typing import Any

import attrs
import torch.distributed as dist
import verified
from faults.planting import both, function, method, value
from faults.steps import local_square
from faults.table import Fault
from faults.training import training
from faults.user_code import USER, on_rank_1, own_model, own_plan, refusing
from oracle import SPEC
from torch.distributed.fsdp import FSDPModule

import forgekit as fk

__all__ = ["CHECKS", "FAULTS"]


def _average(set_factor: Any, module: Any, factor: float) -> None:
    """What FSDP does unless it is told otherwise."""
    set_factor(module, factor * dist.get_world_size())
    module.set_force_sum_reduction_for_comms(True)


def _everybody_owns(set_layout: Any, model: Any, layout: Any) -> None:
    set_layout(model, attrs.evolve(layout, owns_loss=True))


def _without_offset(areas: Any, *args: Any) -> Any:
    """In the step with a rank's own keys every query sees all of a chunk."""
    return [attrs.evolve(area, offset=None) for area in areas(*args)]


def _replicas_in_norm(reduce: Any, totals: fk.Totals, state: fk.TrainState, **options: Any) -> Any:
    square = local_square(state)
    dist.all_reduce(square)
    return reduce(totals, state, **options).plus(grad_sq=square)


def _shifted_in_slice(model: Any, batch: Any) -> fk.Loss:
    labels = batch["labels"].roll(-1, 1)
    labels[:, -1] = -100
    return fk.cross_entropy(model(batch["input_ids"]), labels)


AVERAGE = method(FSDPModule, "set_gradient_divide_factor", _average)
CHECKS = training(["tp2", "cp2-ring", "cp2-ulysses", "cp4-both"], "fp32") | refusing("tp", "cp")
FAULTS = [
    *(
        Fault("average over ranks", f"{layout} fp32", AVERAGE, seen="gradients", quick=quick)
        for layout, quick in {
            "fsdp2": True,
            "ddp2": False,
            "hsdp2x2": False,
            "cp2-ulysses": False,
        }.items()
    ),
    Fault("average over ranks", "fsdp2 bf16", AVERAGE, seen="gradients", least=10),
    *(
        Fault(
            "drop the causal offset",
            f"{layout} fp32",
            function("areas_seen", _without_offset),
            seen="gradients",
            quick=layout == "cp2-ring",
        )
        for layout in ("cp2-ring", "cp4-both")
    ),
    Fault(
        "each tensor-parallel rank counts",
        "tp2 fp32",
        function("set_layout", _everybody_owns),
        seen="gradients",
        quick=True,
    ),
    # The share of replicated norms in the gradient's norm is small.
    Fault(
        "replicas in the norm",
        "tp2 fp32",
        function("reduce_totals", _replicas_in_norm),
        seen="sgd grad_norm",
        least=50,
    ),
    Fault(
        "a plan that leaves a weight out",
        "user tp",
        own_model("unnamed weight"),
        seen=r"layers\.\d\.act",
        quick=True,
    ),
    Fault(
        "another plan on rank 1",
        "user tp",
        both(
            own_model("right"),
            value(USER, "plan", lambda: dict([*own_plan().items()][: 2 - dist.get_rank()])),
        ),
        seen="ranks differ in plan: .* on rank 0, .* on rank 1",
    ),
    Fault(
        "another precision on rank 1",
        "user tp",
        value(USER, "options", on_rank_1(lambda: {"precision": "bf16"}, "options")),
        seen="ranks differ in precision: 'fp32' on rank 0, 'bf16' on rank 1",
    ),
    Fault(
        "positions counted in a slice",
        "user cp",
        value(USER, "model", lambda: verified.OwnPositions(SPEC)),
        seen=r"what attention 'layers\.0\.attention' is given",
    ),
    Fault(
        "labels shifted in a slice",
        "user cp",
        value(USER, "loss", _shifted_in_slice),
        seen="loss_fn is no sum over positions",
    ),
]
