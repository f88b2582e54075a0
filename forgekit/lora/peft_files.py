"""Adapters in peft's files: ``adapter_config.json`` and ``adapter_model.safetensors``.

How they lie in them says ``peft_layout``. An adapter is small: it is gathered, and read, whole.

References:
    https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgekit.files import atomic_directory, restore_replaced
from forgekit.inputs import is_integer, is_number, parse_json, path_of, quoted
from forgekit.lora.adapters import add_chosen, find_matrices, reshard
from forgekit.lora.peft_layout import BASE_WEIGHTS, Key, Shapes, from_peft, to_peft
from forgekit.model.initial import copy_full
from forgekit.model.lora import Adapter, adapter_names, check_unmerged, full_of, lora_layers
from forgekit.model.transformer import Transformer
from forgekit.ranks import CheckpointError, all_ranks, ranks_sharing

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
UNSUPPORTED = (
    *("modules_to_save", "trainable_token_indices", "lora_bias", "fan_in_fan_out"),
    *("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "velora_config", "monteclora_config"),
)
"""Entries of a config that change what is computed and have no counterpart here."""
INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial values of factors that leave the base as it was; others subtract from its weights."""


def save_adapter(
    model: nn.Module, directory: str | os.PathLike[str], *, base: str | None = None
) -> None:
    """Write a model's adapters in the layout of peft; every rank calls it.

    Rank 0 gathers and writes them. The directory appears whole, under its name, or not at all; one
    with an adapter in it is replaced.

    Args:
        model: A model with adapters, in any layout.
        directory: Where; on a file system of rank 0.
        base: Name of the base model, or its directory, for readers who open it.

    Raises:
        ValueError: If there is no adapter, it is merged, or other parameters are trained too.
        CheckpointError: If adapters differ in what the file says once (DoRA), or the directory
            holds other files. On every rank.
    """
    path = path_of("directory", directory)
    check_unmerged(model, "the file is for a base without them")
    ranks, parameters = all_ranks(), dict(_parameters(model))
    adapters, trained = {}, []
    for here, beside in ranks.each(lambda: (_adapters(model), _trained_beside(model))):
        adapters, trained = adapters | here, trained + beside
    if not adapters:
        raise ValueError(
            f"{type(model).__name__} has no adapter to save; forgekit.add_lora adds some."
        )
    if trained:
        raise ValueError(
            f"{len(set(trained))} trained parameters (first: {trained[0]!r}) are no part of an "
            "adapter and would be lost. Freeze them (requires_grad_(False)), or save the whole "
            "model with forgekit.checkpoint_save."
        )
    owners: dict[Key, int] = {}
    for rank, keys in enumerate(ranks.each(lambda: [*parameters])):
        owners = dict.fromkeys(keys, rank) | owners
    reshard(model)
    whole = {key: full_of(parameter.detach()).cpu() for key, parameter in parameters.items()}
    gathered = ranks.gather({key: t for key, t in whole.items() if owners[key] == ranks.rank})
    tensors = {key: tensor for part in gathered for key, tensor in part.items()}

    def write() -> None:
        from safetensors.torch import save_file

        config, files = to_peft(adapters, tensors, is_known=isinstance(model, Transformer))
        with atomic_directory(path, is_replaceable=_is_adapter) as new:
            save_file(files, new / TENSORS, metadata={"format": "pt"})
            content = {**config, "base_model_name_or_path": base}
            (new / CONFIG).write_text(json.dumps(content, indent=2) + "\n")

    ranks.first(write)


