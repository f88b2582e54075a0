"""The learning rate's phases follow the data: through other batch sizes and left-out samples."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import forgekit as fk

PHASES = (fk.Phase(start=21, lr_scale=0.5), fk.Phase(start=35, lr_scale=0.25))
ROWS = [TensorDict({"x": torch.full((2,), float(row))}, []) for row in range(60)]


def loss_fn(model, batch):
    return fk.Loss(model(batch["x"]).square().sum(), len(batch))


def run(rows, steps, **fields):
    """The rates of steps of so many rows, as of a process that goes on with these fields."""
    model = nn.Linear(2, 1)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    state, rates = fk.donate(state, **fields), []
    step = fk.make_step(loss_fn, schedule=fk.with_phases(fk.constant(1e-4), PHASES, rows))
    with fk.make_loader(ROWS, rows, start=state.samples, skip=state.skips) as loader:
        for batches in islice(fk.groups(loader, 1), steps):
            state, metrics = step(state, batches)
            rates.append(metrics["lr"].item())
    return rates


def expected(ends):
    return pytest.approx([1e-4 * 0.5 ** sum(end > phase.start for phase in PHASES) for end in ends])


@pytest.mark.parametrize(("before", "after"), [(8, 4), (2, 10)])
def test_after_a_resume_with_another_batch_size_the_rate_changes_at_its_sample(before, after):
    rates = run(after, 40 // after, step=2, samples=2 * before)
    assert rates == expected(range(2 * before + after, 2 * before + 41, after))
    assert len(set(rates)) > 1


def test_samples_that_are_left_out_bring_the_rate_forward_with_the_data():
    assert run(4, 6, skips=((8, 12),)) == expected([4, 8, 24, 28, 32, 36])
