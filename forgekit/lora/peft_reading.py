"""Reading adapters in the layout of peft: everything is checked before a value is read.

Ranks and scales come from the config's patterns, never from ``r`` alone: peft rewrites a config
that names gate, up and down of a model with experts, and gives their fused adapter twice the rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
from torch import Tensor

from forgekit.inputs import is_integer, is_number, parse_json, quoted
from forgekit.lora.peft_names import CONFIG, LEAVES, PARTS, PREFIX, TENSORS, inward, outward
from forgekit.model.lora_layers import Adapter

REFUSED = MappingProxyType(
    {
        "modules_to_save": "modules trained whole",
        "trainable_token_indices": "trained tokens",
        "lora_bias": "biases of factors",
        "fan_in_fan_out": "transposed weights",
        "layer_replication": "layers that are there twice",
        "use_qalora": "QALoRA",
        "use_bdlora": "BD-LoRA",
        "alora_invocation_tokens": "activated LoRA",
        "arrow_config": "Arrow",
        "kasa_config": "KaSA",
        "velora_config": "VeLoRA",
        "monteclora_config": "MonteCLoRA",
    }
)
"""Entries of a config that have no counterpart here, where they are set."""

INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initial values of factors that leave the base as it was; others subtract from its weights."""

STEMS = MappingProxyType(
    {
        "model.embed_tokens.weight": "embedding.weight",
        "lm_head.base_layer.weight": "output.weight",
    }
)
"""Weights of the base that peft stores beside an adapter of the head."""

Tensors = dict[tuple[str, str], Callable[[], Tensor]]
Shapes = Mapping[str, tuple[int, ...]]


def read_files(
    directory: Path, shapes: Shapes, held: Mapping[str, Adapter], *, is_known: bool
) -> tuple[list[Adapter], Tensors]:
    """Read what a directory holds and check it against a model; tensors are read when called.

    Args:
        directory: With a config and tensors.
        shapes: Of the model's matrices.
        held: The adapters that the model has; of one without any, none.
        is_known: See ``to_files``.

    Returns:
        The adapters of the file, and by matrix and part what reads a tensor of this model.
    """
    config = _read_config(directory / CONFIG)
    files = _open(directory / TENSORS)
    stems = _take_stems(directory, files, shapes) if is_known else {}
    stored = _by_path(files, directory / TENSORS)
    reader = _Reader(
        directory=directory,
        config=config,
        stored=stored,
        shapes=shapes,
        held=held,
        is_known=is_known,
    )
    found: dict[str, Adapter] = {}
    tensors: Tensors = dict(stems)
    for path in stored:
        for adapter, own in reader.read(path):
            found[adapter.name] = adapter
            tensors |= {(adapter.name, part): load for part, load in own.items()}
    _check_held(directory, found, held)
    return list(found.values()), tensors


@attrs.frozen
class _Stored:
    """One tensor of a file."""

    shape: tuple[int, ...]
    load: Callable[[], Tensor]


