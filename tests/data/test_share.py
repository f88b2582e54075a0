"""A replica group's part of a step: each row once, whoever takes part, and nothing read twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from tensordict import TensorDict

from forgekit.data.loader import make_loader

WORLD, ROWS, MICRO_BATCHES = 2, 3, 5
STEP = WORLD * ROWS * MICRO_BATCHES


class Rows:
    """Row ``i`` is the number ``i``; notes what is read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 1000

    def __getitem__(self, row):
        self.read.append(row)
        return TensorDict({"input_ids": torch.tensor([row]), "labels": torch.tensor([row])})


def loaders(**options):
    return [
        make_loader(Rows(), ROWS, shuffle=False, rank=rank, world=WORLD, **options)
        for rank in range(WORLD)
    ]


def take(loader, *where, **options):
    """The rows of a share that count, and its micro-batches by number."""
    share = loader.share(*where, **options)
    batches = [batch["input_ids"].flatten().tolist() for batch in share]
    assert len(batches) == len(share)
    numbered = dict(enumerate(batches, start=share.first_number))
    return (sorted(itertools.chain(*batches)) if share.samples else []), numbered, share.samples


def test_parts_are_all_of_a_step_whoever_takes_part():
    """Groups come and go, a step is done again, and one is behind."""
    groups = [loaders(workers=number % 2) for number in range(7)]
    visits = [(0, 3), (0, 3), (1, 3), (1, 1), (2, 7), (3, 2), (3, 7), (4, 4), (4, 4), (5, 4)]
    for step, participants in visits:
        rows, samples = [], 0
        for index in range(participants):
            for rank, loader in enumerate(groups[index]):
                where = step * STEP, MICRO_BATCHES, index, participants
                mine, numbered, counted = take(loader, *where)
                rows += mine
                for number, batch in numbered.items():
                    first = step * STEP + (number * WORLD + rank) * ROWS
                    assert batch == [*range(first, first + ROWS)]
            samples += counted
        assert sorted(rows) == [*range(step * STEP, (step + 1) * STEP)]
        assert samples == STEP
    for loader in itertools.chain(*groups):
        loader.close()


def test_parts_differ_by_one_multiple_at_most():
    loader = make_loader(Rows(), 1, shuffle=False)
    sizes = [len(loader.share(0, 12, index, 5)) for index in range(5)]
    assert sizes == [2, 2, 3, 2, 3]
    sizes = [len(loader.share(0, 12, index, 5, multiple=4)) for index in range(5)]
    counted = [loader.share(0, 12, index, 5, multiple=4).samples for index in range(5)]
    assert (sizes, counted) == ([4] * 5, [0, 4, 0, 4, 4])


def test_what_was_read_ahead_is_used_where_nothing_changes():
    dataset = Rows()
    loader = make_loader(dataset, 1, shuffle=False, workers=2)
    for step in range(5):
        list(loader.share(4 * step, 4, 1, 2))
    loader.close()
    taken = [row for step in range(5) for row in (4 * step + 2, 4 * step + 3)]
    read = sorted(dataset.read)
    assert read[: len(taken)] == taken
    assert len(set(read)) == len(read)
    assert all(row % 4 >= 2 for row in read)  # never one of the other group


def test_a_share_that_broke_off_is_taken_again():
    loader = make_loader(Rows(), 1, shuffle=False)
    next(iter(loader.share(0, 4)))
    assert take(loader, 0, 4)[0] == [0, 1, 2, 3]
    assert take(loader, 4, 4)[0] == [4, 5, 6, 7]
    assert take(loader, 0, 4, 1, 2, skip=((2, 3),))[0] == [5, 6]


def test_shares_that_cannot_be_are_refused():
    assert make_loader(Rows(), 2, world=3).share(0, 4).whole == (4, 6)
    with pytest.raises(ValueError, match=r"this loader ends, .*: epochs=None\."):
        make_loader(Rows(), 1, epochs=1).share(0, 4)
    with pytest.raises(ValueError, match=r"rank 2 must lie in range\(world=2\)"):
        make_loader(Rows(), 1).share(0, 4, 2, 2)
    with pytest.raises(ValueError, match=r"micro_batches 6 must be a multiple of 4, .* 4 and 8"):
        make_loader(Rows(), 1).share(0, 6, multiple=4)
