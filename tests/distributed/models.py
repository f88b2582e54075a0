"""The models, losses and optimizers of the cells."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from distributed.batches import VOCABULARY
from distributed.experts import Routed
from distributed.matrix import Row
from torch import nn

import forgekit as fk
from forgekit.model.moe import MoE

MAX_NORM = 0.25
"""Below the norm of every gradient of the table, so that clipping bites."""
SCHEDULES = {
    "sgd": fk.warmup_cosine(peak=0.5, warmup=2, total=8),
    "adamw": fk.warmup_cosine(peak=0.01, warmup=2, total=8),
}


TERMS = {"aux_loss": 0.3, "z_loss": 0.05, "sequence_aux_loss": 0.2, "bias_rate": 0.02}
MOE = fk.MoESpec(experts=8, top_k=2, ffn_dim=16, shared=1, first=1, every=2, scale=1.7, **TERMS)


def spec_of(row: Row, **changes: Any) -> fk.TransformerSpec:
    """Sizes that every layout of the table divides."""
    sizes = {"dim": 32, "layers": row.layers, "heads": 4, "kv_heads": 2, "ffn_dim": 48}
    more = {"max_seq_len": 24, "qk_norm": True, "qkv_bias": True, **changes}
    moe = MOE if row.routed else None
    return fk.TransformerSpec(**{"vocab_size": VOCABULARY, "moe": moe, **sizes, **more})


def build_model(row: Row, device: str = "cpu") -> nn.Module:
    """The model of a layout, filled from seed 0 unless it is on meta."""
    spec = spec_of(row)
    with torch.device(device):
        model = fk.Transformer(spec, seed=0)
        for layer in model.layers if row.experts else ():
            layer.feed_forward = Routed(spec.dim, spec.ffn_dim)
    if row.experts and device != "meta":
        fk.init_weights(model, seed=0)
    if row.routed and device != "meta":
        prefer(model)
    return model


@torch.no_grad()
def prefer(model: nn.Module) -> None:
    """Let routers prefer some experts and never choose two, in place; loads are not even at first.

    With ep 4 these two are all experts of a rank.
    """
    for layer in model.modules():
        if isinstance(layer, MoE):
            for parameter in layer.parameters():
                parameter.mul_(8)
            layer.router.load.copy_(torch.tensor([6.0, 1, 0, 0, 4, 2, 5, 3]) / 21)
            layer.router.selection_bias.copy_(torch.tensor([0.1, 0, -9, -9, 0, 0, 0, -0.1]))


def logits_loss(model: Any, batch: Any) -> fk.Loss:
    return fk.cross_entropy(model(batch["input_ids"], **_given(batch)), batch["labels"])


def head_loss(model: Any, batch: Any) -> fk.Loss:
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], head=head, **_given(batch))


def _given(batch: Any) -> dict[str, Any]:
    given = {key: batch[key] for key in ("position_ids", "doc_ids") if key in batch.keys()}  # noqa: SIM118
    return {**given, "targets": batch["labels"] != -100}


def sgd(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Momentum SGD, which sees a wrong scale; not fused: torch has no DTensor strategy for it."""
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def adamw(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """AdamW with decay; fused in the layouts, so that its kernel takes the factor."""
    return torch.optim.AdamW(model.parameters(), eps=1e-3, weight_decay=0.1, fused=fused)


LOSSES = {"logits": logits_loss, "head": head_loss}
BUILDERS = {"sgd": sgd, "adamw": adamw}