@attrs.frozen(kw_only=True)
class _Reader:
    """What a file's names, shapes and config are checked against; see ``read_files``."""

    directory: Path
    config: Mapping[str, Any]
    stored: Mapping[str, Mapping[str, _Stored]]
    shapes: Shapes
    held: Mapping[str, Adapter]
    is_known: bool

    def read(self, path: str) -> list[tuple[Adapter, dict[str, Callable[[], Tensor]]]]:
        """The adapters of this model that lie under one name of the file."""
        experts = inward(path.removesuffix(".base_layer")) if self.is_known else None
        if experts is not None and experts.endswith(".experts"):
            return self._read_experts(path, experts)
        name = inward(path) if self.is_known else path
        if name is None or name not in self.shapes:
            raise ValueError(self._unknown(path, name))
        if len(self.shapes[name]) == 3:
            return [self._read_stack(path, path, name)]
        rank, scale = self._rank(path), self._scale(path)
        outputs, inputs = self.shapes[name]
        wanted = {"A": (rank, inputs), "B": (outputs, rank)}
        wanted |= {"m": (outputs,)} if self.config["use_dora"] else {}
        self._check(path, wanted)
        loads = {part: stored.load for part, stored in self.stored[path].items()}
        return [(self._adapter(name, rank, scale), loads)]

    def _read_experts(
        self, path: str, experts: str
    ) -> list[tuple[Adapter, dict[str, Callable[[], Tensor]]]]:
        if f"{experts}.gate" not in self.shapes:
            raise ValueError(self._unknown(path, experts))
        stem = path.removesuffix(".base_layer")
        if self._fused(path, stem) == "down_proj":
            return [self._read_stack(path, f"{stem}.down_proj", f"{experts}.down")]
        key = f"{stem}.gate_up_proj"
        count, width, inputs = self.shapes[f"{experts}.gate"]
        rank, scale = self._rank(key), self._scale(key)
        self._check(path, {"A": (count * rank, inputs), "B": (2 * width, rank * count)})
        own = self.stored[path]
        low = partial(_unfold_low, own["A"].load, count)
        high = partial(_unfold_high, own["B"].load, count)
        gate, up = self._split(experts, rank, high())
        shared = gate + up > rank  # both have the whole A
        pieces = {
            "gate": (gate, slice(0, gate), slice(0, width)),
            "up": (up, slice(0, rank) if shared else slice(gate, rank), slice(width, None)),
        }
        return [
            (
                self._adapter(f"{experts}.{stack}", size, scale),
                {"A": partial(_part, low, 1, kept), "B": partial(_block, high, rows, kept)},
            )
            for stack, (size, kept, rows) in pieces.items()
            if size
        ]

    def _read_stack(
        self, path: str, key: str, name: str
    ) -> tuple[Adapter, dict[str, Callable[[], Tensor]]]:
        count, outputs, inputs = self.shapes[name]
        rank, own = self._rank(key), self.stored[path]
        self._check(path, {"A": (count * rank, inputs), "B": (outputs, rank * count)})
        loads = {
            "A": partial(_unfold_low, own["A"].load, count),
            "B": partial(_unfold_high, own["B"].load, count),
        }
        return self._adapter(name, rank, self._scale(key)), loads

    def _fused(self, path: str, stem: str) -> str:
        """Which of the two fused matrices an adapter of experts is for."""
        if path != stem:
            return "gate_up_proj"
        if f"{stem}.base_layer" in self.stored:
            return "down_proj"
        targets = self.config["target_parameters"] or []
        names = [f"{stem}.{leaf}" for leaf in ("gate_up_proj", "down_proj")]
        named = [n for n in names if any(n == t or n.endswith(f".{t}") for t in targets)]
        if len(named) != 1:
            raise ValueError(
                f"{self.directory} has one adapter under {path!r}, and target_parameters "
                f"{targets} name {len(named)} of its matrices; so nothing says whose it is."
            )
        return named[0].rpartition(".")[2]

    def _split(self, experts: str, rank: int, high: Tensor) -> tuple[int, int]:
        """Ranks of gate and up in their fused adapter."""
        held = [self.held.get(f"{experts}.{stack}") for stack in ("gate", "up")]
        choices = [tuple(0 if one is None else one.rank for one in held)]
        if not any(held):
            halves = sorted(range(rank + 1), key=lambda gate: abs(2 * gate - rank))
            choices = [*((gate, rank - gate) for gate in halves), (rank, rank)]
        for gate, up in choices:
            if gate == up == rank or (gate + up == rank and _has_blocks(high, gate)):
                return gate, up
        raise ValueError(
            f"{self.directory} has one adapter of rank {rank} for gate and up of {experts!r}, and "
            f"the model two of ranks {choices[0]}. Load it into a model without adapters."
        )

    def _adapter(self, name: str, rank: int, scale: float) -> Adapter:
        is_rslora, is_dora = bool(self.config["use_rslora"]), bool(self.config["use_dora"])
        is_plain = len(self.shapes[name]) == 3 or (self.is_known and name == "output")
        return Adapter(
            name=name,
            rank=rank,
            alpha=scale * (math.sqrt(rank) if is_rslora else rank),
            dropout=0.0 if is_plain else float(self.config["lora_dropout"]),
            dora=is_dora and len(self.shapes[name]) == 2,
            rslora=is_rslora,
        )

    def _rank(self, key: str) -> int:
        return int(_of_pattern(self.config["rank_pattern"], key, self.config["r"]))

    def _scale(self, key: str) -> float:
        alpha = float(_of_pattern(self.config["alpha_pattern"], key, self.config["lora_alpha"]))
        rank = self._rank(key)
        return alpha / (math.sqrt(rank) if self.config["use_rslora"] else rank)

    def _check(self, path: str, wanted: Mapping[str, tuple[int, ...]]) -> None:
        found = {part: stored.shape for part, stored in self.stored[path].items()}
        if found != dict(wanted):
            names = {PARTS[part][1:]: shape for part, shape in found.items()}
            raise ValueError(
                f"{self.directory} has {names} for {path!r}; this model and the config's ranks "
                f"need {[*wanted.values()]}. It is an adapter for another base, or was changed."
            )

    def _unknown(self, path: str, name: str | None) -> str:
        if name == "output" and self.is_known:
            return (
                f"{self.directory} has an adapter of {path!r}, and the model's output projection "
                "is its embedding (TransformerSpec(tied=True)). Build the model with tied=False "
                "and load the embedding into both."
            )
        own = [_shown(name) if self.is_known else name for name in [*self.shapes][:4]]
        return (
            f"{self.directory} has an adapter of {path!r}, which this model does not have; its "
            f"matrices are {quoted(own)}, ... It is an adapter for another base."
        )


