"""Faults of losses and of what a step adds up."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from distributed import models
from faults.planting import function, method, value
from faults.table import Fault
from faults.training import training
from torch.distributed.tensor import DTensor

import forgekit as fk

__all__ = ["CHECKS", "FAULTS", "divided_by_micro_batches", "local_square"]


def divided_by_micro_batches(model: Any, batch: Any) -> fk.Loss:
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


def _padding_counted(model: Any, batch: Any) -> fk.Loss:
    return dataclasses.replace(models.logits_loss(model, batch), count=batch["labels"].numel())


def _mean_over_ranks(reduce: Any, tensor: Any, *args: Any, **options: Any) -> Any:
    """A sum over ranks that divides by their number."""
    work = reduce(tensor, *args, **options)
    if tensor.is_floating_point():
        tensor.div_(dist.get_world_size(options.get("group")))
    return work


def local_square(state: fk.TrainState) -> torch.Tensor:
    """The squared norm of what a rank holds of the gradient, whoever else holds it too."""
    gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    return torch.stack([g.double().square().sum() for g in local]).sum()


def _mean_of_norms(reduce: Any, totals: fk.Totals, state: fk.TrainState, **options: Any) -> Any:
    """The mean of the ranks' own norms in place of the norm of all."""
    norm = local_square(state).sqrt()
    dist.all_reduce(norm)
    square = (norm / dist.get_world_size()).square()
    return reduce(totals, state, **options).plus(grad_sq=square)


def _replicas_in_norm(reduce: Any, totals: fk.Totals, state: fk.TrainState, **options: Any) -> Any:
    """Each rank adds what it holds, so that replicas count as often as there are ranks."""
    square = local_square(state)
    dist.all_reduce(square)
    return reduce(totals, state, **options).plus(grad_sq=square)


def _without_last_metric(reduce: Any, totals: fk.Totals, *args: Any, **options: Any) -> Any:
    """Half of the targets: those of one rank."""
    totals = reduce(totals, *args, **options)
    return totals.plus(targets=totals["targets"] / 2)


def _first_loss_twice(
    accumulate: Any, state: fk.TrainState, batches: Any, loss_fn: Any, **options: Any
) -> Any:
    """The loss of one more call, such as one that only finds shapes, enters the sums."""
    totals = accumulate(state, batches, loss_fn, **options)
    return totals.plus(targets=totals["targets"] + 7, loss=totals["loss"] + 7)


def _without_factor(update: Any, state: fk.TrainState, correction: Any, **options: Any) -> Any:
    """Gradients are neither normalised nor clipped."""
    ones = torch.ones_like(correction.factor)
    return update(state, correction._replace(factor=ones), **options)


CHECKS = training(["fsdp2", "ddp2", "hsdp2x2"], "fp32") | training(["fsdp2"], "bf16")
FAULTS = [
    Fault(
        "divide by micro-batches",
        "fsdp2 fp32",
        value(models.LOSSES, "logits", divided_by_micro_batches),
        seen="gradients",
        quick=True,
    ),
    Fault(
        "mean of each micro-batch",
        "fsdp2 fp32",
        value(models.LOSSES, "logits", _mean_of_micro_batch),
        seen="gradients",
    ),
    Fault(
        "labels shifted twice",
        "fsdp2 fp32",
        value(models.LOSSES, "logits", _shifted_twice),
        seen="gradients",
        quick=True,
    ),
    Fault(
        "padding counted",
        "fsdp2 fp32",
        value(models.LOSSES, "logits", _padding_counted),
        seen="gradients",
    ),
    Fault(
        "sums averaged over ranks",
        "fsdp2 fp32",
        method(dist, "all_reduce", _mean_over_ranks),
        seen="gradients",
        quick=True,
    ),
    Fault(
        "half of the targets",
        "fsdp2 fp32",
        function("reduce_totals", _without_last_metric),
        seen="gradients",
    ),
    Fault(
        "a loss counted once more",
        "fsdp2 fp32",
        function("accumulate", _first_loss_twice),
        seen="sgd loss",
    ),
    Fault(
        "the factor forgotten",
        "fsdp2 fp32",
        function("update", _without_factor),
        seen="sgd moved",
        quick=True,
    ),
    Fault(
        "average norms",
        "fsdp2 fp32",
        function("reduce_totals", _mean_of_norms),
        seen="sgd grad_norm",
    ),
    Fault(
        "replicas in the norm",
        "ddp2 fp32",
        function("reduce_totals", _replicas_in_norm),
        seen="sgd grad_norm",
        quick=True,
    ),
    Fault(
        "replicas in the norm",
        "hsdp2x2 fp32",
        function("reduce_totals", _replicas_in_norm),
        seen="sgd moved",
    ),
    # In bfloat16 a factor of two stands out.
    Fault(
        "divide by micro-batches",
        "fsdp2 bf16",
        value(models.LOSSES, "logits", divided_by_micro_batches),
        seen="gradients",
        least=10,
    ),
]
