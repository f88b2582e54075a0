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

__all__ = ["BUILDERS", "LOSSES", "MAX_NORM", "SCHEDULES", "build_model", "spec_of"]

MAX_NORM = 0.25
"""Below the norm of every gradient of the table, so that clipping bites."""
SCHEDULES = {
    "sgd": fk.warmup_cosine(peak=0.5, warmup=2, total=8),
    "adamw": fk.warmup_cosine(peak=0.01, warmup=2, total=8),
}


def spec_of(row: Row, **changes: Any) -> fk.TransformerSpec:
    """Sizes that every layout of the table divides."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "layers": row.layers,
        "heads": 4,
        "kv_heads": 2,
        "ffn_dim": 48,
        "max_seq_len": 24,
        "qk_norm": True,
    }
    return fk.TransformerSpec(**sizes | changes)


def build_model(row: Row, device: str = "cpu") -> nn.Module:
    """The model of a layout, filled from seed 0 unless it is on meta."""
    spec = spec_of(row)
    with torch.device(device):
        model = fk.Transformer(spec, seed=0)
        for layer in model.layers if row.experts else ():
            layer.feed_forward = Routed(spec.dim, spec.ffn_dim)
    if row.experts and device != "meta":
        fk.init_weights(model, seed=0)
    return model


def logits_loss(model: Any, batch: Any) -> fk.Loss:
    return fk.cross_entropy(model(batch["input_ids"], **_places(batch)), batch["labels"])


def head_loss(model: Any, batch: Any) -> fk.Loss:
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    return model(batch["input_ids"], head=head, **_places(batch))


def _places(batch: Any) -> dict[str, Any]:
    return {key: batch[key] for key in ("position_ids", "doc_ids") if key in batch.keys()}  # noqa: SIM118


def sgd(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """Momentum SGD, which sees a wrong scale; not fused: torch has no DTensor strategy for it."""
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def adamw(model: nn.Module, fused: bool = True) -> torch.optim.Optimizer:
    """AdamW with decay; fused in the layouts, so that its kernel takes the factor."""
    return torch.optim.AdamW(model.parameters(), lr=0.0, eps=1e-3, weight_decay=0.1, fused=fused)


LOSSES = {"logits": logits_loss, "head": head_loss}
BUILDERS = {"sgd": sgd, "adamw": adamw}
