"""From gradients to updates: parameter groups, optimizers, averages, learning-rate schedules."""

from forgekit.optim.groups import (
    decay_groups as decay_groups,
    parameters_by_optimizer as parameters_by_optimizer,
    roles_of as roles_of,
)
from forgekit.optim.named import lion as lion
from forgekit.optim.schedule_free import (
    ScheduleFree as ScheduleFree,
    schedule_free as schedule_free,
)
from forgekit.optim.chain import chain_optimizers as chain_optimizers
from forgekit.optim.average import (
    EMA as EMA,
    Average as Average,
    UniformAverage as UniformAverage,
)
from forgekit.optim.transforms import (
    At as At,
    Transform as Transform,
    transform as transform,
    momentum as momentum,
    adam as adam,
    lion_sign as lion_sign,
    cautious_mask as cautious_mask,
    clip_value as clip_value,
    clip_norm as clip_norm,
    trust_ratio as trust_ratio,
    decay as decay,
    cautious_decay as cautious_decay,
    scale as scale,
    stochastic_rounding as stochastic_rounding,
)
from forgekit.optim.matrices import (
    orthogonal as orthogonal,
    row_norm as row_norm,
    soap as soap,
    adafactor as adafactor,
)
from forgekit.optim.lr_schedules import (
    Schedule as Schedule,
    constant as constant,
    cosine as cosine,
    join_schedules as join_schedules,
    linear as linear,
    rex as rex,
    warmup as warmup,
    with_phases as with_phases,
    wsd as wsd,
)
