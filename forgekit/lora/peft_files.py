"""Adapters in peft's files: ``adapter_config.json`` and ``adapter_model.safetensors``.

A ``Transformer``'s matrices have the names that Llama-like models have in transformers; those of
other models keep their own. A linear layer has ``<name>.lora_A.weight`` ``[r in]``,
``<name>.lora_B.weight`` ``[out r]`` and, with DoRA, ``<name>.lora_magnitude_vector`` ``[out]``.

Adapters of experts have no place in these files: transformers holds gate and up fused, so peft has
one adapter for both, where each has its own here.

An adapter is small: it is gathered, and read, whole.

References:
    https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mode
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from forgekit.checks import differences, parse_json, path_of, quoted
from forgekit.files import atomic_directory, read_regular, restore_replaced
from forgekit.lora.adapters import add_chosen, find_matrices, reshard
from forgekit.model.initial import copy_full
from forgekit.model.lora import Adapter, adapter_names, check_unmerged, lora_layers
from forgekit.model.transformer import Transformer
from forgekit.ranks import CheckpointError, all_ranks, ranks_sharing
from forgekit.tensors import full

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = MappingProxyType(
    {"A": ".lora_A.weight", "B": ".lora_B.weight", "m": ".lora_magnitude_vector"}
)
PROJECTIONS = ("query", "key", "value", "output")
ATTENTION = MappingProxyType({f"attention.{n}": f"self_attn.{n[0]}_proj" for n in PROJECTIONS})
SWIGLU = MappingProxyType({"feed_forward": "mlp", "feed_forward.shared": "mlp.shared_experts"})
NAMES = MappingProxyType(
    {**ATTENTION}
    | {f"{a}.{n}": f"{b}.{n}_proj" for a, b in SWIGLU.items() for n in ("gate", "up", "down")}
)
"""Names of matrices in ``layers.N`` here, and in transformers' ``model.layers.N``."""
HEAD = "lm_head"
EXPERTS = "is an adapter of experts, which this library does not exchange with peft. "
BASE_WEIGHTS = MappingProxyType(
    {"model.embed_tokens.weight": "embedding.weight", "lm_head.base_layer.weight": "output.weight"}
)
"""Weights of the base that peft stores beside an adapter of the head."""
UNSUPPORTED = (
    *("modules_to_save", "trainable_token_indices", "lora_bias", "fan_in_fan_out"),
    *("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "velora_config", "monteclora_config"),
)
SUPPORTED = MappingProxyType(
    {
        "peft_type": ("LORA",),
        "bias": ("none", None),
        # Other initial factors are subtracted from the base's weights.
        "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
        **dict.fromkeys(UNSUPPORTED, (None, False, [], {})),
    }
)
"""Supported values of config entries; others change what is computed."""

Key = tuple[str, str]
"""A matrix, and a part of its adapter: A, B, m (magnitude); or W, the base's own weight."""
Shapes = Mapping[str, tuple[int, ...]]


def save_adapter(
    model: nn.Module, directory: str | os.PathLike[str], *, base: str | None = None
) -> None:
    """Save a model's adapters in peft's layout; every rank calls it.

    Rank 0 gathers and writes them. The directory appears whole, under its name, or not at all; one
    with an adapter in it is replaced.

    Args:
        model: A model with adapters, in any layout.
        directory: Where; on a file system of rank 0.
        base: Name of the base model, or its directory, for readers who open it.

    Raises:
        ValueError: If it is merged, or other parameters are trained too.
        CheckpointError: If experts have adapters, if adapters differ in what the file says once
            (DoRA), or if the directory holds other files. On every rank.
    """
    path = path_of("directory", directory)
    check_unmerged(model, "the file is for a base without them")
    ranks, parameters, names = all_ranks(), _parameters(model), set(adapter_names(model))
    if stacks := adapters_of_experts(model):
        raise CheckpointError(
            f"{stacks[0]!r} {EXPERTS}Merge it with forgekit.merge_lora and export the model with "
            "forgekit.save_huggingface, or keep it with forgekit.checkpoint_save."
        )
    beside = [n for n, p in model.named_parameters() if p.requires_grad and n not in names]
    held = ranks.each(lambda: (_adapters(model), beside, [*parameters]))
    adapters = {name: adapter for one, *_ in held for name, adapter in one.items()}
    if trained := list(dict.fromkeys(name for _, others, _ in held for name in others)):
        raise ValueError(
            f"{len(trained)} trained parameters (first: {trained[0]!r}) do not belong to an "
            "adapter and would be lost. Freeze them, or use forgekit.checkpoint_save."
        )
    reshard(model)
    # Collectives in the model's order, the same on all ranks that share a factor.
    whole = {key: full(parameter.detach()).cpu() for key, parameter in parameters.items()}
    # The first rank that holds a factor sends it, so rank 0 receives it once.
    sent = {key for *_, keys in held[: ranks.rank] for key in keys}
    gathered = ranks.gather({key: tensor for key, tensor in whole.items() if key not in sent})
    tensors = {key: tensor for part in gathered for key, tensor in part.items()}

    def write() -> None:
        from safetensors.torch import save_file

        is_transformer = isinstance(model, Transformer)
        config, files = to_peft(adapters, tensors, is_transformer=is_transformer)
        config["base_model_name_or_path"] = base
        with atomic_directory(path, is_replaceable=_is_adapter) as new:
            save_file(files, new / TENSORS, metadata={"format": "pt"})
            (new / CONFIG).write_text(json.dumps(config, indent=2) + "\n")

    ranks.first(write)


def adapters_of_experts(model: nn.Module) -> list[str]:
    """Return the stacks of experts with an adapter on any rank; every rank calls it."""
    stacks = [name for (name, part), p in _parameters(model).items() if part == "A" and p.ndim == 3]
    return [name for names in all_ranks().each(lambda: stacks) for name in names]


def load_adapter(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Load adapters in peft's layout into a model, in place; every rank calls it.

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
    path = restore_replaced(path_of("directory", directory))
    check_unmerged(model, "loaded values would not be what is merged")
    ranks, is_transformer = ranks_sharing(model.parameters()), isinstance(model, Transformer)
    held, shapes = {}, {}
    for adapters, matrices in ranks.each(lambda: (_adapters(model), _shapes(model))):
        held, shapes = adapters | held, matrices | shapes

    def read() -> tuple[dict[str, Adapter], dict[Key, Tensor]]:
        config, files = _read_config(path / CONFIG), _read_tensors(path / TENSORS)
        adapters, tensors = from_peft(config, files, shapes, is_transformer=is_transformer)
        if held and (different := differences(_describe(held), _describe(adapters))):
            raise CheckpointError(
                f"{different}. Add the same adapters with forgekit.add_lora, before "
                "forgekit.parallelize."
            )
        return adapters, tensors

    try:
        chosen, tensors = ranks.together(read)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not held:
        add_chosen(model, [*chosen.values()])
    reshard(model)
    weights = {(name, "W"): p for name, p in model.named_parameters()} if is_transformer else {}
    with torch.no_grad():
        for key, parameter in {**_parameters(model), **weights}.items():
            if key in tensors:
                copy_full(parameter, tensors[key])


def to_peft(
    adapters: Mapping[str, Adapter], tensors: Mapping[Key, Tensor], *, is_transformer: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert adapters to a config and tensors under peft's names.

    Args:
        adapters: By name of the matrix.
        tensors: Their whole parts.
        is_transformer: Whether the matrices are those of a ``Transformer``.

    Raises:
        CheckpointError: If only some have DoRA.
    """
    by_dora = {adapter.dora: name for name, adapter in adapters.items()}
    if len(by_dora) > 1:
        raise CheckpointError(
            f"{by_dora[True]!r} has DoRA, but {by_dora[False]!r} does not; peft's files have one "
            "setting for all. Use forgekit.checkpoint_save."
        )
    keys = _keys(adapters, is_transformer=is_transformer)
    files = {
        PREFIX + keys[name] + end: tensors[name, part].contiguous()
        for name in adapters
        for part, end in ENDS.items()
        if (name, part) in tensors
    }
    by_key = {keys[name]: adapter for name, adapter in adapters.items()}
    return _config(by_key, is_transformer=is_transformer), files


def from_peft(
    config: Mapping[str, Any],
    files: Mapping[str, Tensor],
    shapes: Shapes,
    *,
    is_transformer: bool,
) -> tuple[dict[str, Adapter], dict[Key, Tensor]]:
    """Convert peft's config and tensors to adapters of a model and their parts.

    Args:
        config: The config.
        files: Tensors by peft's names.
        shapes: Of the model's matrices, its embedding and its head.
        is_transformer: As for ``to_peft``.

    Raises:
        CheckpointError: If they are of another model, or of experts.
    """
    names = {key: name for name, key in _keys(shapes, is_transformer=is_transformer).items()}
    adapters: dict[str, Adapter] = {}
    tensors: dict[Key, Tensor] = {}
    paths: dict[str, dict[str, Tensor]] = {}
    for key, tensor in files.items():
        path = key.removeprefix(PREFIX)
        part = next((part for part, end in ENDS.items() if key.endswith(end)), None)
        if is_transformer and path in BASE_WEIGHTS:
            if (name := BASE_WEIGHTS[path]) in shapes:
                _check_shapes(key, {"W": tensor}, {"W": shapes[name]})
                tensors[name, "W"] = tensor
        elif part is None or path == key:
            raise CheckpointError(
                f"it has {key!r}, not {PREFIX}<matrix> with one of {quoted(ENDS.values())}."
            )
        else:
            paths.setdefault(path.removesuffix(ENDS[part]), {})[part] = tensor
    for path, parts in paths.items():
        key = _known(path, names, shapes)
        outputs, inputs = shapes[names[key]]
        is_head = is_transformer and key == HEAD
        adapter = Adapter(
            name=names[key],
            rank=_setting(config, "rank_pattern", "r", key),
            alpha=float(_setting(config, "alpha_pattern", "lora_alpha", key)),
            # The head has no dropout.
            dropout=0.0 if is_head else float(config.get("lora_dropout") or 0.0),
            dora=bool(config.get("use_dora")),
            rslora=bool(config.get("use_rslora")),
        )
        expected = {"A": (adapter.rank, inputs), "B": (outputs, adapter.rank)}
        _check_shapes(key, parts, expected | ({"m": (outputs,)} if adapter.dora else {}))
        adapters[adapter.name] = adapter
        tensors |= {(adapter.name, part): value for part, value in parts.items()}
    return adapters, tensors


def _keys(names: Iterable[str], *, is_transformer: bool) -> dict[str, str]:
    """Return peft's keys of matrices by name, for those that transformers has."""
    if not is_transformer:
        return {name: name for name in names}
    blocks = {name: name.split(".", 2) for name in names if name.count(".") > 1}
    keys = {n: f"model.layers.{b[1]}.{NAMES[b[2]]}" for n, b in blocks.items() if b[2] in NAMES}
    return keys | ({"output": HEAD} if "output" in names else {})


def _known(path: str, names: Mapping[str, str], shapes: Shapes) -> str:
    """Return a path of the file if it belongs to a matrix of the model."""
    stem = path.removesuffix(".base_layer")
    if stem.endswith(".experts") or len(shapes.get(names.get(stem, ""), ())) == 3:
        raise CheckpointError(
            f"{path!r} {EXPERTS}Merge it with peft, and start from the merged model."
        )
    if path not in names:
        tied = "; build a tied model with tied=False" if path == HEAD else ""
        raise CheckpointError(
            f"it has an adapter for {path!r}, which this model does not have{tied}."
        )
    return path


def _config(adapters: Mapping[str, Adapter], *, is_transformer: bool) -> dict[str, Any]:
    is_rslora = all(adapter.rslora for adapter in adapters.values())
    ranks = {name: adapter.rank for name, adapter in adapters.items()}
    alphas = {
        name: adapter.alpha if adapter.rslora == is_rslora else adapter.scale * adapter.rank
        for name, adapter in adapters.items()
    }
    dropouts = {adapter.dropout for adapter in adapters.values()}
    rank, alpha = mode(ranks.values()), mode(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_transformer else None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropouts.pop() if len(dropouts) == 1 else 0.0,
        "target_modules": [*adapters],
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "use_dora": any(adapter.dora for adapter in adapters.values()),
        "use_rslora": is_rslora,
        "bias": "none",
        "inference_mode": True,
    }


def _setting(config: Mapping[str, Any], patterns: str, default: str, key: str) -> Any:
    """Return a matrix's rank or alpha; patterns are regular expressions for the end of names."""
    given = config.get(patterns) or {}
    matching = (value for p, value in given.items() if re.match(rf"(.*\.)?({p})$", key))
    return next(matching, config[default])


def _check_shapes(key: str, parts: Mapping[str, Tensor], expected: Mapping[str, Any]) -> None:
    shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}
    if shapes != expected:
        raise CheckpointError(
            f"it has {shapes} for {key!r}; this model and the config's ranks need {dict(expected)}."
        )


def _describe(adapters: Mapping[str, Adapter]) -> dict[str, str]:
    return {
        name: f"rank {adapter.rank}, scale {adapter.scale:.9g} and dora={adapter.dora}"
        for name, adapter in adapters.items()
    }


def _read_config(path: Path) -> dict[str, Any]:
    config = parse_json(read_regular(path))
    used = {n: config.get(n) for n, values in SUPPORTED.items() if config.get(n) not in values}
    if used:
        raise CheckpointError(
            f"{CONFIG} has {', '.join(f'{n}={v!r}' for n, v in used.items())}, which has no "
            "counterpart here. Merge the adapter with peft, and start from the merged model."
        )
    return config


def _read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load

    tensors = load(read_regular(path))
    if broken := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"{broken[0]!r} contains values that are not finite.")
    return tensors


def _adapters(model: nn.Module) -> dict[str, Adapter]:
    """Return this rank's adapters."""
    return {a.name: a for layer in lora_layers(model).values() for a in layer.adapters.values()}


def _parameters(model: nn.Module) -> dict[Key, nn.Parameter]:
    return {
        (adapter.name, part): getattr(layer, leaf)
        for layer in lora_layers(model).values()
        for matrix, adapter in layer.adapters.items()
        for part, leaf in zip("ABm", layer.factor_names(matrix), strict=True)
        if leaf is not None
    }


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return shapes of the matrices with adapters, and of embedding and head."""
    named = model.named_parameters()
    shapes = {n: tuple(p.shape) for n, p in named if n in BASE_WEIGHTS.values()}
    for name, layer in find_matrices(model).items():
        if isinstance(layer, nn.Linear):  # its weight may be packed
            shapes[name] = layer.out_features, layer.in_features
        else:
            shapes[name] = tuple(layer.get_parameter(name.rpartition(".")[2]).shape)
    return shapes


def _is_adapter(path: Path) -> bool:
    return {entry.name for entry in path.iterdir()} <= {CONFIG, TENSORS}
