"""Models with adapters that have moved, and what one process finds for them.

The reference shares no code with the layers: it adds the product of the factors to each weight of
the base model and lets autograd go through that sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import attrs
import lab
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.func import functional_call

import forgekit as fk

loss_fn, head_loss = lab.logits_loss, lab.head_loss
SPEC = fk.TransformerSpec(
    vocab_size=40, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_seq_len=16, qk_norm=True
)
MOE = fk.MoESpec(experts=4, top_k=2, ffn_dim=12, shared=1, first=1, aux_loss=0.0)
EXPERTS = attrs.evolve(SPEC, dim=16, heads=2, ffn_dim=24, qk_norm=False, moe=MOE)
PACKED = attrs.evolve(SPEC, dim=128, kv_heads=4, ffn_dim=384, qk_norm=False)
PLAIN = (
    {"rank": 4, "alpha": 16.0, "targets": ("*.query", "*.key", "output")},
    {"rank": 3, "alpha": 16.0, "targets": "*.down"},
    {"rank": 4, "alpha": 28.0, "targets": "*.gate"},
    {"rank": 2, "alpha": 8.0, "targets": ("*.up",), "rslora": True},
)
LENGTHS = {"rank": 5, "alpha": 20.0, "targets": ("*.value", "*.attention.output"), "dora": True}
DENSE = (*PLAIN, LENGTHS)
OF_EXPERTS = {"targets": ("*.experts.gate", "*.experts.up", "*.query", "*.shared.down")}
MIXED = (
    {"rank": 2, "alpha": 8.0, **OF_EXPERTS},
    {"rank": 6, "alpha": 8.0, "targets": "*.experts.down"},
)
IN_4_BITS = (
    {"rank": 4, "alpha": 8.0, "targets": ("*.query", "*.value", "*.gate", "*.down"), "base": "nf4"},
    {"rank": 2, "alpha": 6.0, "targets": "*.attention.output", "dora": True, "base": "nf4"},
)
LATE = ({"rank": 2, "alpha": 8.0, "targets": ("layers.1.*.value",)},)
"""Nothing to train before the second block."""
ADAPTED = {
    "dense": (SPEC, DENSE),
    "biased": (attrs.evolve(SPEC, qkv_bias=True), DENSE),
    "deep": (attrs.evolve(SPEC, layers=4), DENSE),
    "experts": (EXPERTS, MIXED),
    "beside experts": (EXPERTS, ({"rank": 2, "alpha": 8.0, "targets": ("*.query", "*.value")},)),
    "uneven": (attrs.evolve(EXPERTS, moe=attrs.evolve(EXPERTS.moe, experts=7)), MIXED),
    "late": (SPEC, LATE),
    "plain": (SPEC, PLAIN),
    "lengths": (SPEC, (LENGTHS,)),
    "packed": (PACKED, IN_4_BITS),
}


def base_of(spec: fk.TransformerSpec) -> fk.Transformer:
    """A model whose biases, if it has them, are not zero."""
    model = fk.Transformer(spec, seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.copy_(torch.linspace(-0.3, 0.5, len(parameter)))
    return model


def build(kind: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> nn.Module:
    """A model with adapters as ``add_lora`` leaves them."""
    spec, adapters = ADAPTED[kind]
    with torch.device(device):
        model = base_of(spec).to(dtype)
    for options in adapters:
        fk.add_lora(model, seed=3, **options)
    return model


@torch.no_grad()
def move(model: nn.Module) -> nn.Module:
    """Give every factor other values, each from its name, in place."""
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
        if name.endswith("magnitude_vector"):
            parameter.mul_((1 + noise).to(parameter.dtype))
        else:
            parameter.copy_(noise)
    return model


DENSE_SCALES = {"query": 4.0, "key": 4.0, "value": 4.0, "gate": 7.0, "down": 16 / 3}
DENSE_SCALES |= {"output": 4.0, "up": 8 / 2**0.5}
EXPERT_SCALES = {"query": 4.0, "shared.down": 4.0, "experts.down": 8 / 6}
EXPERT_SCALES |= {"experts.gate": 4.0, "experts.up": 4.0}
PACKED_SCALES = {"query": 2.0, "value": 2.0, "gate": 2.0, "down": 2.0, "output": 3.0}
"""By the end of a matrix's name what the product of its factors is multiplied by, written out."""


def adapted_weights(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The base's parameters, unpacked, with the products of factors added, by name in the base."""
    scales = EXPERT_SCALES if ADAPTED[kind][0].moe else DENSE_SCALES
    scales = PACKED_SCALES if kind == "packed" else scales
    weights = {
        name: unpacked(name) if tensor.dtype == torch.uint8 else tensor
        for name, tensor in tensors.items()
        if "lora_" not in name
    }
    for name in [name for name in tensors if name.endswith("lora_A")]:
        matrix = name.removesuffix("lora_A")
        target = matrix.removesuffix("_") if matrix.endswith("_") else f"{matrix}weight"
        plain = target.removesuffix(".weight")
        (scale,) = [scale for end, scale in scales.items() if plain.endswith(end)]
        product = torch.einsum("...or,...ri->...oi", tensors[f"{matrix}lora_B"], tensors[name])
        total = weights[target] + scale * product
        lengths = tensors.get(f"{matrix}lora_magnitude_vector")
        if lengths is not None:
            total = total * (lengths / total.detach().norm(dim=1))[:, None]
        weights[target] = total
    return weights


def batches_of(world: int) -> list[list[TensorDict]]:
    """``[micro-batch][rank]``, ragged numbers of targets."""
    return [lab.global_batch(world, seed=seed)[1] for seed in range(2)]


def reference(kind: str, world: int) -> dict[str, Tensor]:
    """Gradients of the token-mean loss by name of the factor, float64, one process."""
    base = base_of(ADAPTED[kind][0]).double()

    def summed_loss(model: nn.Module, batch: Any) -> fk.Loss:
        weights = adapted_weights(kind, dict(model.named_parameters()))
        return lab.torch_loss(lambda ids: functional_call(base, weights, (ids,)), batch)

    return lab.reference_gradients(move(build(kind)), batches_of(world), summed_loss)[0]


LEVELS = (-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0)
LEVELS += (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1)


def rounded(weight: Tensor) -> Tensor:
    """What NF4 makes of a matrix, float32: written out once more, a block at a time."""
    blocks, levels = weight.detach().float().reshape(-1, 64), torch.tensor(LEVELS)
    magnitudes = torch.stack([block.abs().max() for block in blocks])
    mean = magnitudes.mean()
    restored = []
    for group in (magnitudes - mean).split(256):
        step = group.abs().max() / 128
        restored.append((group / step).round().clamp(-128, 127) * step + mean)
    made = [
        levels[(block / largest - levels[:, None]).abs().argmin(0)] * scale
        for block, largest, scale in zip(blocks, magnitudes, torch.cat(restored), strict=True)
    ]
    return torch.cat(made).view(weight.shape)


@cache
def unpacked(name: str) -> Tensor:
    """A packed matrix of the base, float64."""
    return rounded(base_of(PACKED).get_parameter(name)).double()


def packed_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.dtype == torch.uint8}
