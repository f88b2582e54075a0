"""Faults of losses and of what a step adds up."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import verified
from distributed import models
from faults.planting import both, function, method, value
from faults.table import Fault
from faults.training import training
from faults.user_code import USER, on_rank_1, own_model, refusing
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


class Skipping(verified.Model):
    """Rank 1 leaves a block out, as ranks do that draw blocks for themselves."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number, layer in enumerate(self.layers):
            x = x if number == 2 and dist.get_rank() == 1 else layer(x)
        return self.head(x)


def _user_loss(model: Any, batch: Any) -> fk.Loss:
    return verified.loss_fn("right", model, batch)


def _one_metric_more(model: Any, batch: Any) -> fk.Loss:
    return dataclasses.replace(_user_loss(model, batch), metrics={"accuracy": (1.0, 2)})


def _counts_with_gradient(model: Any, batch: Any) -> fk.Loss:
    loss = _user_loss(model, batch)
    return fk.Loss(loss.sum, loss.count * torch.ones((), requires_grad=True))


def _gradient_of_nan(model: Any, batch: Any) -> fk.Loss:
    """A finite loss whose gradient is none on rank 1."""
    loss = _user_loss(model, batch)
    return dataclasses.replace(loss, sum=loss.sum + (loss.sum * 0).sqrt())


def _fewer_rows(mesh: Any, step: int) -> list[Any]:
    batches = [next(verified.batches(mesh)) for _ in range(4)]
    return [*batches[:-1], batches[-1][:1]] if step else batches


CHECKS = (
    training(["fsdp2", "ddp2", "hsdp2x2"], "fp32")
    | training(["fsdp2"], "bf16")
    | refusing("dp_shard", "dp_replicate")
)
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
    Fault(
        "outputs that FSDP cannot look into",
        "user dp_shard",
        both(
            value(USER, "model", verified.Opaque),
            value(USER, "loss", partial(verified.loss_fn, "opaque")),
        ),
        seen="UnreducedError: ",
        quick=True,
    ),
    Fault(
        "blocks that ranks skip apart",
        "user dp_shard",
        value(USER, "model", partial(Skipping, "right")),
        seen="ranks run different modules: rank 0 is at layers.2 and rank 1 at layers.3",
    ),
    Fault(
        "a weight read before the call",
        "user dp_shard",
        both(
            own_model("right"),
            value(USER, "loss", partial(verified.loss_fn, "weight read before the call")),
        ),
        seen="weight is a DTensor over .* read it inside forward",
    ),
    Fault(
        "another metric on rank 1",
        "user dp_shard",
        value(USER, "loss", on_rank_1(_one_metric_more, "loss")),
        seen="rank 1 reports other sums than rank 0",
    ),
    Fault(
        "a count that carries a gradient",
        "user dp_shard",
        value(USER, "loss", _counts_with_gradient),
        seen="a count that carries a gradient",
    ),
    Fault(
        "NaN gradient with a finite loss",
        "user dp_shard",
        value(USER, "loss", on_rank_1(_gradient_of_nan, "loss")),
        seen="a step was skipped",
        quick=True,
    ),
    Fault(
        "fewer rows on rank 1 in a later step",
        "user dp_shard",
        value(USER, "batches", on_rank_1(_fewer_rows, "batches")),
        seen="a step was skipped",
        quick=True,
    ),
    Fault(
        "another step on rank 1",
        "user dp_shard",
        value(
            USER,
            "before_step",
            on_rank_1(lambda state: fk.donate(state, step=state.step + 1), "before_step"),
        ),
        seen="ranks differ in step: 0 on rank 0, 1 on rank 1",
    ),
    Fault(
        "a forgotten mesh",
        "user dp_replicate",
        value(USER, "state_mesh", lambda mesh: None),
        seen="there are 2 ranks and the state got no mesh",
    ),
]
