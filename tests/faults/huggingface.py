"""Exports that were changed on their way: they open with other logits, or do not open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from faults.folders import by_rank_0, shared_folder
from faults.planting import Plant, value
from faults.table import Check, Fault, judge_numbers, saying
from lab import SPEC, lay_out
from safetensors.torch import load_file, save_file

import forgekit as fk

BOUND = 1e-6
"""Of logits in float32; those of one process, of the very weights that were saved."""
USER: dict[str, Any] = {"happens": lambda directory: None}


@saying
def _open(rank: int, world: int) -> dict[str, float]:
    """Save a model, open it in another layout, and compare logits."""
    ids = torch.arange(12).view(2, 6) * 3 % SPEC.vocab_size
    model = _moved(fk.Transformer(SPEC, seed=3))
    expected = model(ids).detach()
    with shared_folder() as folder:
        directory = folder / "export"
        fk.save_huggingface(model, directory)
        by_rank_0(USER["happens"], directory)
        opened = lay_out(fk.Transformer(fk.huggingface_spec(directory), seed=5)).model
        fk.load_huggingface(opened, directory)
    error = (opened(ids).detach() - expected).abs().max() / expected.abs().max()
    return {"logits": float(error) / BOUND}


@torch.no_grad()
def _moved(model: Any) -> Any:
    """No norm is 1 and no two layers are alike."""
    for number, parameter in enumerate(model.parameters()):
        parameter.mul_(3 + number % 5)
    return model


def _to_weights(change: Callable[[dict[str, Any]], None]) -> Plant:
    def happens(directory: Path) -> None:
        (path,) = directory.glob("*.safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    return value(USER, "happens", happens)


def _to_config(change: Callable[[dict[str, Any]], Any]) -> Plant:
    def happens(directory: Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))

    return value(USER, "happens", happens)


def _set(**changes: Any) -> Plant:
    return _to_config(lambda config: config.update(changes))


def _swap(first: str, second: str) -> Plant:
    def change(tensors: dict[str, Any]) -> None:
        pairs = [(name, name.replace(first, second)) for name in tensors if first in name]
        assert pairs
        for one, other in pairs:
            tensors[one], tensors[other] = tensors[other], tensors[one]

    return _to_weights(change)


def _reverse_heads(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        tensors[name] = tensors[name].flip(0).contiguous()


def _other_theta(config: dict[str, Any]) -> None:
    for place in (config, config.get("rope_parameters") or {}):
        if "rope_theta" in place:
            place["rope_theta"] = 77.0


def _without(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if "1.mlp.up" in name]:
        del tensors[name]


def _shorter(tensors: dict[str, Any]) -> None:
    tensors |= {n: t[:-1].clone() for n, t in tensors.items() if "1.mlp.up" in n}


CHECKS = {"export": Check(measure=_open, judge=judge_numbers)}
EXPORT, UP = "export", r"layers\.1\.(mlp\.up_proj|feed_forward\.up)"
NORMS = _swap("input_layernorm", "post_attention_layernorm")
REVERSED, OTHER_THETA = _to_weights(_reverse_heads), _to_config(_other_theta)
FAULTS = [
    Fault("layers swapped", EXPORT, _swap(".layers.0.", ".layers.1."), "logits"),
    Fault("gate and up swapped", EXPORT, _swap("gate_proj", "up_proj"), "logits"),
    Fault("norms swapped", EXPORT, NORMS, "logits"),
    Fault("rows of queries in another order", EXPORT, REVERSED, "logits"),
    Fault("another rope_theta", EXPORT, OTHER_THETA, "logits"),
    Fault("another epsilon of norms", EXPORT, _set(rms_norm_eps=0.1), "logits"),
    Fault("tied by the configuration alone", EXPORT, _set(tie_word_embeddings=True), "lm_head|tie"),
    Fault("a tensor that is gone", EXPORT, _to_weights(_without), UP),
    Fault("a tensor of another shape", EXPORT, _to_weights(_shorter), UP),
    Fault("one head more", EXPORT, _set(num_attention_heads=8), "head|shape"),
]
