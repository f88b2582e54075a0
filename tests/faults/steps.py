"""Faults of losses and of what a step adds up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import verified
from distributed import models
from faults.planting import Plant, both, function, method, result, value
from faults.table import Fault
from faults.training import training
from faults.user_code import on_rank_1, own_model, part, refusing
from torch import Tensor
from torch.distributed.tensor import DTensor

import forgekit as fk


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


def norm_of(combine: Callable[[Tensor], Tensor]) -> Plant:
    """Another norm: of the squares of what a rank holds of the gradient, whoever else holds it."""

    def reduced(reduce: Any, totals: fk.Totals, state: fk.TrainState, **options: Any) -> Any:
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        square = torch.stack([g.double().square().sum() for g in local]).sum()
        return reduce(totals, state, **options).plus(grad_sq=combine(square))

    return function("reduce_totals", reduced)


def summed(square: Tensor) -> Tensor:
    """Replicas count as often as there are ranks."""
    dist.all_reduce(square)
    return square


def mean_of_norms(square: Tensor) -> Tensor:
    return (summed(square.sqrt()) / dist.get_world_size()).square()


def _no_factor(update: Any, state: fk.TrainState, correction: Any, **options: Any) -> Any:
    """Gradients are neither normalised nor clipped."""
    ones = torch.ones_like(correction.factor)
    return update(state, correction._replace(factor=ones), **options)


class Skipping(verified.Model):
    """Rank 1 leaves a block out, as ranks do that draw blocks for themselves."""

    def forward(self, ids: Tensor) -> Tensor:
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


def _a_step_further(state: fk.TrainState) -> fk.TrainState:
    return fk.donate(state, step=state.step + 1)


def _half_of_targets(totals: fk.Totals) -> fk.Totals:
    return totals.plus(targets=totals["targets"] / 2)


def _one_loss_more(totals: fk.Totals) -> fk.Totals:
    """That of one more call, such as one that only finds shapes."""
    return totals.plus(targets=totals["targets"] + 7, loss=totals["loss"] + 7)


def loss(by: Callable[..., fk.Loss]) -> Plant:
    """Another loss of the cells."""
    return value(models.LOSSES, "logits", by)


def user_loss(kind: str) -> Plant:
    """A loss with one of the mistakes that ``verify`` knows."""
    return part("loss", partial(verified.loss_fn, kind))


CHECKS = (
    training(["fsdp2", "ddp2", "hsdp2x2"], "fp32")
    | training(["fsdp2"], "bf16")
    | refusing("dp_shard", "dp_replicate")
)
FSDP, USERS = "fsdp2 fp32", "user dp_shard"
DIVIDED = loss(divided_by_micro_batches)
REPLICAS = norm_of(summed)
AVERAGED = method(dist, "all_reduce", _mean_over_ranks)
OPAQUE = both(part("model", verified.Opaque), user_loss("opaque"))
SKIPPING = part("model", partial(Skipping, "right"))
EARLY = both(own_model(partial(verified.Model, "right")), user_loss("weight read before the call"))
COUNTS, ONE_MORE = part("loss", _counts_with_gradient), on_rank_1("loss", _one_metric_more)
NAN, FEWER = on_rank_1("loss", _gradient_of_nan), on_rank_1("batches", _fewer_rows)
AHEAD = on_rank_1("before_step", _a_step_further)
NO_MESH = part("state_mesh", lambda mesh: None)
FAULTS = [
    Fault("divide by micro-batches", FSDP, DIVIDED, "gradients"),
    Fault("mean of each micro-batch", FSDP, loss(_mean_of_micro_batch), "gradients"),
    Fault("labels shifted twice", FSDP, loss(_shifted_twice), "gradients"),
    Fault("padding counted", FSDP, loss(_padding_counted), "gradients"),
    Fault("sums averaged over ranks", FSDP, AVERAGED, "gradients"),
    Fault("half of the targets", FSDP, result("reduce_totals", _half_of_targets), "gradients"),
    Fault("a loss counted once more", FSDP, result("accumulate", _one_loss_more), "sgd loss"),
    Fault("the factor forgotten", FSDP, function("update", _no_factor), "sgd moved"),
    Fault("average norms", FSDP, norm_of(mean_of_norms), "sgd grad_norm"),
    Fault("replicas in the norm", "ddp2 fp32", REPLICAS, "sgd grad_norm"),
    Fault("replicas in the norm", "hsdp2x2 fp32", REPLICAS, "sgd moved"),
    # In bfloat16 a factor of two stands out.
    Fault("divide by micro-batches", "fsdp2 bf16", DIVIDED, "gradients", least=10),
    Fault("outputs that FSDP cannot look into", USERS, OPAQUE, "UnreducedError: "),
    Fault("blocks that ranks skip apart", USERS, SKIPPING, "is at layers.2 and rank 1 at layers.3"),
    Fault("a weight read before the call", USERS, EARLY, "is a DTensor .* Read it inside forward"),
    Fault("another metric on rank 1", USERS, ONE_MORE, "rank 1 reports other sums than rank 0"),
    Fault("a count that carries a gradient", USERS, COUNTS, "a count that carries a gradient"),
    Fault("NaN gradient with a finite loss", USERS, NAN, "a step was skipped"),
    Fault("fewer rows on rank 1 in a later step", USERS, FEWER, "a step was skipped"),
    Fault("another step on rank 1", USERS, AHEAD, "ranks differ in step: 0 on rank 0, 1 on rank 1"),
    Fault("a forgotten mesh", "user dp_replicate", NO_MESH, "2 ranks, but the state got no mesh"),
]
