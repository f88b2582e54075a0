"""Loaders for a state: from where it is, for the ranks that it is on."""

from __future__ import annotations

import pytest
import torch
from pool import run_again
from tensordict import TensorDict
from torch import nn

import forgekit as fk
from forgekit.plan.stand_ins import pretending

ROWS = [
    TensorDict({key: torch.tensor([row]) for key in ("input_ids", "labels")}) for row in range(24)
]
SPEC = fk.TransformerSpec(
    vocab_size=8, dim=8, layers=1, heads=2, kv_heads=2, ffn_dim=8, max_seq_len=4
)


def create(mesh=None, **fields):
    model = nn.Linear(2, 2) if mesh is None else fk.parallelize(fk.Transformer(SPEC), mesh)
    state = fk.TrainState.create(model, torch.optim.SGD(model.parameters()), mesh=mesh, seed=5)
    return fk.donate(state, **fields)


def rows_of(loader, count):
    return [
        next(batches)["input_ids"][:, 0].tolist()
        for batches in [iter(loader)]
        for _ in range(count)
    ]


def test_a_state_goes_on_with_the_samples_that_come_next():
    skips = ((10, 4),)
    found = fk.train_loader(create(samples=6, skips=skips), ROWS, 2, workers=1)
    order = [int(row) for row in fk.data.sample_rows(range(48), 24, 5)]
    with found:
        assert rows_of(found, 4) == [order[6:8], order[8:10], order[14:16], order[16:18]]
        assert found.samples == 14


def test_transforms_are_applied():
    loader = fk.train_loader(create(), ROWS, 2, transforms=[lambda batch: batch.apply(torch.neg)])
    assert max(max(rows) for rows in rows_of(loader, 12)) == 0


def test_held_out_rows_come_once_and_in_order():
    loader = fk.held_out_loader(create(samples=6, skips=((0, 4),)), ROWS[:5], 2)
    for _ in range(2):
        assert [batch["input_ids"][:, 0].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 4]]


@pytest.mark.parametrize("dataset", [None, []])
def test_without_held_out_rows_there_is_nothing_to_evaluate(dataset):
    assert fk.held_out_loader(create(), dataset, 2) is None


@pytest.mark.parametrize(
    ("rows", "world", "sizes", "expected"),
    [
        (8, 1, {}, 8),
        (8, 8, {}, 1),
        (8, 8, {"tp": 2, "cp": 2}, 4),
        (12, 2, {"dp_replicate": 2}, 6),
        (256, 8, {}, 8),
        (34, 2, {}, 1),  # 17 rows for each rank
        (32, 2, {"pp": 2}, 8),
        (8, 4, {"pp": 2}, 1),  # four micro-batches for two stages
        (2, 2, {"pp": 2}, 1),
        (8, 3, {}, 1),  # which the loader's micro_batches refuses
    ],
)
def test_rows_of_a_micro_batch_follow_from_the_global_batch(rows, world, sizes, expected):
    with pretending(0, world, {}):
        mesh = fk.build_mesh(fk.MeshSpec(**sizes), device="cpu")
        assert fk.fitting_batch_size(rows, mesh) == expected
        assert fk.fitting_batch_size(rows, mesh, 2) == min(2, expected)


def _on_ranks(rank, world):
    mesh = fk.build_mesh(fk.MeshSpec(tp=2, dp_shard=2), device="cpu")
    state = create(mesh, samples=4)
    train = rows_of(fk.train_loader(state, ROWS, 2), 2)
    held_out = [b["input_ids"][:, 0].tolist() for b in fk.held_out_loader(state, ROWS[:8], 2)]
    return train, held_out


def test_ranks_of_one_sample_read_the_same_and_others_the_next():
    order = [int(row) for row in fk.data.sample_rows(range(24), 24, 5)]
    first = ([order[4:6], order[8:10]], [[0, 1], [4, 5]])
    second = ([order[6:8], order[10:12]], [[2, 3], [6, 7]])
    assert run_again(_on_ranks, 4) == [first, first, second, second]
