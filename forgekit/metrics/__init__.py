"""Rows of metrics, where they go, hooks that measure, and traces."""

from forgekit.metrics.records import (
    read_bad_steps as read_bad_steps,
    read_metrics as read_metrics,
)
from forgekit.metrics.trackers import (
    TensorBoard as TensorBoard,
    Tracker as Tracker,
    WandB as WandB,
    make_trackers as make_trackers,
)
from forgekit.metrics.hooks import (
    expert_loads as expert_loads,
    layer_norms as layer_norms,
)
from forgekit.metrics.profile import Profile as Profile
