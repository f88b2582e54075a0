"""Models with a packed base, and what one process finds for them beside the unpacked values."""

from __future__ import annotations

from typing import Any

import torch
from adapted import add_products, batches_of, move
from lab import reference_gradients, torch_loss
from torch import Tensor, nn
from torch.func import functional_call

import forgekit as fk

SPEC = fk.TransformerSpec(
    vocab_size=40, dim=128, layers=2, heads=4, kv_heads=4, ffn_dim=384, max_seq_len=16
)
ADAPTERS = (
    {"rank": 4, "alpha": 8.0, "targets": ("*.query", "*.value", "*.gate", "*.down")},
    {"rank": 2, "alpha": 6.0, "targets": "*.attention.output", "dora": True},
)
SCALES = {"query": 2.0, "value": 2.0, "gate": 2.0, "down": 2.0, "output": 3.0}
BELOW = (-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0)
ABOVE = (0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1)
LEVELS = torch.tensor(BELOW + ABOVE)


def build(dtype: torch.dtype = torch.float64, device: str = "cpu", base: Any = "nf4") -> Any:
    with torch.device(device):
        model = fk.Transformer(SPEC, seed=0).to(dtype)
    for options in ADAPTERS:
        fk.add_lora(model, seed=3, base=base, **options)
    return model


def rounded(weight: Tensor) -> Tensor:
    """What NF4 makes of a matrix, float32: written out once more, a block at a time."""
    blocks = weight.detach().float().reshape(-1, 64)
    magnitudes = torch.stack([block.abs().max() for block in blocks])
    mean = magnitudes.mean()
    restored = []
    for group in (magnitudes - mean).split(256):
        step = group.abs().max() / 128
        restored.append((group / step).round().clamp(-128, 127) * step + mean)
    scales = torch.cat(restored)
    made = [
        LEVELS[(block / largest - LEVELS[:, None]).abs().argmin(0)] * scale
        for block, largest, scale in zip(blocks, magnitudes, scales, strict=True)
    ]
    return torch.cat(made).view(weight.shape)


def unpacked_base(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The base's parameters, those that are packed rounded."""
    model = fk.Transformer(SPEC, seed=0)
    known = dict(build(torch.float32, "meta").named_parameters())
    return {
        name: (rounded(p) if known[name].dtype == torch.uint8 else p.detach()).to(dtype)
        for name, p in model.named_parameters()
    }


def reference(ranks: int) -> dict[str, Tensor]:
    """Gradients of the token-mean loss by name of the factor, float64, one process."""
    plain, base = fk.Transformer(SPEC, seed=0).double(), unpacked_base()

    def summed_loss(model: nn.Module, batch: Any) -> fk.Loss:
        factors = {n: p for n, p in model.named_parameters() if "lora_" in n}
        weights = add_products(base | factors, SCALES)
        return torch_loss(lambda ids: functional_call(plain, weights, (ids,)), batch)

    return reference_gradients(move(build()), batches_of(ranks), summed_loss)[0]


def packed_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.dtype == torch.uint8}
