"""What adapters are called, and how they lie, in the files of peft.

Linear layers have ``<name>.lora_A.weight`` ``[r in]``, ``<name>.lora_B.weight`` ``[out r]`` and,
with DoRA, ``<name>.lora_magnitude_vector`` ``[out]``. A layer of experts that transformers holds
fused has two adapters: that of ``gate_up_proj`` lies under ``<experts>.base_layer``, that of
``down_proj`` under ``<experts>``; if only one of them is adapted, it lies under ``<experts>``. Of
experts, ``A`` ``[e*r in]`` goes by expert, then rank, and ``B`` ``[out r*e]`` by rank, then expert.

The fused gate and up share one adapter. Two adapters of ranks ``r`` and ``s`` are one of rank
``r + s`` whose ``B`` is zero outside of two blocks: so it is written, and so it is read where the
blocks are there. One without blocks is read as two of the whole rank with the same ``A``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from forgekit.model.lora_layers import Adapter

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PARTS = MappingProxyType(
    {"A": ".lora_A.weight", "B": ".lora_B.weight", "m": ".lora_magnitude_vector"}
)
LEAVES = MappingProxyType(
    {
        "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj",
        "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj",
        "feed_forward.gate": "mlp.gate_proj",
        "feed_forward.up": "mlp.up_proj",
        "feed_forward.down": "mlp.down_proj",
        "feed_forward.shared.gate": "mlp.shared_experts.gate_proj",
        "feed_forward.shared.up": "mlp.shared_experts.up_proj",
        "feed_forward.shared.down": "mlp.shared_experts.down_proj",
        "feed_forward.experts": "mlp.experts",
    }
)
"""Ends of names of a ``Transformer``'s matrices, and what transformers calls them."""

Key = tuple[str, str]


