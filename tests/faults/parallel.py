"""Faults of layouts: what ranks share, and how."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
import verified
from faults.planting import both, function, method, value
from faults.steps import local_square
from faults.table import Check, Fault, judge_numbers
from faults.training import training
from faults.user_code import USER, on_rank_1, own_model, own_plan, refusing
from lab import SPEC, full, global_batch, head_loss, reference_gradients, relative_error
from torch.distributed.fsdp import FSDPModule

import forgekit as fk
from forgekit.parallel.context import attention_areas

__all__ = ["CHECKS", "FAULTS"]


def _other_style() -> dict[str, str]:
    styles = own_plan()
    return styles | {"layers.*.down": "colwise"} if dist.get_rank() == 1 else styles


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


ACROSS = {
    "a norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "softmax": lambda h: 8 * h.softmax(-1),
    "rms_norm": lambda h: torch.nn.functional.rms_norm(h, h.shape[-1:]),
    "a mean": lambda h: h - h.mean(-1, keepdim=True),
}
"""Operations without parameters that see all channels, of which a rank has its own."""


class Across(verified.Model):
    """An operation between the colwise and the rowwise matrix of each block."""

    def __init__(self, operation: Any) -> None:
        super().__init__("right")
        for layer in self.layers:
            layer.act = Applied(operation)


class Applied(torch.nn.Module):
    """A function as a module."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operation(x)


def _tied(rank: int, world: int) -> dict[str, float]:
    """The gradient of an embedding that is the head too: a sum of both uses."""
    spec = attrs.evolve(SPEC, tied=True)
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    model = fk.parallelize(fk.Transformer(spec).double(), mesh)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh)
    batches = global_batch(world)
    totals = fk.accumulate(state, [row[rank] for row in batches], TIED["loss"])
    totals = fk.reduce_totals(totals, state)
    gradients = {name: full(g) for name, g in fk.gradients(state, totals).items()}
    expected, _ = reference_gradients(fk.Transformer(spec), batches)
    return {"gradients": relative_error(gradients, expected) / 1e-10}


def _head_apart(model: Any, batch: Any) -> fk.Loss:
    """The head is a copy of the embedding."""

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> fk.Loss:
        return fk.linear_cross_entropy(hidden, weight.detach(), batch["labels"])

    return model(batch["input_ids"], head=head)


TIED: dict[str, Any] = {"loss": head_loss}
AVERAGE = method(FSDPModule, "set_gradient_divide_factor", _average)
CHECKS = training(["tp2", "cp2-ring", "cp2-ulysses", "cp4-both"], "fp32") | refusing("tp", "cp")
CHECKS["tied"] = Check(measure=_tied, judge=judge_numbers)
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
            function(attention_areas.areas_seen.__name__, _without_offset),
            seen="at a position depends on other positions",
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
    *(
        Fault(
            f"{name} across sharded channels",
            "user tp",
            both(own_model("right"), value(USER, "model", partial(Across, operation))),
            seen="channels",
            quick=name == "a norm",
        )
        for name, operation in ACROSS.items()
    ),
    Fault("a head apart from its embedding", "tied", value(TIED, "loss", _head_apart), "gradients"),
    Fault(
        "another style on rank 1",
        "user tp",
        both(own_model("right"), value(USER, "plan", _other_style)),
        seen="ranks differ in plan: .*colwise.*rowwise",
    ),
]
