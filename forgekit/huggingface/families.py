"""The model families that a ``Transformer`` is: their ``config.json``, and their names on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from forgekit.huggingface.names import Rule, cast, leave_out, pad, rename, stack
from forgekit.huggingface.rope import NUMBERS, read_rope, write_rope
from forgekit.inputs import brief, is_integer, is_number
from forgekit.model.moe_spec import MoESpec
from forgekit.model.transformer import TransformerSpec
from forgekit.ranks import CheckpointError

Config = Mapping[str, Any]

LOCAL_EXPERTS = "num_local_experts"
"""How transformers writes the number of experts since its version 5."""

FULL, SLIDING = "full_attention", "sliding_attention"

TRAINING_ONLY = frozenset(
    {"capacity", "aux_loss", "sequence_aux_loss", "z_loss", "bias_rate", "centered"}
)
"""Fields of a ``MoESpec`` that no config.json says anything about."""


@attrs.frozen
class Family:
    """One architecture of transformers.

    Attributes:
        name: Its ``model_type``.
        architecture: Its class for language models.
        has_qk_norm: Whether queries and keys are normalised per head.
        defaults: What its configuration class says of keys that are left out.
        theta: Base of the rotary wavelengths if none is given.
        read_moe: Reads its experts; None for a dense family.
        write_moe: Writes them.
        feed_forward: What its feed-forward is called in a block.
        experts: What gate, up and down of an expert are called.
    """

    name: str
    architecture: str
    has_qk_norm: bool = False
    defaults: Mapping[str, Any] = attrs.field(factory=dict)
    theta: float = 10_000.0
    read_moe: Callable[[Config], MoESpec | None] | None = None
    write_moe: Callable[[TransformerSpec, MoESpec], dict[str, Any]] | None = None
    feed_forward: str = "mlp"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def read(self, config: Config, max_seq_len: int | None = None) -> TransformerSpec:
        """Read the sizes of a model.

        Args:
            config: Its ``config.json``.
            max_seq_len: Longest sequence, if it is not to be the model's own.

        Raises:
            CheckpointError: If it has what a ``Transformer`` has not, or a size is missing.
        """
        config = {**self.defaults, **config}
        length = max_seq_len or _integer(config, "max_position_embeddings")
        _check_supported(config)
        _check_window(config, length)
        theta, scaling = read_rope(config, self.theta)
        dim, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        head_dim = config.get("head_dim")
        try:
            return TransformerSpec(
                vocab_size=_integer(config, "vocab_size"),
                dim=dim,
                layers=_integer(config, "num_hidden_layers"),
                heads=heads,
                kv_heads=heads
                if config.get("num_key_value_heads") is None
                else _integer(config, "num_key_value_heads"),
                ffn_dim=_integer(config, "intermediate_size"),
                max_seq_len=length,
                qk_norm=self.has_qk_norm,
                tied=_flag(config, "tie_word_embeddings"),
                rope_theta=theta,
                norm_eps=config.get("rms_norm_eps", 1e-6),
                moe=None if self.read_moe is None else self.read_moe(config),
                head_dim=None if head_dim is None or head_dim * heads == dim else head_dim,
                rope_scaling=scaling,
            )
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"config.json of a {self.name} model: {error}") from None

    def write(self, spec: TransformerSpec) -> dict[str, Any]:
        """Write the keys that a spec decides; ``read`` gives the spec back, if the family has it.

        Raises:
            ValueError: If it has not; says what differs.
        """
        moe = spec.moe
        config = {"architectures": [self.architecture], "model_type": self.name, **_sizes(spec)}
        config |= {key: value for key, value in _absent(spec).items() if key in self.defaults}
        if moe is not None and self.write_moe is not None:
            config |= self.write_moe(spec, moe)
        try:
            different = differences(self.read(config), spec)
        except CheckpointError as error:
            different = [str(error)]
        if moe is not None and moe.capacity is not None:
            different.append(f"moe.capacity is {moe.capacity}, and none drops tokens")
        if different:
            raise ValueError(
                f"{self.architecture} is no model of this spec: {'; '.join(different)}."
            )
        return config


def _sizes(spec: TransformerSpec) -> dict[str, Any]:
    """What every family writes alike."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.channels,
        "intermediate_size": spec.ffn_dim,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        **write_rope(spec.rope_theta, spec.rope_scaling),
    }


