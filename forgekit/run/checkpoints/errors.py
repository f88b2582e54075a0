"""The error of checkpoints that cannot be written or read."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, is damaged, or does not belong to this run."""
