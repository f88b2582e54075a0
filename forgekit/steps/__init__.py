"""One optimizer step, its parts in the order in which they happen."""

from forgekit.steps.clip import limit_spikes

__all__ = [
    "limit_spikes",
]
