"""Faults of layers of experts: models with ``MoESpec``, in float64."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from distributed import models
from faults.planting import Count, function, value
from faults.steps import local_square
from faults.table import Fault
from faults.training import training

import forgekit as fk

__all__ = ["CHECKS", "FAULTS"]


def _times_ep(factor: float) -> Any:
    def scaled(accumulate: Any, state: Any, *args: Any, **options: Any) -> Any:
        """Gradients of experts, whose ranks see all tokens, divided or multiplied by ep."""
        totals = accumulate(state, *args, **options)
        for name, parameter in state.model.named_parameters():
            if ".experts." in name and parameter.grad is not None:
                parameter.grad.mul_(factor)
        return totals

    return function("accumulate", scaled)


def _mean_of_norms(reduce: Any, totals: fk.Totals, state: fk.TrainState, **options: Any) -> Any:
    norm = local_square(state).sqrt()
    dist.all_reduce(norm)
    square = (norm / dist.get_world_size()).square()
    return reduce(totals, state, **options).plus(grad_sq=square)


@contextmanager
def _own_router() -> Any:
    """A router's gradient comes from the tokens of one rank alone."""
    count, linear = Count(), torch.nn.functional.linear

    def planted(x: Any, weight: Any, *args: Any) -> Any:
        is_router = weight.shape[0] == models.MOE.experts and weight.ndim == 2
        count.calls += is_router
        detached = is_router and dist.get_rank() > 0
        return linear(x, weight.detach() if detached else weight, *args)

    torch.nn.functional.linear = planted
    try:
        yield count
    finally:
        torch.nn.functional.linear = linear


def _counts(change: Any) -> Any:
    def reduced(reduce: Any, totals: fk.Totals, *args: Any, **options: Any) -> Any:
        totals = reduce(totals, *args, **options)
        counts = change(totals["experts", "counts"].clone())
        return attrs.evolve(totals, flat={**totals.flat, ("experts", "counts"): counts})

    return function("reduce_totals", reduced)


def _first_twice(counts: torch.Tensor) -> torch.Tensor:
    """What recomputation counted again: here of one expert, so that shares change too."""
    counts[..., 0] *= 2
    return counts


def _terms(factor: float) -> Any:
    spec = models.MOE
    scaled = {
        name: getattr(spec, name) * factor for name in ("aux_loss", "z_loss", "sequence_aux_loss")
    }
    return value(models, "MOE", attrs.evolve(spec, **scaled))


def _own_counts(_sum: Any, _group: Any, counts: Any) -> Any:
    return counts


CHECKS = training(["moe-ep2", "moe-cp2-ring"], "fp64")
EP = "moe-ep2 fp64"
FAULTS = [
    Fault("divide experts by ep", EP, _times_ep(0.5), seen="gradients of experts", quick=True),
    Fault("experts times ep", EP, _times_ep(2.0), seen="gradients of experts"),
    Fault("forget to reduce routers", EP, _own_router, seen="gradients of router", quick=True),
    Fault("average norms", EP, function("reduce_totals", _mean_of_norms), seen="sgd grad_norm"),
    Fault("count twice", EP, _counts(_first_twice), seen="balance"),
    Fault("halve counts", EP, _counts(lambda counts: counts / 2), seen="counts"),
    Fault("terms times micro-batches", EP, _terms(3), seen="gradients of router", quick=True),
    Fault("terms times micro-batches: dense", EP, _terms(3), seen="gradients of dense"),
    Fault("terms without gradient", EP, _terms(0), seen="gradients of router"),
    Fault(
        "rows of slices",
        "moe-cp2-ring fp64",
        function("_sum_slices", _own_counts),
        seen="gradients of router",
    ),
]
