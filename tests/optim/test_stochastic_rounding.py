"""Stochastic rounding: unbiased, exact where it can be, a function of where a value stands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forgekit as fk
from forgekit.optim.rounding import key_of, round_stochastically

INFO = torch.finfo(torch.bfloat16)


def rounded(values, key=1, step=0, first=0):
    rows, columns = values.shape
    indices = [torch.arange(first, first + rows), torch.arange(columns)]
    return round_stochastically(values, indices, key, step)


@pytest.mark.parametrize("value", [1.0 + 2**-10, -3.0 - 2**-9, 1e-3, 7.3e-40, -1.7e38])
def test_the_mean_is_the_value(value):
    """A z-test over 2**20 values: each is one of the two neighbours, with the right frequency."""
    values = torch.full((1024, 1024), value)
    found = rounded(values).double()
    low, high = found.min(), found.max()
    exact = values[0, 0].double()
    assert low < exact < high
    assert found.unique().numel() == 2
    p = float((exact - low) / (high - low))
    z = (float((found == high).double().mean()) - p) / (p * (1 - p) / found.numel()) ** 0.5
    assert abs(z) < 4


def test_what_bfloat16_holds_passes_through():
    least = 2.0**-133
    special = [0.0, -0.0, 1.0, least, -least, 3 * least, INFO.tiny, INFO.max, -INFO.max]
    special += [torch.inf, -torch.inf, torch.nan]
    values = torch.tensor(special).expand(512, -1)
    found = rounded(values)
    expected = values.to(torch.bfloat16)
    assert torch.equal(found.view(torch.int16), expected.contiguous().view(torch.int16))
    odd = torch.tensor([0x7F800001, 0x7FFFFFFF, -1]).to(torch.int32).view(torch.float32)
    assert rounded(odd.expand(64, -1)).isnan().all()  # not the infinity that cut bits would make


def test_noise_depends_on_seed_name_step_and_where_a_value_stands():
    values = torch.full((256, 256), 1.0 + 2**-8)  # half of them up
    base = rounded(values, key=key_of(0, "a"))
    others = {
        "seed": rounded(values, key=key_of(1, "a")),
        "name": rounded(values, key=key_of(0, "b")),
        "step": rounded(values, key=key_of(0, "a"), step=1),
        "row": rounded(values, key=key_of(0, "a"), first=1),
        "transposed": base.T,
        "next column": base.roll(1, 1),
        "next row": base.roll(1, 0),
        "half": base.flip(0),
    }
    count = values.numel()
    for what, other in others.items():
        agreeing = float((base == other).double().mean())
        assert abs(agreeing - 0.5) < 4 * 0.5 / count**0.5, what
    per_row = (base > 1).double().mean(1)
    assert (per_row - 0.5).abs().max() < 4.5 * 0.5 / 256**0.5
    on_device, on_host = (rounded(values, step=step) for step in (torch.tensor(3.0), 3))
    assert on_device.equal(on_host)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_shard_has_the_bits_of_the_whole(shards):
    values = torch.randn(7, 5, 6, generator=torch.Generator().manual_seed(0))
    indices = [torch.arange(n) for n in values.shape]
    whole = round_stochastically(values, indices, 9, 2)
    for dim in range(3):
        parts = [
            round_stochastically(v, [*indices[:dim], i, *indices[dim + 1 :]], 9, 2)
            for v, i in zip(values.chunk(shards, dim), indices[dim].chunk(shards), strict=True)
        ]
        assert torch.equal(torch.cat(parts, dim), whole)


def moved(dtype, make=fk.adamw, **options):
    """A weight of 1 whose gradient always has one sign, 50 steps far below those of bfloat16."""
    model = nn.Linear(64, 64, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = make(model, lr=1e-4, **options)
    for _ in range(50):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    return model.weight.detach().double()


SIGNS = {"*": (fk.optim.lion_sign(), fk.optim.stochastic_rounding())}


@pytest.mark.parametrize(
    "options",
    [{"stochastic_rounding": True, "weight_decay": 0.0}, {"make": fk.optimizer, "chains": SIGNS}],
    ids=["adamw", "a chain that reads no step"],
)
def test_weights_move_where_rounding_to_nearest_stands_still(options):
    """With other noise in each step: most of them have moved."""
    assert (moved(torch.bfloat16, weight_decay=0.0) == 1).all()
    found, right = moved(torch.bfloat16, **options), 1 - 50e-4
    assert abs(float(moved(torch.float32, weight_decay=0.0).mean()) - right) < 1e-5
    # Each weight walks in steps of 2**-8: the deviation of the mean of 4,096 of them.
    assert abs(float(found.mean()) - right) < 4 * (50e-4 * 2**-8 / 4096) ** 0.5
    assert (found != 1).double().mean() > 0.6
