"""Faults that trainers have had, each as a context in which every step has it."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import attrs
import torch
import torch.distributed as dist
from distributed import models
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor

import forgekit as fk
from forgekit.model import routing
from forgekit.model.moe import Experts
from forgekit.parallel.context.attention_areas import Area, areas_seen
from forgekit.parallel.fsdp import sum_gradients
from forgekit.state import set_layout
from forgekit.steps import pipelined
from forgekit.steps.experts import StepRouters

__all__ = ["MUTATIONS"]


def _replacing(*targets: str, by: Any) -> Callable[[], Any]:
    """A context in which names of modules mean something else."""

    @contextmanager
    def mutation() -> Iterator[None]:
        with ExitStack() as stack:
            for target in targets:
                stack.enter_context(patch(target, by))
            yield

    return mutation


def _with_loss(loss_fn: Callable[[Any, Any], fk.Loss]) -> Callable[[], Any]:
    return lambda: patch.dict(models.LOSSES, {"logits": loss_fn})


def _divided_by_micro_batches(model: Any, batch: Any) -> fk.Loss:
    """What ``(loss / len(batches)).backward()`` does with two of them."""
    loss = models.logits_loss(model, batch)
    return dataclasses.replace(loss, sum=loss.sum / 2)


def _mean_of_micro_batch(model: Any, batch: Any) -> fk.Loss:
    loss = models.logits_loss(model, batch)
    return fk.Loss(loss.sum / max(int(loss.count), 1), 1)


def _shifted_twice(model: Any, batch: Any) -> fk.Loss:
    labels = batch["labels"].roll(-1, 1)
    labels[:, -1] = -100
    return models.logits_loss(model, batch.copy().update({"labels": labels}))


def _average(module: Any) -> None:
    """What FSDP does unless it is told otherwise."""
    module.set_gradient_divide_factor(float(dist.get_world_size()))
    module.set_force_sum_reduction_for_comms(True)


def _one_owner(gradient: Any, world: int) -> tuple[Any, int]:
    return (gradient.to_local() if isinstance(gradient, DTensor) else gradient), 1


def _everybody_owns(model: Any, layout: Any) -> None:
    set_layout(model, attrs.evolve(layout, owns_loss=True))


def _without_offset(rank: int, source: int, places: int) -> list[Area]:
    """In the step with a rank's own keys every query sees all of a chunk."""
    return [attrs.evolve(area, offset=None) for area in areas_seen(rank, source, places)]


_build_schedule = schedules._PipelineSchedule.__init__


def _scaled_schedule(self: Any, *args: Any, **options: Any) -> None:
    """Torch's default: gradients are divided by the number of micro-batches."""
    _build_schedule(self, *args, **options | {"scale_grads": True})


_loss_of_last_stage = pipelined._Work._loss


def _counted_rehearsal(work: Any, out: Any, call: Any) -> fk.Loss:
    """The loss of the call that finds shapes enters the sums."""
    loss = _loss_of_last_stage(work, out, call)
    if sys._getframe(1).f_code.co_name != "compute":  # the step's own call
        work.sums.add(loss, rows=0)
    return loss


_reduce = fk.reduce_totals


def _norm_of_own_stage(totals: fk.Totals, state: fk.TrainState, **options: Any) -> fk.Totals:
    """Everything added up over the ranks but the norm."""
    gradients = [p.grad for p in state.model.parameters()]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    squares = torch.stack([g.double().square().sum() for g in local]).sum()
    return _reduce(totals, state, **options).plus(grad_sq=squares)


_sum_gradients = sum_gradients


def _experts_divided(module: Any) -> None:
    """Divide experts' gradients by the two ranks that share them."""
    _sum_gradients(module)
    if isinstance(module, Experts):
        module.set_gradient_divide_factor(2.0)


_linear = torch.nn.functional.linear


def _own_router(x: Any, weight: Any) -> Any:
    """A router's gradient from the tokens of one rank alone."""
    return _linear(x, weight if dist.get_rank() == 0 else weight.detach())


def _average_norm(totals: fk.Totals, state: fk.TrainState, **options: Any) -> fk.Totals:
    """The mean of the ranks' own norms in place of the norm of all."""
    local = [p.grad.to_local() for p in state.model.parameters()]
    norm = torch.stack([gradient.square().sum() for gradient in local]).sum().sqrt()
    dist.all_reduce(norm)
    norm = norm / dist.get_world_size()
    return _reduce(totals, state, **options).plus(grad_sq=norm.square().double())


_note_sum = StepRouters._sum


def _first_twice(self: Any, layer: str, name: str, shape: tuple[int, ...]) -> Any:
    """The first micro-batch counts twice: in the forward and in its recomputation."""
    again = copy.copy(self)
    again._noted = [*self._noted, *self._noted[:1]]
    return _note_sum(again, layer, name, shape)


def _halved(self: Any, layer: str, name: str, shape: tuple[int, ...]) -> Any:
    return _note_sum(self, layer, name, shape) / 2


def _times_micro_batches(x: Any, term: Any, scale: Any) -> Any:
    """Terms as in a trainer that divides all but them by its three micro-batches."""
    return routing.add_gradient(x, term, scale * 3)


MUTATIONS: dict[str, Callable[[], Any]] = {
    "divide by micro-batches": _with_loss(_divided_by_micro_batches),
    "mean of each micro-batch": _with_loss(_mean_of_micro_batch),
    "labels shifted twice": _with_loss(_shifted_twice),
    "average over ranks": _replacing("forgekit.parallel.fsdp.sum_gradients", by=_average),
    "forget replicas in the norm": _replacing(
        "forgekit.steps.totals.shard_and_owners", by=_one_owner
    ),
    "clip per stage": _replacing(
        "forgekit.reduce_totals", "forgekit.steps.make_step.reduce_totals", by=_norm_of_own_stage
    ),
    "divide by micro-batches in the schedule": _replacing(
        "torch.distributed.pipelining.schedules._PipelineSchedule.__init__", by=_scaled_schedule
    ),
    "count the shape-inference call": _replacing(
        "forgekit.steps.pipelined._Work._loss", by=_counted_rehearsal
    ),
    "drop the causal offset": _replacing(
        "forgekit.parallel.context.attention_areas.areas_seen", by=_without_offset
    ),
    "count each tensor-parallel rank": _replacing(
        "forgekit.parallel.parallelize.set_layout", by=_everybody_owns
    ),
    "divide experts by ep": _replacing("forgekit.parallel.fsdp.sum_gradients", by=_experts_divided),
    "forget to reduce routers": _replacing(
        "forgekit.model.routing.F", by=SimpleNamespace(linear=_own_router)
    ),
    "average norms": _replacing(
        "forgekit.reduce_totals", "forgekit.steps.make_step.reduce_totals", by=_average_norm
    ),
    "count twice": _replacing("forgekit.steps.experts.StepRouters._sum", by=_first_twice),
    "halve counts": _replacing("forgekit.steps.experts.StepRouters._sum", by=_halved),
    "terms times micro-batches": _replacing(
        "forgekit.model.moe.add_gradient", by=_times_micro_batches
    ),
    "rows of slices": _replacing(
        "forgekit.parallel.context.context_parallel._sum_slices", by=lambda _group, counts: counts
    ),
}
