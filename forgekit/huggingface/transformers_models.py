"""Models of transformers, and the names of their tensors on disk.

They have the names of the model itself, but for most experts: transformers 5 holds those of a layer
in two tensors, gate and up projections side by side, and directories have three for each expert.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forgekit.checks import path_of
from forgekit.environment import require
from forgekit.huggingface.names import NameMap, Rule, join, rename, stack
from forgekit.huggingface.safetensors_files import read_json
from forgekit.ranks import CheckpointError
from forgekit.tensors import named_tensors

QWEN = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
MIXTRAL = (
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
EXPERTS = MappingProxyType(
    {"mixtral": MIXTRAL, "qwen2_moe": QWEN, "qwen3_moe": QWEN, "dots1": QWEN}
)
"""Names of an expert's gate, up and down projections, by model type."""

FUSED = ("gpt_oss",)
"""Model types that store a layer's experts as the model holds them."""

GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model has a transformers configuration, from which it can be rebuilt."""
    return hasattr(model, "base_model_prefix") and hasattr(
        getattr(model, "config", None), "model_type"
    )


def transformers_model(
    directory: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "meta",
    **settings: Any,
) -> nn.Module:
    """Build the language model of a directory; ``load_huggingface`` loads its weights.

    No code that lies in the directory runs.

    Args:
        directory: With a ``config.json`` that transformers knows.
        dtype: Of the parameters.
        device: Where; on meta for ``parallelize``. Elsewhere they have random values.
        **settings: Keys of the configuration that are to be others, such as ``use_cache=False``.

    Raises:
        CheckpointError: If there is no ``config.json``.
        ValueError: As transformers, if it cannot build the model.
    """
    path = path_of("directory", directory)
    transformers = require("transformers", extra="hf")
    read_json(path / "config.json")  # a name would be looked up on the Hub
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, **settings)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=False
        )


def transformers_config(model: Any) -> dict[str, Any]:
    """Return the configuration of a transformers model, as stored in its directory."""
    return {**model.config.to_dict(), "architectures": [_class_of(model).__name__]}


def transformers_names(model: nn.Module) -> NameMap:
    """Return the name map of a transformers model.

    Args:
        model: The model, in any layout: the whole one is built again, on meta, from its
            configuration. What was added to it since, such as adapters, has no name.

    Raises:
        CheckpointError: If it has experts and is of a kind whose names are not known here.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, **sizes)
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(config)
        >>> transformers_names(model).shapes["model.embed_tokens.weight"]
        (8, 8)
    """
    config: Any = model.config
    with torch.device("meta"):
        tensors = named_tensors(_class_of(model)(config))
    experts = EXPERTS.get(config.model_type)
    fused = [name for name in tensors if name.endswith(GATE_UP)]
    if fused and config.model_type not in (*EXPERTS, *FUSED):
        raise CheckpointError(
            f"{fused[0]!r} contains all experts of a layer; their names on disk are known for "
            f"{[*EXPERTS, *FUSED]}, not for {config.model_type!r}. Pass names=."
        )
    return NameMap([_rule(name, experts) for name in tensors], tensors)


def _class_of(model: nn.Module) -> Any:
    """Return a model's class before FSDP wrapped it."""
    return next(one for one in type(model).__mro__ if not issubclass(one, FSDPModule))


def _rule(name: str, experts: tuple[str, ...] | None) -> Rule:
    if experts is not None:
        gate, up, down = (f"{one}.weight" for one in experts)
        if name.endswith(GATE_UP):
            prefix = name.removesuffix(GATE_UP)
            return stack(join(name, [prefix + gate, prefix + up], dim=1))
        if name.endswith(DOWN):
            return stack(rename(name, name.removesuffix(DOWN) + down))
        if name.endswith(ROUTER) and experts is MIXTRAL:
            return rename(name, name.removesuffix(ROUTER) + "block_sparse_moe.gate.weight")
    return rename(name, name)
