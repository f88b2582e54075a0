"""Faults of layers of experts: models with ``MoESpec``, in float64."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from distributed import models
from faults.planting import Plant, function, method, result, value
from faults.steps import mean_of_norms, norm_of
from faults.table import Fault
from faults.training import training

import forgekit as fk
from forgekit.steps.totals import with_sums


def _times_ep(factor: float) -> Plant:
    def scaled(accumulate: Any, state: Any, *args: Any, **options: Any) -> Any:
        """Gradients of experts, whose ranks see all tokens, divided or multiplied by ep."""
        totals = accumulate(state, *args, **options)
        for name, parameter in state.model.named_parameters():
            if ".experts." in name and parameter.grad is not None:
                parameter.grad.mul_(factor)
        return totals

    return function("accumulate", scaled)


def _own_router(linear: Any, x: Any, weight: Any, *args: Any) -> Any:
    """A router's gradient comes from the tokens of one rank alone."""
    is_router = weight.shape[0] == models.MOE.experts and weight.ndim == 2
    return linear(x, weight.detach() if is_router and dist.get_rank() > 0 else weight, *args)


def _counts(factors: Any) -> Plant:
    def change(totals: fk.Totals) -> fk.Totals:
        counts = totals["experts", "counts"].clone()
        counts *= counts.new_tensor(factors)
        return with_sums(totals, {("experts", "counts"): counts})

    return result("reduce_totals", change)


def _terms(factor: float) -> Plant:
    terms = ("aux_loss", "z_loss", "sequence_aux_loss")
    scaled = {name: getattr(models.MOE, name) * factor for name in terms}
    return value(models, "MOE", attrs.evolve(models.MOE, **scaled))


CHECKS = training(["moe-ep2", "moe-cp2-ring"], "fp64")
EP, ROUTER = "moe-ep2 fp64", "gradients of router"
ROUTERS = method(torch.nn.functional, "linear", _own_router)
OWN_COUNTS = function("_sum_slices", lambda _sum, _group, counts: counts)
FIRST_TWICE = [2.0] + [1.0] * (models.MOE.experts - 1)
"""What recomputation counted again: here of one expert, so that shares change too."""
FAULTS = [
    Fault("divide experts by ep", EP, _times_ep(0.5), "gradients of experts"),
    Fault("experts times ep", EP, _times_ep(2.0), "gradients of experts"),
    Fault("forget to reduce routers", EP, ROUTERS, ROUTER),
    Fault("average norms", EP, norm_of(mean_of_norms), "sgd grad_norm"),
    Fault("count twice", EP, _counts(FIRST_TWICE), "balance"),
    Fault("halve counts", EP, _counts(0.5), "counts"),
    Fault("terms times micro-batches", EP, _terms(3), ROUTER),
    Fault("terms times micro-batches: dense", EP, _terms(3), "gradients of dense"),
    Fault("terms without gradient", EP, _terms(0), ROUTER),
    Fault("rows of slices", "moe-cp2-ring fp64", OWN_COUNTS, ROUTER),
]
