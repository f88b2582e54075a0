"""From gradients to updates: parameter groups, optimizers, learning-rate schedules."""

from forgekit.optim.groups import decay_groups, parameters_by_optimizer, roles_of
from forgekit.optim.muon import Muon
from forgekit.optim.lion import Lion
from forgekit.optim.schedule_free import ScheduleFree
from forgekit.optim.average import Average
from forgekit.optim.transforms import (
    At,
    Transform,
    adam,
    cautious_decay,
    cautious_mask,
    clip_norm,
    clip_value,
    decay,
    lion_sign,
    momentum,
    scale,
    stochastic_rounding,
    transform,
    trust_ratio,
)
from forgekit.optim.matrices import adafactor, orthogonal, row_norm, soap
from forgekit.optim.lr_schedules import Schedule, cosine, linear, warmup, warmup_linear

__all__ = [
    "decay_groups",
    "parameters_by_optimizer",
    "roles_of",
    "Muon",
    "Lion",
    "ScheduleFree",
    "Average",
    "At",
    "Transform",
    "transform",
    "momentum",
    "adam",
    "lion_sign",
    "orthogonal",
    "row_norm",
    "soap",
    "adafactor",
    "cautious_mask",
    "clip_value",
    "clip_norm",
    "trust_ratio",
    "decay",
    "cautious_decay",
    "scale",
    "stochastic_rounding",
    "Schedule",
    "cosine",
    "linear",
    "warmup",
    "warmup_linear",
]
