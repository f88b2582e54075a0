"""Loaders for a state: from where it is, for the ranks that it is on."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from lab import alone, lay_out
from pool import run_again
from tensordict import TensorDict
from torch import nn

import forgekit as fk
from forgekit.plan.stand_ins import pretending

ROWS = [
    TensorDict({key: torch.tensor([row]) for key in ("input_ids", "labels")}) for row in range(24)
]


def create(**fields):
    return fk.donate(alone(nn.Linear(2, 2)), seed=5, **fields)


def rows_of(loader, count):
    return [batch["input_ids"][:, 0].tolist() for batch in islice(loader, count)]


def test_a_state_goes_on_with_the_samples_that_come_next():
    state, negated = create(samples=6, skips=((10, 4),)), [lambda batch: batch.apply(torch.neg)]
    found = fk.train_loader(state, ROWS, 2, workers=1, transforms=negated)
    order = [-int(row) for row in fk.data.sample_rows(range(48), 24, 5)]
    with found:
        assert rows_of(found, 4) == [order[6:8], order[8:10], order[14:16], order[16:18]]
        assert found.samples == 14


def test_held_out_rows_come_once_and_in_order():
    loader = fk.held_out_loader(create(samples=6, skips=((0, 4),)), ROWS[:5], 2)
    for _ in range(2):
        assert [batch["input_ids"][:, 0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 4]]
    assert fk.held_out_loader(create(), [], 2) is fk.held_out_loader(create(), None, 2) is None


FITTING = [
    (8, 1, {}, 8),
    (8, 8, {"tp": 2, "cp": 2}, 4),
    (34, 2, {}, 1),  # 17 rows for each rank
    (32, 2, {"pp": 2}, 8),
    (8, 4, {"pp": 2}, 1),  # four micro-batches for two stages
    (8, 3, {}, 1),  # which the loader's micro_batches refuses
]


@pytest.mark.parametrize(("rows", "world", "sizes", "expected"), FITTING)
def test_rows_of_a_micro_batch_follow_from_the_global_batch(rows, world, sizes, expected):
    with pretending(0, world, {}):
        mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
        assert fk.fitting_batch_size(rows, mesh) == expected
        assert fk.fitting_batch_size(rows, mesh, 2) == min(2, expected)


def _on_ranks(rank, world):
    state = fk.donate(lay_out(nn.Linear(2, 2)), samples=4)
    train = rows_of(fk.train_loader(state, ROWS, 2), 2)
    return train, rows_of(fk.held_out_loader(state, ROWS[:8], 2), 2)


def test_each_rank_reads_rows_of_its_own():
    order = [int(row) for row in fk.data.sample_rows(range(24), 24, 0)]
    first = ([order[4:6], order[8:10]], [[0, 1], [4, 5]])
    second = ([order[6:8], order[10:12]], [[2, 3], [6, 7]])
    assert run_again(_on_ranks, 2) == [first, second]
