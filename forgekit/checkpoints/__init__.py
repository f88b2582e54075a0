"""A state on disk: what a save returns, and which checkpoints stay."""

from forgekit.checkpoints.save import (
    PendingSave as PendingSave,
    wait_for_saves as wait_for_saves,
)
from forgekit.checkpoints.directory import Keep as Keep
