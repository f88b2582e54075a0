"""Muon beside torch's over many small matrices and fewer larger ones; updates by chains."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from pairs import Times, band, ratio, take_turns
from torch import nn

import forgekit as fk

OURS, THEIRS, AGAIN = "forgekit", "torch.optim.Muon", "torch.optim.Muon again"
SIZES = {"400 of 64x64": (400, 64, 1 / 5, 10), "100 of 256x256": (100, 256, 1.0, 30)}
"""How many, of what size, at most what share of torch's time, and in how many rounds."""


def ours(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Muon over matrices alone."""
    return fk.muon(nn.ParameterList(weights), roles={"*": "matrix"})


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
    kinds = {OURS: ours, THEIRS: torch.optim.Muon, AGAIN: torch.optim.Muon}
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


# An update of a whole model, by chains of transforms


PARTS = fk.optim
ADAMW = (PARTS.adam(), PARTS.decay(0.1))
MUON = (PARTS.momentum(), PARTS.orthogonal(), PARTS.decay(0.1))
NORMUON = (PARTS.momentum(), PARTS.orthogonal(), PARTS.row_norm(), PARTS.cautious_decay(0.1))
UPDATES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str, float]] = {
    "fk.adamw": (fk.adamw, "fk.adamw", 1.0),
    "fk.adamw again": (fk.adamw, "fk.adamw", 1.0),
    "chain of AdamW": (lambda m: fk.optimizer(m, {"*": ADAMW}), "fk.adamw", 1.05),
    "fk.muon": (fk.muon, "fk.muon", 1.0),
    "fk.muon again": (fk.muon, "fk.muon", 1.0),
    "chain of Muon": (lambda m: fk.optimizer(m, {"matrix": MUON, "*": ADAMW}), "fk.muon", 1.05),
    "chain of NorMuon": (
        lambda m: fk.optimizer(m, {"matrix": NORMUON, "*": ADAMW}),
        "fk.muon",
        1.2,
    ),
    "chain of SOAP": (
        lambda m: fk.optimizer(m, {"matrix": (PARTS.soap(), PARTS.decay(0.1)), "*": ADAMW}),
        "fk.muon",
        math.inf,
    ),
}
"""How each is built, beside what it is timed, and at most what share of that it may take."""


@pytest.fixture(scope="module", params=(64, 256))
def update_times(request: pytest.FixtureRequest) -> tuple[int, Times]:
    dim: int = request.param
    model = {"vocab_size": 16 * dim, "heads": 4, "kv_heads": 2, "ffn_dim": 43 * dim // 16}
    spec = fk.TransformerSpec(**model, dim=dim, layers=4, max_seq_len=256)

    def updating(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], object]:
        model = fk.Transformer(spec, seed=0)
        optimizer = make(model)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        return optimizer.step

    entries = {name: updating(make) for name, (make, _, _) in UPDATES.items()}
    return dim, take_turns(entries, 20 if dim > 64 else 60)


@pytest.mark.parametrize("name", UPDATES)
def test_update_time(show, update_times, name):
    (dim, times), (_, baseline, most) = update_times, UPDATES[name]
    here, noise = ratio(times, name, baseline), band(times, f"{baseline} again", baseline)
    show(f"update, dim {dim}, 4 layers", times, name, ratio=here, band=noise)
    assert here <= most * (1 + noise) or "again" in name, f"{here:.3f}, A/A {noise:.3f}"