def _absent(spec: TransformerSpec) -> dict[str, Any]:
    """What some families may have, and a ``Transformer`` has not."""
    return {
        "mlp_bias": False,
        "use_sliding_window": False,
        "layer_types": [FULL] * spec.layers,
        "max_window_layers": spec.layers,
    }


def differences(there: TransformerSpec, here: TransformerSpec) -> list[str]:
    """What two specs compute differently, in words; not their context, dropout or router terms."""
    pairs = {
        name: (getattr(there, name), getattr(here, name))
        for name in (
            *("vocab_size", "dim", "layers", "heads", "kv_heads", "channels"),
            *("qk_norm", "tied", "rope_theta", "norm_eps"),
            *(("ffn_dim",) if len(here.routed) < here.layers else ()),
        )
    }
    pairs["rope_scaling"] = _plain_rope(there), _plain_rope(here)
    ones, others = _plain_moe(there), _plain_moe(here)
    pairs |= {f"moe.{name}": (ones[name], others[name]) for name in ones.keys() & others.keys()}
    if bool(ones) != bool(others):
        pairs["moe"] = there.moe, here.moe
    return [f"{n} {brief(a)} there and {brief(b)} here" for n, (a, b) in pairs.items() if a != b]


def _plain_rope(spec: TransformerSpec) -> Any:
    """What a kind of scaling goes by, and no more."""
    if (scaling := spec.rope_scaling) is None:
        return None
    names = NUMBERS[scaling.kind]
    if scaling.kind != "linear":
        names = (*names, "original_max_seq_len")
    plain = {name: getattr(scaling, name) for name in names if name != "attention_factor"}
    return {"kind": scaling.kind, **plain, "magnitude": scaling.magnitude}


def _plain_moe(spec: TransformerSpec) -> dict[str, Any]:
    """What routers and experts compute; the width of dense blocks that a model has none of not."""
    moe = spec.moe
    if moe is None:
        return {}
    plain = {k: v for k, v in attrs.asdict(moe).items() if k not in TRAINING_ONLY}
    routed = sorted(spec.routed)
    return plain | {"selection_bias": moe.has_bias, "first": routed[0], "every": routed}


def family_of(config: Config) -> Family:
    """Return the family of a ``config.json``.

    Raises:
        CheckpointError: If it is not known; lists those that are.
    """
    kind, names = config.get("model_type"), [family.name for family in FAMILIES]
    if kind in names:
        return FAMILIES[names.index(kind)]
    raise CheckpointError(
        f"config.json: model_type is {brief(kind)} (architectures "
        f"{brief(config.get('architectures'))}), which is not known here; known are "
        f"{', '.join(names)}. A model of your own is read with names=."
    )


def family_named(name: str) -> Family | None:
    """Return a family by its ``model_type`` or its class, however it is written."""
    plain = name.lower().replace("-", "_").removesuffix("forcausallm")
    for family in FAMILIES:
        if plain in (family.name, family.architecture.lower().removesuffix("forcausallm")):
            return family
    return None


def rules(family: Family, spec: TransformerSpec, rows: int) -> Iterator[Rule]:
    """How the tensors of a ``Transformer`` are found in a family's directories.

    Args:
        family: The family.
        spec: Of the model, its vocabulary padded perhaps.
        rows: Tokens on disk.
    """
    block, own = "model.layers.*", "layers.*"
    yield pad(rename("embedding.weight", "model.embed_tokens.weight"), rows)
    yield rename("norm.weight", "model.norm.weight")
    if not spec.tied:
        yield pad(rename("output.weight", "lm_head.weight"), rows)
    yield rename(f"{own}.attention_norm.weight", f"{block}.input_layernorm.weight")
    yield rename(f"{own}.feed_forward_norm.weight", f"{block}.post_attention_layernorm.weight")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
        name = f"{own}.attention.{ours}"
        yield rename(f"{name}.weight", f"{block}.self_attn.{theirs}_proj.weight")
        if spec.qk_norm and ours in ("query", "key"):
            yield rename(f"{name}_norm.weight", f"{block}.self_attn.{theirs}_norm.weight")
    theirs = f"{block}.{family.feed_forward}"
    if len(spec.routed) < spec.layers:
        yield from _feed_forward(f"{own}.feed_forward", f"{block}.mlp")
    if spec.moe is not None:
        yield from _experts(family, spec.moe, f"{own}.feed_forward", theirs)