def _take_stems(directory: Path, files: dict[str, _Stored], shapes: Shapes) -> Tensors:
    """Take what peft stores of embedding and head out of a file's tensors, in place."""
    taken: Tensors = {}
    for key, name in STEMS.items():
        stored = files.pop(f"{PREFIX}{key}", None)
        if stored is not None and name in shapes:
            if stored.shape != shapes[name]:
                raise ValueError(
                    f"{directory} has {key!r} of shape {stored.shape}; the model's {name!r} is "
                    f"{shapes[name]}. It is an adapter for another base."
                )
            taken[name, "W"] = stored.load
    return taken


def _shown(name: str) -> str:
    """A matrix's name in files; of a stack of experts that of the layer."""
    rest = name.split(".", 2)[-1]
    return outward(name if name == "output" or rest in LEAVES else name.rpartition(".")[0])


def _by_path(stored: Mapping[str, _Stored], where: Path) -> dict[str, dict[str, _Stored]]:
    """Tensors of a file by name of the matrix, then by part."""
    found: dict[str, dict[str, _Stored]] = {}
    for key, tensor in stored.items():
        part = next((part for part, end in PARTS.items() if key.endswith(end)), None)
        if part is None or not key.startswith(PREFIX):
            raise ValueError(
                f"{where} holds {key!r}; names are {PREFIX}<matrix> with one of the ends "
                f"{quoted(PARTS.values())}. Other parts of peft have no counterpart here."
            )
        path = key.removeprefix(PREFIX).removesuffix(PARTS[part])
        found.setdefault(path, {})[part] = tensor
    return found


def _read_config(path: Path) -> dict[str, Any]:
    _check_file(path)
    try:
        read = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}.") from error
    if not isinstance(read, dict) or read.get("peft_type") != "LORA":
        kind = read.get("peft_type") if isinstance(read, dict) else type(read).__name__
        raise ValueError(f"{path} has the peft_type {kind!r}; adapters here are 'LORA'.")
    for entry, what in REFUSED.items():
        if read.get(entry):
            raise ValueError(
                f"{path} has {entry}={read[entry]!r} ({what}), which has no counterpart here. "
                "Merge the adapter with peft, and start from the merged model."
            )
    if read.get("bias", "none") != "none":
        raise ValueError(f"{path} has bias={read['bias']!r}; adapters here train no bias.")
    if (init := read.get("init_lora_weights", True)) not in INITS:
        raise ValueError(
            f"{path} has init_lora_weights={init!r}, so it is an adapter of another base: peft "
            "changes the weights where one begins so. Convert it with peft (save_pretrained("
            "path_initial_model_for_weight_conversion=...)), or merge it there."
        )
    default = {"use_dora": False, "use_rslora": False, "lora_dropout": 0.0, "r": None}
    config = {**default, "lora_alpha": None, **read}
    config["target_parameters"] = read.get("target_parameters") or []
    if not isinstance(config["target_parameters"], list):
        raise ValueError(f"{path} has target_parameters={read['target_parameters']!r}; it must be "
                         "a list of names.")  # fmt: skip
    for name in ("rank_pattern", "alpha_pattern"):
        config[name] = _read_pattern(path, name, read.get(name) or {})
    for name, value in {"r": config["r"], **config["rank_pattern"]}.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{path} has {name}={value!r}; it must be an integer of at least 1.")
    numbers = {name: config[name] for name in ("lora_alpha", "lora_dropout")}
    for name, value in {**numbers, **config["alpha_pattern"]}.items():
        if not is_number(value):
            raise ValueError(f"{path} has {name}={value!r}; it must be a finite number.")
    return config


