"""Names of parameters on disk in the Hugging Face layout, and the ones that they have here."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["from_huggingface"]

NAMES = (
    (r"model\.embed_tokens\.weight", "embedding.weight"),
    (r"model\.norm\.weight", "norm.weight"),
    (r"lm_head\.weight", "output.weight"),
    (r"model\.layers\.(\d+)\.input_layernorm\.weight", r"layers.\1.attention_norm.weight"),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.(\w+)", r"layers.\1.feed_forward_norm.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.q_(proj|norm)\.weight", r"layers.\1.attention.query.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.k_(proj|norm)\.weight", r"layers.\1.attention.key.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.v_(proj)\.weight", r"layers.\1.attention.value.\2"),
    (r"model\.layers\.(\d+)\.self_attn\.o_(proj)\.weight", r"layers.\1.attention.output.\2"),
    (r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.(.+)", r"layers.\1.feed_forward.\2"),
)
"""What a whole name on disk is here, as patterns; the first that matches counts."""

LEAVES = (
    (r"\.(query|key|value|output)\.proj$", r".\1.weight"),
    (r"\.(query|key)\.norm$", r".\1_norm.weight"),
    (r"\.gate\.weight$", ".router.weight"),
    (r"\.gate\.e_score_correction_bias$", ".router.selection_bias"),
    (r"\.shared_experts\.", ".shared."),
    (r"\.(gate|up|down)_proj\.weight$", r".\1.weight"),
    (r"\.w1\.weight$", ".gate.weight"),
    (r"\.w3\.weight$", ".up.weight"),
    (r"\.w2\.weight$", ".down.weight"),
)
"""What ends of names become then, one after the other."""

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def from_huggingface(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors as a ``Transformer`` does, and stack those of experts.

    Args:
        tensors: Everything on disk of a Llama, Mistral, Qwen3, Qwen3-MoE, Mixtral or dots1 model;
            experts have a tensor each.

    Returns:
        By name here; experts as ``[e ...]``. What a router's ``load`` is, disks do not say.

    Raises:
        ValueError: If a name is none of these models', or an expert is missing.

    Examples:
        >>> list(from_huggingface({"model.layers.3.mlp.gate.weight": torch.ones(2, 4)}))
        ['layers.3.feed_forward.router.weight']
    """
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        known = _rename(name)
        if one := EXPERT.fullmatch(known):
            experts.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = tensor
        else:
            found[known] = tensor
    for name, each in experts.items():
        if missing := sorted(set(range(max(each) + 1)) - each.keys()):
            raise ValueError(
                f"{name} has experts up to {max(each)} and {missing} are missing; read all files "
                "of the directory."
            )
        found[name] = torch.stack([each[number] for number in range(len(each))])
    return found


def _rename(name: str) -> str:
    for pattern, known in NAMES:
        if re.fullmatch(pattern, name):
            renamed = re.sub(pattern, known, name)
            break
    else:
        raise ValueError(f"{name!r} is no tensor of a model that has the parts of a Transformer.")
    for pattern, known in LEAVES:
        renamed = re.sub(pattern, known, renamed)
    return renamed
