"""What adapters are called, and how they lie, in the files of peft.

A ``Transformer``'s matrices have the names that Llama-like models have in transformers; those of
other models keep their own. A linear layer has ``<name>.lora_A.weight`` ``[r in]``,
``<name>.lora_B.weight`` ``[out r]`` and, with DoRA, ``<name>.lora_magnitude_vector`` ``[out]``.

transformers holds the experts of a layer fused, so peft has one adapter for gate and up, under
``<experts>.base_layer``, and one for down, under ``<experts>``, where the only one lies too. Of
experts, ``A`` ``[e*r in]`` goes by expert, then rank, and ``B`` ``[out r*e]`` by rank, then expert.
Here gate and up have an adapter each, of ranks ``r`` and ``s``: together they are one of rank
``r + s`` whose ``B`` is zero outside of two blocks. So it is written, and so it is read where the
blocks are there; one without blocks is read as two of the whole rank with the same ``A``.

References:
    https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from forgekit.inputs import quoted
from forgekit.model.lora import Adapter
from forgekit.ranks import CheckpointError

PREFIX = "base_model.model."
ENDS = MappingProxyType(
    {"A": ".lora_A.weight", "B": ".lora_B.weight", "m": ".lora_magnitude_vector"}
)
NAMES = MappingProxyType(
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
"""Matrices of a ``Transformer`` in ``layers.N``, and of transformers in ``model.layers.N``."""
HEAD = "lm_head"
BASE_WEIGHTS = MappingProxyType(
    {"model.embed_tokens.weight": "embedding.weight", "lm_head.base_layer.weight": "output.weight"}
)
"""Weights of the base that peft stores beside an adapter of the head."""

Key = tuple[str, str]
"""A matrix, and a part of its adapter: A, B, m (magnitude); or W, the base's own weight."""
Shapes = Mapping[str, tuple[int, ...]]


