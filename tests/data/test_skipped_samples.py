"""Samples that are left out: as if they had been taken out of a list, on any number of ranks."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import forgekit as fk
from forgekit.data.skipped_samples import positions

ROWS = 24


class Rows:
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return TensorDict({"row": torch.tensor(index), "labels": torch.tensor([index])})


def taken_out(numbers, skips):
    """The oracle: a list, out of which stretches are cut one after the other."""
    numbers = list(numbers)
    for first, rows in skips:
        del numbers[first : first + rows]
    return numbers


SKIPS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=4)


@given(SKIPS)
def test_positions_are_those_of_a_list_with_stretches_cut_out(skips):
    left = taken_out(range(200), skips)
    assert positions(range(len(left)), skips).tolist() == left


def rows_of(skips, world, start=0, epochs=None, batch_size=2):
    """Rows with a loss, in the order of their samples."""
    found = {}
    for rank in range(world):
        options = {"start": start, "skip": skips, "rank": rank, "world": world, "epochs": epochs}
        loader = fk.make_loader(Rows(), batch_size, **options)
        for number, batch in enumerate(islice(loader, 12)):
            for place, (row, label) in enumerate(
                zip(batch["row"].tolist(), batch["labels"].flatten().tolist(), strict=True)
            ):
                if label != -100:
                    found[(number * world + rank) * batch_size + place] = row
    return [found[sample] for sample in sorted(found)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 6])
def test_every_number_of_ranks_leaves_out_the_same(world, start):
    skips = [(4, 5), (8, 6)]
    order = rows_of([], 1, batch_size=6)  # three epochs
    expected = taken_out(order, skips)[start:]
    found = rows_of(skips, world, start)
    assert found[: len(expected)] == expected[: len(found)]
    assert len(found) >= 24


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("skips", [[(20, 9)], [(0, 3), (2, 4)], [(30, 2)], [(5, 40)]])
def test_a_loader_with_an_end_has_what_is_left_once(world, skips):
    order = rows_of([], 1, epochs=1)
    assert sorted(order) == list(range(ROWS))
    assert rows_of(skips, world, epochs=1) == taken_out(order, skips)


def test_a_loop_goes_on_from_where_the_loader_was_sent():
    loader, seen = fk.make_loader(Rows(), 2, shuffle=False, workers=1), []
    for batch in loader:
        seen += batch["row"].tolist()
        if loader.samples == 6 and len(seen) == 6:
            loader.seek(2, skip=[(4, 4)])
        if len(seen) == 14:
            break
    assert seen == [0, 1, 2, 3, 4, 5, 2, 3, 8, 9, 10, 11, 12, 13]
    assert loader.samples == 10
    assert loader.locate(2, 6) == [(None, 2), (None, 3), (None, 8), (None, 9)]
    loader.close()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"skip": [(1, -2)]}, ValueError, r"skip has \(1, -2\); each entry is \(first sample, row"),
        ({"skip": [(1,)]}, ValueError, r"skip has \(1,\); each entry is .* as in state.skips"),
        ({"start": -1}, ValueError, "start -1 must be at least 0"),
    ],
)
def test_what_cannot_be_left_out_is_refused(arguments, error, message):
    loader = fk.make_loader(Rows(), 2)
    with pytest.raises(error, match=message):
        loader.seek(**{"start": 0} | arguments)
    assert next(iter(loader))["row"].shape == (2,)
