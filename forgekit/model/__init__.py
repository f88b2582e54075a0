"""From a micro-batch to logits: layers, attention, the transformer, its initial weights."""

from forgekit.model.attention import attend_causal, document_mask
from forgekit.model.moe import dispatch_local

__all__ = [
    "attend_causal",
    "document_mask",
    "dispatch_local",
]
