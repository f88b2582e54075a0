"""Moving a state on, where it matters that it moves and not what it learns."""

from __future__ import annotations

from typing import Any

import torch

from forgekit.state import donate

__all__ = ["train"]


def train(state: Any, steps: int) -> Any:
    """Every rank sees the same rows, so that the steps do not depend on the number of ranks."""
    for _ in range(steps):
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(state.step))
        state.optimizer.zero_grad()
        state.model(rows).square().sum().backward()
        state.optimizer.step()
        state = donate(state, step=state.step + 1, samples=state.samples + 4)
    return state
