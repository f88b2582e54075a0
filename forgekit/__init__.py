"""A functional, composable step toolkit for training language models on PyTorch.

The names that recipes use, in the order in which a run meets them.
"""

from forgekit.mesh import MeshSpec, build_mesh, data_ranks, shutdown
from forgekit.model.initial import init_weights
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.optim.adamw import adamw
from forgekit.optim.groups import decay_groups
from forgekit.optim.schedules import (
    constant,
    cosine,
    linear,
    warmup,
    warmup_cosine,
    warmup_linear,
    wsd,
)
from forgekit.parallel.parallelize import parallelize
from forgekit.state import DonatedStateError, TrainState, donate
from forgekit.steps.accumulate import accumulate, count_ahead
from forgekit.steps.clip import Correction, clip
from forgekit.steps.losses import Loss, cross_entropy, linear_cross_entropy
from forgekit.steps.make_step import make_step, step_metrics
from forgekit.steps.totals import Totals, reduce_totals
from forgekit.steps.update import update
