"""Faults of layouts: what ranks share, and how."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
import verified
from faults.planting import function, method, result, value
from faults.steps import norm_of, summed
from faults.table import Check, Fault, judge_numbers
from faults.training import training
from faults.user_code import on_rank_1, own_model, part, refusing
from lab import (
    SPEC,
    global_batch,
    head_loss,
    lay_out,
    mean_gradients,
    reference_gradients,
    relative_error,
)
from torch.distributed.fsdp import FSDPModule

import forgekit as fk
from forgekit.parallel.context import attention_areas


def _other_style() -> dict[str, str]:
    return verified.PLAN | ({"layers.*.down": "colwise"} if dist.get_rank() == 1 else {})


def _shorter_plan() -> dict[str, str]:
    return dict([*verified.PLAN.items()][: 2 - dist.get_rank()])


def _average(set_factor: Any, module: Any, factor: float) -> None:
    """What FSDP does unless it is told otherwise."""
    set_factor(module, factor * dist.get_world_size())
    module.set_force_sum_reduction_for_comms(True)


def _everybody_owns(set_layout: Any, model: Any, layout: Any) -> None:
    set_layout(model, attrs.evolve(layout, owns_loss=True))


def _without_offset(areas: Any) -> Any:
    """In the step with a rank's own keys every query sees all of a chunk."""
    return [attrs.evolve(area, offset=None) for area in areas]


def _shifted_in_slice(model: Any, batch: Any) -> fk.Loss:
    labels = batch["labels"].roll(-1, 1)
    labels[:, -1] = -100
    return fk.cross_entropy(model(batch["input_ids"]), labels)


ACROSS = {
    "a norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "softmax": lambda h: 8 * h.softmax(-1),
    "rms_norm": lambda h: torch.nn.functional.rms_norm(h, h.shape[-1:]),
    "a mean": lambda h: h - h.mean(-1, keepdim=True),
}
"""Operations without parameters that see all channels, of which a rank has its own."""


class Applied(torch.nn.Module):
    """A function as a module."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.forward = operation


def _across(operation: Any) -> verified.Model:
    """An operation between the colwise and the rowwise matrix of each block."""
    model = verified.Model("right")
    for layer in model.layers:
        layer.act = Applied(operation)
    return model


def _tied(rank: int, world: int) -> dict[str, float]:
    """The gradient of an embedding that is the head too: a sum of both uses."""
    spec, batches = attrs.evolve(SPEC, tied=True), global_batch(world)
    state = lay_out(fk.Transformer(spec).double())
    gradients = mean_gradients(state, [row[rank] for row in batches], TIED["loss"])
    expected, _ = reference_gradients(fk.Transformer(spec), batches)
    return {"gradients": relative_error(gradients, expected) / 1e-10}


def _head_apart(model: Any, batch: Any) -> fk.Loss:
    """The head is a copy of the embedding."""

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> fk.Loss:
        return fk.linear_cross_entropy(hidden, weight.detach(), batch["labels"])

    return model(batch["input_ids"], head=head)


TIED: dict[str, Any] = {"loss": head_loss}
CHECKS = training(["tp2", "cp2-ring", "cp2-ulysses", "cp4-both"], "fp32") | refusing("tp", "cp")
CHECKS["tied"] = Check(measure=_tied, judge=judge_numbers)
TP, USERS, OF_CP = "tp2 fp32", "user tp", "user cp"
AVERAGE = method(FSDPModule, "set_gradient_divide_factor", _average)
OFFSET = result(attention_areas.areas_seen.__name__, _without_offset)
POSITIONS = "at a position depends on other positions"
ALL_OWN, RIGHT = function("set_layout", _everybody_owns), partial(verified.Model, "right")
UNNAMED = own_model(partial(verified.Model, "unnamed weight"))
BF16 = on_rank_1("options", lambda: {"precision": "bf16"})
OWN_POSITIONS = part("model", lambda: verified.OwnPositions(SPEC))
SHIFTED = part("loss", _shifted_in_slice)
MIXED = {name: own_model(partial(_across, operation)) for name, operation in ACROSS.items()}
FAULTS = [
    Fault("average over ranks", "fsdp2 fp32", AVERAGE, "gradients"),
    Fault("average over ranks", "ddp2 fp32", AVERAGE, "gradients"),
    Fault("average over ranks", "hsdp2x2 fp32", AVERAGE, "gradients"),
    Fault("average over ranks", "cp2-ulysses fp32", AVERAGE, "gradients"),
    Fault("average over ranks", "fsdp2 bf16", AVERAGE, "gradients", least=10),
    Fault("drop the causal offset", "cp2-ring fp32", OFFSET, POSITIONS),
    Fault("drop the causal offset", "cp4-both fp32", OFFSET, POSITIONS),
    Fault("each tensor-parallel rank counts", TP, ALL_OWN, "gradients"),
    # The share of replicated norms in the gradient's norm is small.
    Fault("replicas in the norm", TP, norm_of(summed), "sgd grad_norm", least=50),
    Fault("a plan that leaves a weight out", USERS, UNNAMED, r"layers\.\d\.act"),
    Fault("another plan on rank 1", USERS, own_model(RIGHT, _shorter_plan), "ranks differ in plan"),
    Fault("another precision on rank 1", USERS, BF16, "'fp32' on rank 0, 'bf16' on rank 1"),
    Fault("positions counted in a slice", OF_CP, OWN_POSITIONS, r"'layers\.0\.attention' is given"),
    Fault("labels shifted in a slice", OF_CP, SHIFTED, "loss_fn is not a sum over positions"),
    *(Fault(f"{name} across sharded channels", USERS, MIXED[name], "channels") for name in ACROSS),
    Fault("a head apart from its embedding", "tied", value(TIED, "loss", _head_apart), "gradients"),
    Fault("another style on rank 1", USERS, own_model(RIGHT, _other_style), "colwise.*rowwise"),
]