def load_adapter(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Read adapters in the layout of peft into a model, in place; every rank calls it.

    Beside an adapter of the head peft stores the weights of embedding and head; a ``Transformer``
    takes these too, as peft does.

    A model without adapters gets those of the file; like ``add_lora`` that has to come before
    ``parallelize``. One that has some keeps them and takes their values, in any layout. Everything
    is checked before the first change.

    Args:
        model: The base, or the base with adapters of the same matrices, ranks and scales.
        directory: What ``save_adapter`` or peft wrote.

    Raises:
        ValueError: If the model is merged, or sharded and without adapters.
        CheckpointError: If the adapter is not for this model: matrices that it does not have, other
            shapes, ranks, scales or DoRA; if it holds what has no counterpart here (biases,
            trained modules, weights taken out of its base); if a file is missing or damaged. On
            every rank.
    """
    path, is_known = (
        restore_replaced(path_of("directory", directory)),
        isinstance(model, Transformer),
    )
    check_unmerged(model, "loaded values would not be what is merged")
    ranks = ranks_sharing(model.parameters())
    held, shapes = {}, {}
    for adapters, matrices in ranks.each(lambda: (_adapters(model), _shapes(model))):
        held, shapes = adapters | held, matrices | shapes
    chosen, tensors = ranks.together(lambda: _read(path, shapes, held, is_known=is_known))
    if not held:
        add_chosen(model, [*chosen.values()])
    reshard(model)
    weights = {(name, "W"): p for name, p in model.named_parameters()} if is_known else {}
    with torch.no_grad():
        for key, parameter in {**dict(_parameters(model)), **weights}.items():
            if key in tensors:
                copy_full(parameter, tensors[key])


def _read(
    directory: Path, shapes: Shapes, held: Mapping[str, Adapter], *, is_known: bool
) -> tuple[dict[str, Adapter], dict[Key, Tensor]]:
    for name in (CONFIG, TENSORS):
        if not (directory / name).is_file():  # a pipe would never end
            raise CheckpointError(
                f"{directory} has no file {name}; an adapter is {CONFIG} and {TENSORS}."
            )
    try:
        config, files = _read_config(directory / CONFIG), _read_tensors(directory / TENSORS)
        adapters, tensors = from_peft(config, files, shapes, held, is_known=is_known)
        _check_held(adapters, held)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    return adapters, tensors


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{CONFIG} is no JSON: {error}.") from error
    kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
    if kind != "LORA":
        raise CheckpointError(f"{CONFIG} has the peft_type {kind!r}; adapters here are 'LORA'.")
    config = {"bias": "none", "init_lora_weights": True, "use_dora": False, "use_rslora": False,
              "lora_dropout": 0.0, "r": None, "lora_alpha": None, **config}  # fmt: skip
    for name, empty in (("target_parameters", []), ("rank_pattern", {}), ("alpha_pattern", {})):
        config[name] = config.get(name) or empty
        if not isinstance(config[name], type(empty)):
            raise CheckpointError(f"{CONFIG} has {name}={config[name]!r}; it must be a "
                                  f"{type(empty).__name__}.")  # fmt: skip
    used = {name: config[name] for name in UNSUPPORTED if config.get(name)}
    if config["bias"] != "none":
        used["bias"] = config["bias"]
    if used:
        raise CheckpointError(
            f"{CONFIG} has {', '.join(f'{n}={v!r}' for n, v in used.items())}, which has no "
            "counterpart here. Merge the adapter with peft, and start from the merged model."
        )
    if config["init_lora_weights"] not in INITS:
        raise CheckpointError(
            f"{CONFIG} has init_lora_weights={config['init_lora_weights']!r}, so it is an adapter "
            "of another base: peft changes the weights where one begins so. Convert it with peft "
            "(save_pretrained(path_initial_model_for_weight_conversion=...)), or merge it there."
        )
    for name, value in {"r": config["r"], **config["rank_pattern"]}.items():
        if not is_integer(value) or value < 1:
            raise CheckpointError(f"{CONFIG} has {name}={value!r}; it must be an integer above 0.")
    numbers = {name: config[name] for name in ("lora_alpha", "lora_dropout")}
    for name, value in {**numbers, **config["alpha_pattern"]}.items():
        if not is_number(value):
            raise CheckpointError(f"{CONFIG} has {name}={value!r}; it must be a number.")
    for pattern in (*config["rank_pattern"], *config["alpha_pattern"]):
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(
                f"{CONFIG} has a pattern {pattern!r} that is no regular expression: {error}."
            ) from None
    return config


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{TENSORS} is damaged or no safetensors file: {error}.") from error
    if odd := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"{odd[0]!r} holds values that are not finite.")
    return tensors


def _check_held(adapters: Mapping[str, Adapter], held: Mapping[str, Adapter]) -> None:
    if held and (lost := [name for name in held if name not in adapters]):
        raise CheckpointError(f"it lacks {quoted(lost[:3])}, which have adapters in the model.")
    if held and (more := [name for name in adapters if name not in held]):
        raise CheckpointError(
            f"it has adapters of {quoted(more[:3])}, which have none in the model. Add them with "
            "forgekit.add_lora before forgekit.parallelize."
        )
    for name, one in held.items():
        other = adapters[name]
        is_alike = math.isclose(one.scale, other.scale, rel_tol=1e-9)
        if not is_alike or (one.rank, one.dora) != (other.rank, other.dora):
            raise CheckpointError(
                f"it has rank {other.rank}, scale {other.scale:g} and dora={other.dora} for "
                f"{name!r}; the model has rank {one.rank}, scale {one.scale:g} and "
                f"dora={one.dora}. Add the same with forgekit.add_lora."
            )


def _adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters of the layers that this rank has."""
    return {a.name: a for layer in lora_layers(model).values() for a in layer.adapters.values()}


def _parameters(model: nn.Module) -> Iterator[tuple[Key, nn.Parameter]]:
    for layer in lora_layers(model).values():
        for matrix, adapter in layer.adapters.items():
            for part, leaf in zip("ABm", layer.factor_names(matrix), strict=True):
                if leaf is not None:
                    yield (adapter.name, part), getattr(layer, leaf)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices that adapters are for, and of embedding and head."""
    named = model.named_parameters()
    shapes = {n: tuple(p.shape) for n, p in named if n in BASE_WEIGHTS.values()}
    for name, module in find_matrices(model).items():
        if isinstance(module, nn.Linear):  # its weight may be packed
            shapes[name] = module.out_features, module.in_features
        else:
            shapes[name] = tuple(module.get_parameter(name.rpartition(".")[2]).shape)
    return shapes


def _trained_beside(model: nn.Module) -> list[str]:
    adapters = set(adapter_names(model))
    return [n for n, p in model.named_parameters() if p.requires_grad and n not in adapters]


def _is_adapter(path: Path) -> bool:
    return {entry.name for entry in path.iterdir()} <= {CONFIG, TENSORS}