def to_files(
    adapters: Mapping[str, Adapter], tensors: Mapping[Key, Tensor], *, is_known: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Turn adapters into a config and tensors under peft's names.

    Args:
        adapters: By name of the matrix.
        tensors: By matrix and part: ``"A"``, ``"B"``, ``"m"`` (magnitude).
        is_known: Whether matrices have the names of a ``Transformer``.

    Raises:
        ValueError: If only some have DoRA, or gate and up of one layer have different scales.
    """
    _check_alike(adapters)
    targets: dict[str, Adapter] = {}
    parameters: dict[str, Adapter] = {}
    files: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        own = {part: tensors[name, part] for part in PARTS if (name, part) in tensors}
        if own["A"].ndim == 2:
            targets[path := outward(name) if is_known else name] = adapter
            files |= {f"{PREFIX}{path}{PARTS[part]}": tensor for part, tensor in own.items()}
        elif not is_known:
            parameters[name] = adapter
            files |= _flat(name, own["A"], own["B"])
    for experts in _layers_of_experts(adapters, tensors) if is_known else ():
        own, flat = _fuse(experts, adapters, tensors)
        parameters |= own
        files |= flat
    return _config(targets, parameters, is_known=is_known), files


def _check_alike(adapters: Mapping[str, Adapter]) -> None:
    with_dora = [name for name, adapter in adapters.items() if adapter.dora]
    if with_dora and (without := [name for name in adapters if name not in with_dora]):
        raise ValueError(
            f"{with_dora[0]!r} has DoRA and {without[0]!r} has not; peft's files say it once for "
            "all. Add all adapters alike, or keep them with forgekit.checkpoint_save."
        )


def _config(
    targets: Mapping[str, Adapter], parameters: Mapping[str, Adapter], *, is_known: bool
) -> dict[str, Any]:
    every = {**targets, **parameters}
    is_rslora = all(adapter.rslora for adapter in every.values())
    alphas = {n: a.alpha if a.rslora == is_rslora else a.scale * a.rank for n, a in every.items()}
    rank = Counter(adapter.rank for adapter in every.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    dropouts = {adapter.dropout for adapter in every.values()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_known else None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropouts.pop() if len(dropouts) == 1 else 0.0,
        "target_modules": list(targets),
        "target_parameters": list(parameters) or None,
        "rank_pattern": {n: a.rank for n, a in every.items() if a.rank != rank},
        "alpha_pattern": {n: a for n, a in alphas.items() if a != alpha},
        "use_dora": any(adapter.dora for adapter in every.values()),
        "use_rslora": is_rslora,
        "bias": "none",
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _layers_of_experts(adapters: Mapping[str, Adapter], tensors: Mapping[Key, Tensor]) -> list[str]:
    stacks = [name for name in adapters if tensors[name, "A"].ndim == 3]
    return list(dict.fromkeys(name.rpartition(".")[0] for name in stacks))


def _fuse(
    experts: str, adapters: Mapping[str, Adapter], tensors: Mapping[Key, Tensor]
) -> tuple[dict[str, Adapter], dict[str, Tensor]]:
    """Adapters and tensors of one layer of experts as transformers and peft hold them."""
    path, down = outward(experts), f"{experts}.down"
    halves = {s: adapters[f"{experts}.{s}"] for s in ("gate", "up") if f"{experts}.{s}" in adapters}
    own: dict[str, Adapter] = {}
    files: dict[str, Tensor] = {}
    if halves:
        own[f"{path}.gate_up_proj"] = _fuse_alike(experts, list(halves.values()))
        lows = [tensors[adapter.name, "A"] for adapter in halves.values()]
        blocks = [_upright(s, tensors[a.name, "B"]) for s, a in halves.items()]
        where = f"{path}.base_layer" if down in adapters else path
        files |= _flat(where, torch.cat(lows, dim=1), torch.cat(blocks, dim=2))
    if down in adapters:
        own[f"{path}.down_proj"] = adapters[down]
        files |= _flat(path, tensors[down, "A"], tensors[down, "B"])
    return own, files


def _fuse_alike(experts: str, halves: list[Adapter]) -> Adapter:
    """One adapter for gate and up, of the sum of their ranks and the same scale."""
    first, *others = halves
    if any(not math.isclose(first.scale, other.scale, rel_tol=1e-9) for other in others):
        raise ValueError(
            f"gate and up of {experts!r} have the scales {[half.scale for half in halves]}; peft "
            "holds them fused, with one. Give both the same alpha / rank."
        )
    rank = sum(half.rank for half in halves)
    alpha = first.scale * (math.sqrt(rank) if first.rslora else rank)
    return attrs.evolve(first, rank=rank, alpha=alpha)


def _upright(stack: str, high: Tensor) -> Tensor:
    """``[e f r]`` -> ``[e 2f r]``: rows of the gate above, of up below, zeros elsewhere."""
    zeros = torch.zeros_like(high)
    return torch.cat((high, zeros) if stack == "gate" else (zeros, high), dim=1)


def _flat(path: str, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """``[e r in]`` and ``[e out r]`` -> ``[e*r in]`` and ``[out r*e]``."""
    return {
        f"{PREFIX}{path}{PARTS['A']}": low.flatten(0, 1).contiguous(),
        f"{PREFIX}{path}{PARTS['B']}": high.permute(1, 2, 0).flatten(1).contiguous(),
    }


def outward(name: str) -> str:
    """What transformers calls a matrix, or a layer of experts, of a ``Transformer``."""
    if name == "output":
        return "lm_head"
    layers, number, rest = name.split(".", 2)
    return f"model.{layers}.{number}.{LEAVES[rest]}"


def inward(path: str) -> str | None:
    """What a ``Transformer`` calls it; None if it has no such matrix."""
    if path == "lm_head":
        return "output"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
    ends = {there: here for here, there in LEAVES.items()}
    if found is None or found[2] not in ends:
        return None
    return f"layers.{found[1]}.{ends[found[2]]}"
