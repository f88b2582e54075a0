"""Model families that ``Transformer`` implements: their ``config.json`` and names on disk.

A family is a row of ``FAMILIES``. A dense one needs its row, with the defaults of its configuration
class in transformers; a row of ``tests/huggingface_models.py``, so that the tests compare it
with transformers; and its name in ``docs/huggingface.md``. What it writes is read back and
compared. A trait that no model has yet is a field of ``TransformerSpec`` whose default changes no
checkpoint, in ``model/transformer.py`` (with plan, roles and initial values) and ``layers.py``; a
field of ``Family``, here in ``read``, ``_computed`` and ``rules``; and ``_NOT_FACTS`` in
``checkpoints/state_dict.py`` if its tensors show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch

from forgekit.checks import brief
from forgekit.huggingface.names import Rule, cast, leave_out, pad, rename, stack
from forgekit.huggingface.rope import read_rope, write_rope
from forgekit.lora.peft_files import ATTENTION
from forgekit.model.moe_spec import MoESpec
from forgekit.model.transformer import TransformerSpec
from forgekit.ranks import CheckpointError, explain

Config = Mapping[str, Any]

LOCAL_EXPERTS = "num_local_experts"
"""Key of the number of experts in transformers 5."""

KINDS = FULL, SLIDING = "full_attention", "sliding_attention"

TRAINING_ONLY = frozenset(
    {"capacity", "aux_loss", "sequence_aux_loss", "z_loss", "bias_rate", "centered"}
)
"""Fields of a ``MoESpec`` that no config.json has."""

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
"""Keys whose defaults differ by family."""

SUPPORTED = MappingProxyType(
    {
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
)
"""Supported values of keys; with others a model computes something else."""

BLOCK = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        **ATTENTION,
    }
)
"""Weights of a block, here and on disk."""
QK_NORM = MappingProxyType(
    {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
)


@attrs.frozen
class Family:
    """One architecture of transformers.

    Attributes:
        name: Its ``model_type``.
        architecture: Its class for language models.
        has_qk_norm: Whether queries and keys are normalised per head.
        has_qkv_bias: Whether queries, keys and values have a bias; no key says so.
        defaults: What its configuration class says of keys that are left out.
        theta: Base of the rotary wavelengths if none is given.
        experts: Keys of the fields of a ``MoESpec``; none for a dense family.
        router: Fields that all of its models have alike.
        feed_forward: What its feed-forward is called in a block.
        projections: What gate, up and down of an expert are called.
    """

    name: str
    architecture: str
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    defaults: Config = MappingProxyType({})
    theta: float = 10_000.0
    experts: Mapping[str, str] = MappingProxyType({})
    router: Mapping[str, Any] = MappingProxyType({})
    feed_forward: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def read(self, config: Config, max_seq_len: int | None = None) -> TransformerSpec:
        """Read a spec from a configuration.

        Args:
            config: Its ``config.json``.
            max_seq_len: Longest sequence, if it is not to be the model's own.

        Raises:
            CheckpointError: If it has what a ``Transformer`` has not.
            KeyError: If a size is missing.
            ValueError: If sizes do not fit together.
        """
        config = {**self.defaults, **config}
        if self.has_qkv_bias:  # its class has no such key: the bias is always there
            config.pop("attention_bias", None)
        length = max_seq_len or config["max_position_embeddings"]
        _check_supported(config, length)
        theta, scaling = read_rope(config, self.theta)
        dim, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
        return TransformerSpec(
            vocab_size=config["vocab_size"],
            unpadded_vocab_size=config["vocab_size"],
            dim=dim,
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            ffn_dim=config["intermediate_size"],
            max_seq_len=length,
            qk_norm=self.has_qk_norm,
            qkv_bias=self.has_qkv_bias,
            tied=_flag(config, "tie_word_embeddings"),
            rope_theta=theta,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            moe=self._read_moe(config) if self.experts else None,
            head_dim=None if head_dim is None or head_dim * heads == dim else head_dim,
            rope_scaling=scaling,
        )

    def write(self, spec: TransformerSpec) -> dict[str, Any]:
        """Return the configuration keys of a spec; ``read`` inverts it for specs of the family.

        Raises:
            ValueError: If it has not; says what differs.
        """
        config = {"architectures": [self.architecture], "model_type": self.name, **_sizes(spec)}
        # Features of families that Transformer lacks.
        absent = {
            "mlp_bias": False,
            "use_sliding_window": False,
            "layer_types": [FULL] * spec.layers,
            "max_window_layers": spec.layers,
        }
        config |= {key: value for key, value in absent.items() if key in self.defaults}
        if self.has_qkv_bias:
            del config["attention_bias"]
        if spec.moe is not None and self.experts:
            config |= self._write_moe(spec, spec.moe)
        try:
            different = compare_specs(self.read(config), spec)
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            different = [explain(error)]
        if spec.moe is not None and spec.moe.capacity is not None:
            different.append(f"moe.capacity is {spec.moe.capacity}, and it drops no tokens")
        if different:
            raise ValueError(
                f"{self.architecture} cannot express this spec: {'; '.join(different)}."
            )
        return config

    def _read_moe(self, config: Config) -> MoESpec:
        count = self.experts["experts"]
        config = {**config, count: config.get(count) or config[LOCAL_EXPERTS]}
        # Absent or null keys have the family's defaults, not those of MoESpec.
        fields = {
            field: self.defaults.get(key) if config[key] is None else config[key]
            for field, key in self.experts.items()
        }
        if "renormalize" in fields:
            fields["renormalize"] = _flag(config, self.experts["renormalize"])
        if fields.get("groups") == 1:
            fields |= {"groups": None, "top_groups": None}
        return MoESpec(**{"shared": 0, **_routed_blocks(config), **self.router, **fields})

    def _write_moe(self, spec: TransformerSpec, moe: MoESpec) -> dict[str, Any]:
        fields = {key: getattr(moe, field) for field, key in self.experts.items()}
        fields = {key: 1 if value is None else value for key, value in fields.items()}  # groups
        if "decoder_sparse_step" in self.defaults:
            fields["mlp_only_layers"] = [n for n in range(spec.layers) if n not in spec.routed]
            fields["decoder_sparse_step"] = 1
        return {**fields, LOCAL_EXPERTS: moe.experts}


def _sizes(spec: TransformerSpec) -> dict[str, Any]:
    """Return the keys that all families share."""
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


def compare_specs(stored: TransformerSpec, built: TransformerSpec) -> list[str]:
    """Describe the first few differences in what two specs compute.

    Not their context, dropout or router terms.

    Args:
        stored: Of a directory, "there".
        built: Of a model, "here".
    """
    there, here = _computed(stored), _computed(built)
    different = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return [
        f"{name} {brief(there.get(name))} there and {brief(here.get(name))} here"
        for name in different[:3]
    ]


def _computed(spec: TransformerSpec) -> dict[str, Any]:
    """Return the settings of a spec that change what is computed, by name."""
    names = ("tokens", "dim", "layers", "heads", "kv_heads", "channels", "qk_norm", "tied")
    values = {name: getattr(spec, name) for name in (*names, "norm_eps", "qkv_bias")}
    values = {"vocab_size": values.pop("tokens"), **values}
    values |= write_rope(spec.rope_theta, spec.rope_scaling)["rope_parameters"]
    if spec.rope_scaling is not None:
        values["attention_factor"] = spec.rope_scaling.magnitude
    if len(spec.routed) < spec.layers:
        values["ffn_dim"] = spec.ffn_dim
    if (moe := spec.moe) is not None:
        fields = attrs.asdict(moe) | {"selection_bias": moe.has_bias, "every": [*spec.routed]}
        values |= {f"moe.{n}": v for n, v in fields.items() if n not in {*TRAINING_ONLY, "first"}}
    return values


def family_of(config: Config) -> Family:
    """Return the family of a ``config.json``.

    Raises:
        CheckpointError: If there is none; lists those that there are.
    """
    if (family := family_named(str(config.get("model_type")))) is not None:
        return family
    raise CheckpointError(
        f"config.json: model_type {brief(config.get('model_type'))} is not one of "
        f"{', '.join(family.name for family in FAMILIES)}. For a model of your own pass names=."
    )


def family_named(name: str) -> Family | None:
    """Return a family by its ``model_type`` or its class."""
    return next((one for one in FAMILIES if name in (one.name, one.architecture)), None)


def rules(family: Family, spec: TransformerSpec, rows: int) -> Iterator[Rule]:
    """Build the rules that map a ``Transformer``'s tensors to a family's directories.

    Args:
        family: The family.
        spec: Of the model, its vocabulary padded perhaps.
        rows: Tokens on disk.
    """
    block, layer = "model.layers.*", "layers.*"
    tokens = spec.tokens
    yield pad(rename("embedding.weight", "model.embed_tokens.weight"), rows, tokens=tokens)
    yield rename("norm.weight", "model.norm.weight")
    if not spec.tied:
        yield pad(rename("output.weight", "lm_head.weight"), rows, tokens=tokens)
    for name, key in {**BLOCK, **(QK_NORM if spec.qk_norm else {})}.items():
        yield rename(f"{layer}.{name}.weight", f"{block}.{key}.weight")
    for name in ("query", "key", "value") if spec.qkv_bias else ():
        yield rename(f"{layer}.attention.{name}.bias", f"{block}.self_attn.{name[0]}_proj.bias")
    if len(spec.routed) < spec.layers:
        yield from _feed_forward(f"{layer}.feed_forward", f"{block}.mlp")
    if (moe := spec.moe) is None:
        return
    name, key = f"{layer}.feed_forward", f"{block}.{family.feed_forward}"
    yield rename(f"{name}.router.weight", f"{key}.gate.weight")
    yield leave_out(f"{name}.router.load")
    if moe.has_bias:
        bias = rename(f"{name}.router.selection_bias", f"{key}.gate.e_score_correction_bias")
        yield cast(bias, torch.float32)
    for stacked, projection in zip(("gate", "up", "down"), family.projections, strict=True):
        one = f"{key}.experts.{{}}.{projection}.weight"
        yield stack(rename(f"{name}.experts.{stacked}", one))
    if moe.shared:
        yield from _feed_forward(f"{name}.shared", f"{key}.shared_experts")


def _feed_forward(name: str, key: str) -> Iterator[Rule]:
    for matrix in ("gate", "up", "down"):
        yield rename(f"{name}.{matrix}.weight", f"{key}.{matrix}_proj.weight")


def _sized(*sizes: int | None, **others: Any) -> Config:
    """Build the defaults of a configuration class, for ``SIZES`` and other keys."""
    return MappingProxyType({**dict(zip(SIZES, sizes, strict=True)), **others})


def _flag(config: Config, key: str) -> bool:
    if not isinstance(value := config.get(key), bool | None):  # "false" would be true
        raise CheckpointError(f"config.json: {key} is {brief(value)}; it must be true or false.")
    return bool(value)


def _check_supported(config: Config, length: int) -> None:
    """Raise for features that ``Transformer`` lacks, by key and value."""
    types = config.get("layer_types") or ()
    more = [(key, has[0]) for key, has in SUPPORTED.items() if config.get(key, has[0]) not in has]
    for key, only in [*more, *(("layer_types", FULL) for kind in types if kind not in KINDS)]:
        raise CheckpointError(
            f"config.json: {key} is {brief(config[key])}; a Transformer supports only {only!r}."
        )
    # Where a family has no switch, as Mistral, a window is on; where it has none of the layers'
    # numbers, as Qwen3-MoE, it is that of every layer. Else layer_types count, and without them
    # the layers from max_window_layers on have it.
    slides = "use_sliding_window" not in config or _flag(config, "use_sliding_window")
    if "max_window_layers" in config:
        is_left = config["max_window_layers"] < config["num_hidden_layers"]
        slides = slides and (SLIDING in types if types else is_left)
    window = config.get("sliding_window")
    if slides and window is not None and window < length:
        raise CheckpointError(
            f"sliding_window is {window}, the context {length}; a Transformer attends to the whole "
            f"context. Shorten it: huggingface_spec(directory, max_seq_len={window})."
        )


def _routed_blocks(config: Config) -> dict[str, int]:
    """Return the first block with experts and their interval, if the configuration has them."""
    if "decoder_sparse_step" not in config:
        return {}
    layers, step = config["num_hidden_layers"], config["decoder_sparse_step"]
    dense = config.get("mlp_only_layers") or []
    routed = [n for n in range(layers) if n not in dense and (n + 1) % step == 0]
    every = routed[1] - routed[0] if len(routed) > 1 else layers
    if not routed or routed != [*range(routed[0], layers, every)]:
        raise CheckpointError(
            f"mlp_only_layers {dense} with decoder_sparse_step {step} give the blocks {routed} "
            "experts; they must follow each other in equal steps up to the last."
        )
    return {"first": routed[0], "every": every}


ROUTED = MappingProxyType(
    {
        "top_k": "num_experts_per_tok",
        "ffn_dim": "moe_intermediate_size",
        "renormalize": "norm_topk_prob",
    }
)
WINDOW = MappingProxyType({"use_sliding_window": False, "sliding_window": 4096})
SOME_LAYERS = MappingProxyType({"layer_types": None, "max_window_layers": 28})

QWEN = (151_936, 4096, 22_016, 32, 32, 32, 32_768)

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        defaults=_sized(32_000, 4096, 11_008, 32, 32, None, 2048, mlp_bias=False),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        defaults=_sized(32_000, 4096, 14_336, 32, 32, 8, 131_072, sliding_window=4096),
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        has_qkv_bias=True,
        defaults=_sized(*QWEN, **WINDOW, **SOME_LAYERS),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        has_qk_norm=True,
        defaults=_sized(*QWEN, head_dim=128, **WINDOW, **SOME_LAYERS),
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        defaults=_sized(
            *(32_000, 4096, 14_336, 32, 32, 8, 131_072),
            rms_norm_eps=1e-5,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        theta=1e6,
        experts={
            "experts": LOCAL_EXPERTS,
            "top_k": "num_experts_per_tok",
            "ffn_dim": "intermediate_size",
        },
        feed_forward="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        has_qk_norm=True,
        defaults=_sized(
            *(151_936, 2048, 6144, 24, 32, 4, 32_768),
            decoder_sparse_step=1,
            num_local_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=False,
            **WINDOW,
        ),
        experts={"experts": "num_experts", **ROUTED},
    ),
    Family(
        "dots1",
        "Dots1ForCausalLM",
        has_qk_norm=True,
        defaults=_sized(
            *(152_064, 4608, 10_944, 62, 32, 32, 2048),
            sliding_window=4096,
            layer_types=None,
            max_window_layers=62,
            moe_intermediate_size=1408,
            n_shared_experts=0,
            first_k_dense_replace=0,
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
        ),
        experts={
            "experts": "n_routed_experts",
            **ROUTED,
            "shared": "n_shared_experts",
            "first": "first_k_dense_replace",
            "scale": "routed_scaling_factor",
            "groups": "n_group",
            "top_groups": "topk_group",
        },
        router={"router": "sigmoid", "selection_bias": True},
    ),
)
"""The families; a spec is written as the first that computes the same."""
