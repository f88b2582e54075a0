"""The learning rate's phases follow the data: through other batch sizes and left-out samples."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import forgekit as fk

PHASES = (fk.Phase(start=21, weights={"a": 0}, lr_scale=0.5), fk.Phase(start=35, lr_scale=0.25))
SCALES = {0: 1.0, 1: 0.5, 2: 0.25}


class Rows:
    """Rows of a source, which know where they come from."""

    def __init__(self, value):
        self.value = value

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return TensorDict({"x": torch.full((2,), self.value), "y": torch.tensor(float(index))})


def loss_fn(model, batch):
    error = model(batch["x"])[:, 0] - batch["y"]
    return fk.Loss(error.square().sum(), torch.tensor(len(error)))


def build(skips=()):
    model = nn.Linear(2, 1)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()))
    return fk.donate(state, skips=skips)


def run(state, rows, steps):
    """Steps of so many rows, as one process of a recipe: the rates."""
    order = fk.make_order({"a": 1000, "b": 1000}, phases=PHASES)
    data = fk.mixture_dataset({"a": Rows(1.0), "b": Rows(2.0)}, order)
    schedule = fk.with_phases(fk.constant(1e-4), PHASES, rows)
    step = fk.make_step(loss_fn, schedule=schedule)
    rates = []
    with fk.make_loader(data, rows, start=state.samples, skip=state.skips) as loader:
        groups = fk.groups(loader, 1)
        for _ in range(steps):
            state, metrics = step(state, next(groups))
            rates.append(metrics["lr"].item())
    return state, rates


def expected(ends):
    return [1e-4 * SCALES[sum(end > phase.start for phase in PHASES)] for end in ends]


@pytest.mark.parametrize(("before", "after"), [(8, 4), (2, 10)])
def test_after_a_resume_with_another_batch_size_the_rate_changes_at_its_sample(
    tmp_path, before, after
):
    state, first = run(build(), before, 2)
    fk.checkpoint_save(state, tmp_path, blocking=True)
    state = fk.checkpoint_load(build(), tmp_path)
    steps = 40 // after
    _, second = run(state, after, steps)
    ends = [before, 2 * before, *(2 * before + after * (i + 1) for i in range(steps))]
    assert first + second == pytest.approx(expected(ends))
    assert len(set(second)) > 1


def test_samples_that_are_left_out_bring_the_rate_forward_with_the_data():
    _, rates = run(build(skips=((8, 12),)), 4, 6)
    assert rates == pytest.approx(expected([4, 8, 24, 28, 32, 36]))
