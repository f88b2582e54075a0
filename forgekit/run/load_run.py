"""Load a finished run's model, tokenizer and configuration, to sample or evaluate.

Adapters are built from the facts in the checkpoint. The spec of the model, or its base, is read
from the run's ``config.json`` and compared with those facts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgekit.checkpoints.directory import storage_of
from forgekit.checkpoints.load import checkpoint_load, choose_checkpoint
from forgekit.checks import path_of
from forgekit.huggingface.new_tokens import read_base
from forgekit.huggingface.safetensors_files import read_json
from forgekit.huggingface.transformers_models import transformers_model
from forgekit.lora.adapters import add_chosen
from forgekit.model.lora import Adapter
from forgekit.model.moe_spec import MoESpec
from forgekit.model.rope_scaling import RopeScaling
from forgekit.model.routing import Router
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.ranks import CheckpointError, Ranks
from forgekit.remote.urls import Location, path_or_url
from forgekit.run.mirror import local_copy
from forgekit.state import TrainState


def load_run(
    run: str | os.PathLike[str], *, step: int | None = None
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Load the model of a run for sampling or evaluation.

    One process loads it, whole and on the CPU, whatever layout it was trained in, with its adapters
    beside the base. A model of transformers is built from the base's ``config.json``. No optimizer
    and no data are needed; the weights are those after the step, not their running average.

    Args:
        run: A run directory: what a recipe's ``out`` was, a path or a URL.
        step: Of this checkpoint; the newest if None.

    Returns:
        The model, in evaluation mode; the tokenizer beside its data or its base, with
        ``encode(text).ids`` and ``decode(ids)``, None if there is none; and the configuration.

    Raises:
        CheckpointError: If there is no checkpoint, or ``config.json`` and it are not of one model.
    """
    path = path_or_url(path_of("run", run) if isinstance(run, Path) else run)
    config = read_run_config(path)
    model, _ = read_model(path, config, step)
    if config.get("new_tokens"):
        return model, run_tokenizer(config).backend_tokenizer, config
    if (file := tokenizer_file(config)) is None:
        return model, None, config
    from tokenizers import Tokenizer

    return model, Tokenizer.from_file(str(file)), config


def read_run_config(run: Location) -> dict[str, Any]:
    """Read the ``config.json`` of a run.

    Raises:
        CheckpointError: If it is not there or no object.
    """
    with local_copy(run) as folder:
        return read_json(folder / "config.json")


def read_model(
    run: Location, config: Mapping[str, Any], step: int | None = None
) -> tuple[nn.Module, int]:
    """Build the model of a run and load its weights.

    Returns:
        The model, and the step of its checkpoint.
    """
    folder = run / "checkpoints"
    chosen = choose_checkpoint(Ranks(), storage_of(folder), step)
    if chosen is None:
        raise CheckpointError(f"{folder} has no checkpoint.")
    at, manifest = chosen
    model = _build(run, config, is_own="model.embedding.weight" in manifest["tensors"])
    _add_adapters(model, manifest)
    if isinstance(model, Transformer):
        model.to_empty(device="cpu")
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.reset_buffers()
    state = TrainState.create(model, torch.optim.SGD(model.parameters()))
    checkpoint_load(state, folder, step=at, parts=("model", "fields"), allow_other_data=True)
    return model.eval(), at


def run_tokenizer(config: Mapping[str, Any]) -> Any:
    """Return a run's own tokenizer; None if its base has it."""
    if not config.get("base"):
        return tokenizer_file(config)
    return read_base(config["base"], new)[0] if (new := config.get("new_tokens")) else None


def tokenizer_file(config: Mapping[str, Any]) -> Path | None:
    """Return the tokenizer file of a run, beside its data or in its base; None if it is gone."""
    data = config.get("data")
    given = config.get("base"), data.get("path") if isinstance(data, dict) else None
    for folder in (Path(one) for one in given if isinstance(one, str)):
        files = [folder / "tokenizer.json", *sorted(folder.glob("*/tokenizer.json"))]
        if tokenizer := next((file for file in files if file.is_file()), None):
            return tokenizer
    return None


def _build(run: Location, config: Mapping[str, Any], *, is_own: bool) -> nn.Module:
    """Build the model without weights or adapters; transformers' models fill their buffers."""
    base = config.get("base")
    if isinstance(base, str) and not is_own:
        return transformers_model(base, device="cpu", use_cache=False)
    if isinstance(config.get("model"), dict):
        spec = _read_spec(run, config["model"])
    elif isinstance(base, str):
        _, spec = read_base(base, config.get("new_tokens") or ())
    else:
        raise CheckpointError(
            f"{run / 'config.json'} has neither model (a TransformerSpec) nor base, so the run's "
            "model is unknown. Build it, and call forgekit.checkpoint_load."
        )
    with torch.device("meta"):
        return Transformer(spec)


def _read_spec(run: Location, tree: Mapping[str, Any]) -> TransformerSpec:
    parts = {"moe": MoESpec, "rope_scaling": RopeScaling}
    try:
        made = {n: make(**tree[n]) for n, make in parts.items() if tree.get(n) is not None}
        return TransformerSpec(**{**tree, **made})
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"model in {run / 'config.json'} is not a TransformerSpec: {error}"
        ) from None


def _add_adapters(model: nn.Module, manifest: Mapping[str, Any]) -> None:
    """Add the adapters that the checkpoint describes, whatever the configuration says."""
    tensors = manifest["tensors"]
    chosen: dict[str | None, list[Adapter]] = {}
    for name, each in manifest["adapters"].items():
        matrix = name.removesuffix("lora_A")[:-1]  # "." of a linear layer, "_" of a stack
        weight = tensors.get(f"model.{matrix}.weight", {})
        adapter = Adapter(
            name=matrix,
            rank=tensors[f"model.{name}"]["shape"][-2],
            dora=f"model.{matrix}.lora_magnitude_vector" in tensors,
            **each,
        )
        base = "nf4" if weight.get("dtype") == "uint8" else None
        chosen.setdefault(base, []).append(adapter)
    for base, adapters in chosen.items():
        add_chosen(model, adapters, base)  # pyright: ignore[reportArgumentType]
