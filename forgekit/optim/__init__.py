"""From gradients to updates: parameter groups, optimizers, learning-rate schedules."""

from forgekit.optim.parameter_groups import decay_groups
from forgekit.optim.lr_schedules import Schedule, cosine, linear, warmup, warmup_linear

__all__ = [
    "decay_groups",
    "Schedule",
    "cosine",
    "linear",
    "warmup",
    "warmup_linear",
]
