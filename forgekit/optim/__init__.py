"""From gradients to updates: parameter groups, optimizers, learning-rate schedules."""

from forgekit.optim.groups import decay_groups, parameters_by_optimizer, roles_of
from forgekit.optim.muon import Muon
from forgekit.optim.lion import Lion
from forgekit.optim.schedule_free import ScheduleFree
from forgekit.optim.average import Average
from forgekit.optim.lr_schedules import Schedule, cosine, linear, warmup, warmup_linear

__all__ = [
    "decay_groups",
    "parameters_by_optimizer",
    "roles_of",
    "Muon",
    "Lion",
    "ScheduleFree",
    "Average",
    "Schedule",
    "cosine",
    "linear",
    "warmup",
    "warmup_linear",
]