def _read_pattern(path: Path, name: str, pattern: Any) -> dict[str, Any]:
    if not isinstance(pattern, dict):
        raise ValueError(f"{path} has {name}={pattern!r}; it must be an object.")
    for key in pattern:
        try:
            re.compile(key)
        except re.error as error:
            raise ValueError(
                f"{path}: {name} has {key!r}; {key!r} is no regular expression: {error}."
            ) from None
    return pattern


def _open(path: Path) -> dict[str, _Stored]:
    """Names, shapes and values of a file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    _check_file(path)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}.") from error
    if odd := [key for key, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise ValueError(f"{path}: {odd[0]!r} holds values that are not finite.")
    return {key: _Stored(tuple(t.shape), partial(_same, t)) for key, t in tensors.items()}


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _check_file(path: Path) -> None:
    if not path.is_file():  # a pipe would never end
        raise FileNotFoundError(f"{path} is no file; an adapter is {CONFIG} and {TENSORS}.")


def _check_held(directory: Path, found: Mapping[str, Adapter], held: Mapping[str, Adapter]) -> None:
    if not held:
        return
    if missing := [name for name in held if name not in found]:
        raise ValueError(f"{directory} lacks {_some(missing)}, which have adapters in the model.")
    if more := [name for name in found if name not in held]:
        raise ValueError(
            f"{directory} has adapters of {_some(more)}, which have none in the model. Add them "
            "with forgekit.add_lora before forgekit.parallelize."
        )
    for name, adapter in found.items():
        own = held[name]
        is_alike = math.isclose(adapter.scale, own.scale, rel_tol=1e-9)
        if not is_alike or (adapter.rank, adapter.dora) != (own.rank, own.dora):
            raise ValueError(
                f"{directory} has rank {adapter.rank}, scale {adapter.scale:g} and "
                f"dora={adapter.dora} for {name!r}; the model has rank {own.rank}, scale "
                f"{own.scale:g} and dora={own.dora}. Add the same with forgekit.add_lora."
            )


def _some(names: list[str]) -> str:
    return quoted(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _unfold_low(load: Callable[[], Tensor], experts: int) -> Tensor:
    return load().unflatten(0, (experts, -1))


def _unfold_high(load: Callable[[], Tensor], experts: int) -> Tensor:
    return load().unflatten(1, (-1, experts)).permute(2, 0, 1)


def _part(load: Callable[[], Tensor], dim: int, kept: slice) -> Tensor:
    return load()[(slice(None),) * dim + (kept,)]


def _block(load: Callable[[], Tensor], rows: slice, columns: slice) -> Tensor:
    return load()[:, rows, columns]


def _has_blocks(high: Tensor, gate: int) -> bool:
    """Whether the gate's rows of ``[e 2f r]`` use the first ``gate`` columns, and up's the rest."""
    above, below = high.chunk(2, dim=1)
    return not above[..., gate:].any() and not below[..., :gate].any()


def _of_pattern(pattern: Mapping[str, Any], key: str, default: Any) -> Any:
    """A matrix's own value; patterns are regular expressions for the end of its name."""
    matches = (p for p in pattern if re.match(rf"(.*\.)?({p})$", key))
    return pattern.get(next(matches, ""), default)