def _feed_forward(ours: str, theirs: str) -> Iterator[Rule]:
    for name in ("gate", "up", "down"):
        yield rename(f"{ours}.{name}.weight", f"{theirs}.{name}_proj.weight")


def _experts(family: Family, moe: MoESpec, ours: str, theirs: str) -> Iterator[Rule]:
    yield rename(f"{ours}.router.weight", f"{theirs}.gate.weight")
    yield leave_out(f"{ours}.router.load")
    if moe.has_bias:
        bias = rename(f"{ours}.router.selection_bias", f"{theirs}.gate.e_score_correction_bias")
        yield cast(bias, torch.float32)
    for name, one in zip(("gate", "up", "down"), family.experts, strict=True):
        yield stack(rename(f"{ours}.experts.{name}", f"{theirs}.experts.{{}}.{one}.weight"))
    if moe.shared:
        yield from _feed_forward(f"{ours}.shared", f"{theirs}.shared_experts")


def _integer(config: Config, key: str) -> int:
    value = config.get(key)
    if value is None:
        raise CheckpointError(f"config.json has no {key}; it has {brief(sorted(config))}.")
    if not is_integer(value):
        raise CheckpointError(f"config.json: {key} is {brief(value)}; it must be an integer.")
    return value


def _flag(config: Config, key: str, *, default: bool = False) -> bool:
    value = config.get(key)
    if not (value is None or isinstance(value, bool)):
        raise CheckpointError(f"config.json: {key} is {brief(value)}; it must be true or false.")
    return default if value is None else value


def _check_supported(config: Config) -> None:
    """Refuse what a ``Transformer`` does not have, by key and value."""
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "attention_dropout": (0.0, None),
        "router_jitter_noise": (0.0, None),
        "partial_rotary_factor": (1.0, None),
        "quantization_config": (None,),
        "kv_lora_rank": (None,),
        "q_lora_rank": (None,),
        "moe_layer_freq": (1, None),
    }
    for key, values in supported.items():
        if key in config and config[key] not in values:
            raise CheckpointError(
                f"config.json: {key} is {brief(config[key])}, and a Transformer has only "
                f"{values[0]!r}."
            )


def _check_window(config: Config, length: int) -> None:
    """Refuse attention that does not see the whole context."""
    types, window = config.get("layer_types") or (), config.get("sliding_window")
    if odd := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise CheckpointError(
            f"config.json: layer_types has {brief(odd[0])}, and a Transformer has only {FULL!r}."
        )
    if not (window is None or is_number(window)):
        raise CheckpointError(
            f"config.json: sliding_window is {brief(window)}; it must be a number or null."
        )
    slides = _flag(config, "use_sliding_window", default=True)
    if "max_window_layers" in config:  # where it is not, the window is that of every layer
        last = config["max_window_layers"] < _integer(config, "num_hidden_layers")
        slides = slides and (SLIDING in types if types else last)
    if slides and window is not None and window < length:
        raise CheckpointError(
            f"config.json: sliding_window is {window} and the context {length}, and a "
            "Transformer's attention sees all of it. Shorten the context: "
            f"huggingface_spec(directory, max_seq_len={window})."
        )


