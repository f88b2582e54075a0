"""Muon over many small matrices and over fewer larger ones, beside torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pairs import Times, band, ratio, take_turns
from torch import nn

from forgekit.optim import Muon

OURS, THEIRS, AGAIN = "forgekit", "torch.optim.Muon", "torch.optim.Muon again"
SIZES = {"400 of 64x64": (400, 64, 1 / 5, 10), "100 of 256x256": (100, 256, 1.0, 30)}
"""How many, of what size, at most what share of torch's time, and in how many rounds."""


def stepping(
    kind: Callable[..., torch.optim.Optimizer], count: int, size: int
) -> Callable[[], object]:
    """A step over matrices whose gradients stay as they are; bfloat16 inside of either."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(size, size, generator=generator)) for _ in range(count)]
    for weight in weights:
        weight.grad = torch.randn(size, size, generator=generator)
    return kind(weights).step


@pytest.fixture(scope="module")
def times() -> dict[str, Times]:
    kinds = {OURS: Muon, THEIRS: torch.optim.Muon, AGAIN: torch.optim.Muon}
    return {
        what: take_turns(
            {name: stepping(kind, count, size) for name, kind in kinds.items()}, rounds
        )
        for what, (count, size, _, rounds) in SIZES.items()
    }


@pytest.mark.parametrize("name", [OURS, THEIRS, AGAIN])
@pytest.mark.parametrize("what", SIZES)
def test_muon_time(show, times, what, name):
    count, _, most, rounds = SIZES[what]
    here, noise = ratio(times[what], name, THEIRS), band(times[what], AGAIN, THEIRS)
    rate = count / sorted(times[what][name])[rounds // 2]
    show(f"Muon, {what}", times[what], name, ratio=here, band=noise, matrices_per_second=rate)
    if name == OURS:
        assert here <= most * (1 + noise), f"{here:.3f} of torch's, A/A {noise:.3f}"