def to_peft(
    adapters: Mapping[str, Adapter], tensors: Mapping[Key, Tensor], *, is_known: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Turn adapters into a config and tensors under peft's names.

    Args:
        adapters: By name of the matrix.
        tensors: Their whole parts.
        is_known: Whether matrices have the names of a ``Transformer``.

    Raises:
        CheckpointError: If only some have DoRA, or gate and up of a layer have different scales.
    """
    by_dora = {adapter.dora: name for name, adapter in adapters.items()}
    if len(by_dora) > 1:
        raise CheckpointError(
            f"{by_dora[True]!r} has DoRA and {by_dora[False]!r} has not; peft's files say it once "
            "for all. Add all adapters alike, or keep them with forgekit.checkpoint_save."
        )
    modules: dict[str, Adapter] = {}
    parameters: dict[str, Adapter] = {}
    files: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Adapter]] = {}
    for name, adapter in adapters.items():
        if tensors[name, "A"].ndim == 2:
            modules[path := _outward(name) if is_known else name] = adapter
            parts = ((end, tensors.get((name, part))) for part, end in ENDS.items())
            files |= {f"{PREFIX}{path}{end}": part for end, part in parts if part is not None}
        elif is_known:
            experts, _, stack = name.rpartition(".")
            layers.setdefault(experts, {})[stack] = adapter
        else:
            parameters[name] = adapter
            files |= _flat(name, tensors[name, "A"], tensors[name, "B"])
    for experts, stacks in layers.items():
        path, down = _outward(experts), stacks.pop("down", None)
        if stacks:
            parameters[f"{path}.gate_up_proj"] = _fused(experts, [*stacks.values()])
            low = torch.cat([tensors[a.name, "A"] for a in stacks.values()], dim=1)
            high = torch.cat([_in_half(s, tensors[a.name, "B"]) for s, a in stacks.items()], dim=2)
            files |= _flat(path if down is None else f"{path}.base_layer", low, high)
        if down is not None:
            parameters[f"{path}.down_proj"] = down
            files |= _flat(path, tensors[down.name, "A"], tensors[down.name, "B"])
    return _config(modules, parameters, is_known=is_known), files


def from_peft(
    config: Mapping[str, Any],
    files: Mapping[str, Tensor],
    shapes: Shapes,
    held: Mapping[str, Adapter],
    *,
    is_known: bool,
) -> tuple[dict[str, Adapter], dict[Key, Tensor]]:
    """Turn peft's config and tensors into adapters of a model and their parts.

    Args:
        config: Complete, as ``_read_config`` returns it.
        files: Tensors by peft's names.
        shapes: Of the model's matrices, its embedding and its head.
        held: The adapters that the model has, which decide how fused ones are split.
        is_known: As for ``to_peft``.

    Raises:
        CheckpointError: If they are of another model.
    """
    adapters: dict[str, Adapter] = {}
    tensors: dict[Key, Tensor] = {}
    paths: dict[str, dict[str, Tensor]] = {}
    for key, tensor in files.items():
        name = BASE_WEIGHTS.get(key.removeprefix(PREFIX)) if is_known else None
        part = next((part for part, end in ENDS.items() if key.endswith(end)), None)
        if name is not None:
            if name in shapes:
                _check_shapes(key, {"W": tensor}, {"W": shapes[name]})
                tensors[name, "W"] = tensor
        elif part is None or not key.startswith(PREFIX):
            raise CheckpointError(
                f"it holds {key!r}; names are {PREFIX}<matrix> with one of the ends "
                f"{quoted(ENDS.values())}. Other parts of peft have no counterpart here."
            )
        else:
            paths.setdefault(key.removeprefix(PREFIX).removesuffix(ENDS[part]), {})[part] = tensor
    for path, parts in paths.items():
        has_both = f"{path}.base_layer" in paths
        place = _place(path, config, shapes, has_both=has_both, is_known=is_known)
        for adapter, values in _read_parts(place, parts, config, held, is_known=is_known):
            adapters[adapter.name] = adapter
            tensors |= {(adapter.name, part): value for part, value in values.items()}
    return adapters, tensors


@attrs.frozen
class _Place:
    """What an adapter of a file is for.

    Attributes:
        name: The matrix here; of a fused gate and up their layer of experts.
        key: The matrix in the patterns of the config.
        shape: ``[out in]``, or ``[e out in]``.
        is_fused: Whether it is gate and up.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    is_fused: bool = False


def _place(
    path: str, config: Mapping[str, Any], shapes: Shapes, *, has_both: bool, is_known: bool
) -> _Place:
    stem = path.removesuffix(".base_layer")
    name = _inward(stem) if is_known else path
    if name is not None and f"{name}.down" in shapes:
        named = {
            leaf
            for leaf in ("gate_up_proj", "down_proj")
            for target in config["target_parameters"]
            if f".{path}.{leaf}".endswith(f".{target}")
        }
        if path != stem or has_both:
            named = {"gate_up_proj" if path != stem else "down_proj"}
        if len(named) != 1:
            raise CheckpointError(
                f"it has one adapter under {path!r}, and target_parameters "
                f"{config['target_parameters']} name {len(named)} of its matrices; so nothing says "
                "whose it is."
            )
        if named == {"down_proj"}:
            return _Place(f"{name}.down", f"{stem}.down_proj", shapes[f"{name}.down"])
        count, width, inputs = shapes[f"{name}.gate"]
        return _Place(name, f"{stem}.gate_up_proj", (count, 2 * width, inputs), is_fused=True)
    if name is None or name not in shapes:
        tied = "; of a tied model build it with tied=False" if path == HEAD else ""
        raise CheckpointError(
            f"it has an adapter of {path!r}, which this model does not have{tied}. It is an "
            "adapter for another base."
        )
    return _Place(name, path, shapes[name])


def _read_parts(
    place: _Place,
    parts: Mapping[str, Tensor],
    config: Mapping[str, Any],
    held: Mapping[str, Adapter],
    *,
    is_known: bool,
) -> Iterator[tuple[Adapter, Mapping[str, Tensor]]]:
    """Check the parts of one adapter of the file; yield the adapters here that they are."""
    rank, alpha = (_setting(config, name, place.key) for name in ("r", "lora_alpha"))
    *experts, outputs, inputs = place.shape
    count = experts[0] if experts else 1
    is_rslora, is_dora = bool(config["use_rslora"]), bool(config["use_dora"]) and not experts
    wanted = {"A": (count * rank, inputs), "B": (outputs, rank * count)}
    _check_shapes(place.key, parts, wanted | ({"m": (outputs,)} if is_dora else {}))
    is_plain = bool(experts) or (is_known and place.name == "output")  # they take no dropout
    whole = Adapter(
        name=place.name,
        rank=rank,
        alpha=float(alpha),
        dropout=0.0 if is_plain else float(config["lora_dropout"]),
        dora=is_dora,
        rslora=is_rslora,
    )
    if not experts:
        yield whole, parts
        return
    low = parts["A"].unflatten(0, (count, rank))
    high = parts["B"].unflatten(1, (rank, count)).permute(2, 0, 1)
    if not place.is_fused:
        yield whole, {"A": low, "B": high}
        return
    for stack, rows, ranks in _halves(place.name, rank, high, held):
        size = len(range(rank)[ranks])
        alpha = whole.scale * (math.sqrt(size) if is_rslora else size)
        half = attrs.evolve(whole, name=f"{place.name}.{stack}", rank=size, alpha=alpha)
        yield half, {"A": low[:, ranks], "B": high[:, rows, ranks]}


def _halves(
    experts: str, rank: int, high: Tensor, held: Mapping[str, Adapter]
) -> Iterator[tuple[str, slice, slice]]:
    """Rows and ranks of gate and up in their fused ``B``: two blocks, or all ranks for each."""
    above, below = high.chunk(2, dim=1)
    adapters = [held.get(f"{experts}.{stack}") for stack in ("gate", "up")]
    choices = [tuple(0 if adapter is None else adapter.rank for adapter in adapters)]
    if not any(adapters):
        halves = sorted(range(rank + 1), key=lambda gate: abs(2 * gate - rank))
        choices = [*((gate, rank - gate) for gate in halves), (rank, rank)]
    for gate, up in choices:
        has_blocks = not above[..., gate:].any() and not below[..., :gate].any()
        if gate == up == rank or (gate + up == rank and has_blocks):
            width = above.shape[1]
            if gate:
                yield "gate", slice(width), slice(gate)
            if up:
                yield "up", slice(width, None), slice(rank - up, rank)
            return
    raise CheckpointError(
        f"it has one adapter of rank {rank} for gate and up of {experts!r}, and the model two of "
        f"ranks {choices[0]}. Load it into a model without adapters."
    )


def _fused(experts: str, halves: list[Adapter]) -> Adapter:
    """One adapter for gate and up, of the sum of their ranks and the same scale."""
    first, rank = halves[0], sum(half.rank for half in halves)
    if any(not math.isclose(first.scale, half.scale, rel_tol=1e-9) for half in halves):
        raise CheckpointError(
            f"gate and up of {experts!r} have the scales {[half.scale for half in halves]}; peft "
            "holds them fused, with one. Give both the same alpha / rank."
        )
    alpha = first.scale * (math.sqrt(rank) if first.rslora else rank)
    return attrs.evolve(first, rank=rank, alpha=alpha)


def _in_half(stack: str, high: Tensor) -> Tensor:
    """``[e f r]`` -> ``[e 2f r]``: rows of the gate above, of up below, zeros elsewhere."""
    zeros = torch.zeros_like(high)
    return torch.cat((high, zeros) if stack == "gate" else (zeros, high), dim=1)


def _flat(path: str, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """``[e r in]`` and ``[e out r]`` -> ``[e*r in]`` and ``[out r*e]``."""
    return {
        f"{PREFIX}{path}{ENDS['A']}": low.flatten(0, 1).contiguous(),
        f"{PREFIX}{path}{ENDS['B']}": high.permute(1, 2, 0).flatten(1).contiguous(),
    }


def _config(
    modules: Mapping[str, Adapter], parameters: Mapping[str, Adapter], *, is_known: bool
) -> dict[str, Any]:
    every = {**modules, **parameters}
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
        "target_modules": list(modules),
        "target_parameters": list(parameters) or None,
        "rank_pattern": {n: a.rank for n, a in every.items() if a.rank != rank},
        "alpha_pattern": {n: a for n, a in alphas.items() if a != alpha},
        "use_dora": any(adapter.dora for adapter in every.values()),
        "use_rslora": is_rslora,
        "bias": "none",
        "inference_mode": True,
    }


def _setting(config: Mapping[str, Any], name: str, key: str) -> Any:
    """A matrix's rank or alpha; a pattern is a regular expression for the end of its name."""
    # Never ``r`` alone: of a model with experts peft gives gate and up twice the rank, by pattern.
    patterns = config["rank_pattern" if name == "r" else "alpha_pattern"]
    matching = (v for p, v in patterns.items() if re.match(rf"(.*\.)?({p})$", key))
    return next(matching, config[name])


def _check_shapes(key: str, parts: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> None:
    shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}
    if shapes != wanted:
        raise CheckpointError(
            f"it has {shapes} for {key!r}; this model and the config's ranks need {dict(wanted)}. "
            "It is an adapter for another base, or was changed."
        )


def _outward(name: str) -> str:
    """What transformers calls a matrix, or a layer of experts, of a ``Transformer``."""
    if name == "output":
        return HEAD
    layers, number, rest = name.split(".", 2)
    return f"model.{layers}.{number}.{NAMES[rest]}"


def _inward(path: str) -> str | None:
    """What a ``Transformer`` calls it; None if it has no such matrix."""
    if path == HEAD:
        return "output"
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
    names = {outward: inward for inward, outward in NAMES.items()}
    if match is None or match[2] not in names:
        return None
    return f"layers.{match[1]}.{names[match[2]]}"