def _read_qwen_moe(config: Config) -> MoESpec | None:
    layers, step = _integer(config, "num_hidden_layers"), config.get("decoder_sparse_step", 1)
    if not is_integer(step) or step < 1:
        raise CheckpointError(
            f"config.json: decoder_sparse_step is {brief(step)}; it must be at least 1."
        )
    dense = config.get("mlp_only_layers") or []
    routed = [n for n in range(layers) if n not in dense and (n + 1) % step == 0]
    first = routed[0] if routed else 0
    every = routed[1] - first if len(routed) > 1 else layers
    key = "num_experts" if config.get("num_experts") else LOCAL_EXPERTS
    if not routed or routed != [*range(first, layers, every)]:
        raise CheckpointError(
            f"config.json: mlp_only_layers {dense} with decoder_sparse_step {step} give the blocks "
            f"{routed} experts; they must follow each other in equal steps up to the last."
        )
    return MoESpec(
        experts=_integer(config, key),
        top_k=_integer(config, "num_experts_per_tok"),
        ffn_dim=_integer(config, "moe_intermediate_size"),
        shared=0,
        first=first,
        every=every,
        renormalize=_flag(config, "norm_topk_prob"),
    )


def _write_qwen_moe(spec: TransformerSpec, moe: MoESpec) -> dict[str, Any]:
    return {
        "num_experts": moe.experts,
        LOCAL_EXPERTS: moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_dim,
        "norm_topk_prob": moe.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n in range(spec.layers) if n not in spec.routed],
    }


def _read_mixtral(config: Config) -> MoESpec:
    return MoESpec(
        experts=_integer(config, LOCAL_EXPERTS),
        top_k=_integer(config, "num_experts_per_tok"),
        ffn_dim=_integer(config, "intermediate_size"),
        shared=0,
    )


def _write_mixtral(_spec: TransformerSpec, moe: MoESpec) -> dict[str, Any]:
    return {
        LOCAL_EXPERTS: moe.experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.ffn_dim,
    }


def _read_dots(config: Config) -> MoESpec:
    groups = config.get("n_group") or 1
    key = "n_routed_experts" if config.get("n_routed_experts") else LOCAL_EXPERTS
    return MoESpec(
        experts=_integer(config, key),
        top_k=_integer(config, "num_experts_per_tok"),
        ffn_dim=_integer(config, "moe_intermediate_size"),
        shared=config.get("n_shared_experts") or 0,
        first=config.get("first_k_dense_replace") or 0,
        router="sigmoid",
        renormalize=_flag(config, "norm_topk_prob"),
        scale=config.get("routed_scaling_factor", 1.0),
        groups=None if groups == 1 else groups,
        top_groups=None if groups == 1 else config.get("topk_group") or 1,
        selection_bias=True,
    )


def _write_dots(_spec: TransformerSpec, moe: MoESpec) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.experts,
        LOCAL_EXPERTS: moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_dim,
        "n_shared_experts": moe.shared,
        "first_k_dense_replace": moe.first,
        "norm_topk_prob": moe.renormalize,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups or 1,
        "topk_group": moe.top_groups or 1,
    }


WINDOW = MappingProxyType({"use_sliding_window": False, "sliding_window": 4096})
SOME_LAYERS = MappingProxyType({"layer_types": None, "max_window_layers": 28})

FAMILIES = (
    Family("llama", "LlamaForCausalLM", defaults={"mlp_bias": False}),
    Family(
        "mistral",
        "MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        has_qk_norm=True,
        defaults={"num_key_value_heads": 32, "head_dim": 128, **WINDOW, **SOME_LAYERS},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
        theta=1e6,
        read_moe=_read_mixtral,
        write_moe=_write_mixtral,
        feed_forward="block_sparse_moe",
        experts=("w1", "w3", "w2"),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        has_qk_norm=True,
        defaults={"num_key_value_heads": 4, **WINDOW},
        read_moe=_read_qwen_moe,
        write_moe=_write_qwen_moe,
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        has_qk_norm=True,
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            **SOME_LAYERS,
            "max_window_layers": 62,
        },
        read_moe=_read_dots,
        write_moe=_write_dots,
    ),
)
"""The families; a spec is written as the first of them that computes the same."""
