"""Faults of adapters: gradients and merges, against the product of the factors by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import adapted
import torch
from faults.folders import shared_folder
from faults.planting import function, value
from faults.table import Check, Fault, judge_numbers, saying
from lab import full_tensors, mean_gradients, relative_error

import forgekit as fk

BOUND = 1e-12
USER: dict[str, Any] = {
    "before": lambda model: model,
    "after_load": lambda model: None,
    "after_parallelize": lambda model: None,
}
reference = cache(adapted.reference)


@saying
def _find(rank: int, world: int) -> dict[str, Any]:
    """Gradients and merged weights of a rank's model."""
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    model = fk.parallelize(USER["before"](adapted.move(adapted.build("dense"))), mesh)
    USER["after_parallelize"](model)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    mine = [row[rank] for row in adapted.batches_of(world)]
    gradients = mean_gradients(state, mine, adapted.loss_fn)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    fk.merge_lora(model)
    merged = {n: t for n, t in full_tensors(model).items() if "lora_" not in n}
    return {"gradients": gradients, "merged": merged}


def _judge(by_rank: Sequence[Any]) -> Any:
    if isinstance(by_rank[0], str):
        return judge_numbers(by_rank)
    tensors = {n: p.detach() for n, p in adapted.move(adapted.build("dense")).named_parameters()}
    merged = adapted.adapted_weights("dense", tensors)
    expected = reference("dense", len(by_rank))
    errors = []
    for found in by_rank:
        gradients = found["gradients"]
        extra = {"trained parameters of the base": len(gradients.keys() - expected.keys()) / BOUND}
        gradient = relative_error({n: gradients[n] for n in expected}, expected) / BOUND
        weights = relative_error(found["merged"], merged) / BOUND
        errors.append({"gradients": gradient, "merged": weights, **extra})
    return judge_numbers(errors)


def _neutral_scale(model: Any) -> Any:
    """Factors whose product counts once, as where alpha is the rank."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("lora_B"):
                with torch.no_grad():
                    parameter.div_(4)
    return model


def _base_trains(model: Any) -> Any:
    model.get_parameter("layers.0.attention.query.weight").requires_grad_(True)
    return model


def _merged_twice(merge: Any, model: Any) -> Any:
    """The delta is added once more."""
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
    merge(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in before:
                parameter.add_(parameter - before[name])


def _add_late(model: Any) -> None:
    fk.add_lora(model, rank=2, alpha=8.0, targets=("*.up",))


def _read_into_dora(rank: int, world: int) -> dict[str, float]:
    """New DoRA adapters change nothing of the base that is read beside them."""
    spec, ids = adapted.SPEC, torch.arange(20).view(2, 10)
    base = fk.Transformer(spec, seed=3)
    options = {"rank": 2, "alpha": 8.0, "targets": ("*.query",), "dora": True}
    model = fk.add_lora(fk.Transformer(spec, seed=5), **options)
    with shared_folder() as folder:
        fk.save_huggingface(base, folder / "base")
        named = {n: p for n, p in model.named_parameters() if "magnitude" in n}
        magnitudes = {name: parameter.detach().clone() for name, parameter in named.items()}
        fk.load_huggingface(model, folder / "base")
    USER["after_load"]((model, magnitudes))
    expected = base(ids).detach()
    error = (model(ids).detach() - expected).abs().max() / expected.abs().max()
    return {"logits": float(error) / 1e-6}


@torch.no_grad()
def _stale(loaded: Any) -> None:
    """The lengths of the rows that random weights had."""
    model, magnitudes = loaded
    assert magnitudes
    for name, magnitude in magnitudes.items():
        model.get_parameter(name).copy_(magnitude)


CHECKS = {
    "adapters": Check(measure=_find, judge=_judge),
    "dora": Check(measure=_read_into_dora, judge=judge_numbers),
}
NEUTRAL, TRAINS = value(USER, "before", _neutral_scale), value(USER, "before", _base_trains)
TWICE, LATE = function("merge_lora", _merged_twice), value(USER, "after_parallelize", _add_late)
FAULTS = [
    Fault("a scale that is forgotten", "adapters", NEUTRAL, "gradients"),
    Fault("merged twice", "adapters", TWICE, "merged"),
    Fault("a base that trains", "adapters", TRAINS, "trained parameters of the base"),
    Fault("adapters after parallelize", "adapters", LATE, "parallelize"),
    Fault("a stale magnitude", "dora", value(USER, "after_load", _stale), "logits"),
]
