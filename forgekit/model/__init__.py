"""From a micro-batch to logits: sizes, attention, experts, initial weights."""

from forgekit.model.moe_spec import MoESpec as MoESpec
from forgekit.model.rope_scaling import RopeScaling as RopeScaling
from forgekit.model.attention_kernels import AttentionChoice as AttentionChoice
from forgekit.model.attention import (
    attend_causal as attend_causal,
    document_mask as document_mask,
)
from forgekit.model.moe import dispatch_local as dispatch_local
from forgekit.model.initial import init_weights as init_weights
