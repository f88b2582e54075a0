"""Groups know their length and pull nothing before it is used."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from forgekit.data.groups import groups
from forgekit.data.loader import make_loader
from forgekit.data.stream import stream_documents
from forgekit.run.data_end import DataEnd


def micro_batch(number):
    ids = torch.full((2, 3), number)
    return TensorDict({"input_ids": ids, "labels": ids}, batch_size=[2])


def numbers_of(group):
    """The number of each micro-batch; None for padding."""
    return [None if b["labels"].eq(-100).all() else b["input_ids"][0, 0].item() for b in group]


class Watched:
    """Counts what is pulled of it."""

    def __init__(self, count):
        self.count, self.pulled = count, 0

    def __len__(self):
        return self.count

    def __iter__(self):
        for number in range(self.count):
            self.pulled += 1
            yield micro_batch(number)


@pytest.mark.parametrize("stream", [list, iter])
@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, []), (1, [[0, None, None]]), (5, [[0, 1, 2], [3, 4, None]]), (6, [[0, 1, 2], [3, 4, 5]])],
)
def test_a_partial_group_is_padded_and_no_group_is_padding_alone(stream, count, expected):
    batches = stream(list(map(micro_batch, range(count))))
    assert [numbers_of(group) for group in groups(batches, 3)] == expected


def test_drop_leaves_out_and_error_refuses_before_anything_is_trained():
    batches = list(map(micro_batch, range(5)))
    assert [numbers_of(group) for group in groups(batches, 3, partial="drop")] == [[0, 1, 2]]
    assert list(groups(batches[:2], 3, partial="drop")) == []
    assert len([numbers_of(group) for group in groups(batches, 5, partial="error")]) == 1
    message = "5 micro-batches make 1 groups of 3 and leave 2"
    with pytest.raises(ValueError, match=message):
        groups(batches, 3, partial="error")
    with pytest.raises(ValueError, match='partial="drop" needs a loader with a length'):
        groups(iter([]), 3, partial="drop")
    stream = groups(iter(batches), 3, partial="error")  # without a length: when it is met
    assert numbers_of(next(stream)) == [0, 1, 2]
    with pytest.raises(ValueError, match=message):
        numbers_of(next(stream))


def test_a_stream_is_pulled_only_by_use():
    """One without a length is looked ahead by one micro-batch at the start of a group."""
    stream = Watched(5)
    grouped = groups(stream, 3)
    group = next(grouped)
    assert (len(group), stream.pulled) == (3, 0)
    assert [stream.pulled for _ in group] == [1, 2, 3]
    assert (len(next(grouped)), stream.pulled) == (3, 3)
    stream = Watched(5)
    grouped = groups(iter(stream), 2)
    for start in (0, 2, 4):
        group = next(grouped)
        assert stream.pulled == start + 1
        assert [stream.pulled for _ in group] == [start + 1, min(start + 2, 5)]
    assert next(grouped, None) is None


@pytest.mark.parametrize("policy", [None, "pad"])
def test_a_stream_that_is_asked_whether_more_follows_stays_where_it_is(policy):
    """Else a run that goes on from there would never train on what was pulled to know it."""
    alone, stream = (
        stream_documents([[1, 2, 3, 4]] * 5, 4, 1, eos_id=0, epochs=1) for _ in range(2)
    )
    positions = [alone.state_dict(), *(alone.state_dict() for _ in alone)]
    end = policy and DataEnd(policy)
    for number, group in enumerate(groups(stream, 2, end=end)):
        assert stream.state_dict() == positions[2 * number]
        assert numbers_of(group) == [1, None if number == 2 else 1]
        if end:
            end.receive(torch.tensor(end.vote()))
        assert stream.state_dict() == positions[min(2 * number + 2, 5)]
    assert number == 2


def test_samples_are_the_rows_of_all_ranks_so_far_without_padding():
    endless = make_loader([micro_batch(0)[0]] * 4, 2)
    group = next(groups(endless, 2))
    assert (len(group), endless.samples) == (2, 0)  # it is never looked into
    assert [endless.samples for _ in group] == [2, 4]
    loader = make_loader([micro_batch(0)[0]] * 7, 2, rank=1, world=2, epochs=1)
    group = next(groups(loader, 3))
    assert (group.samples, [group.samples for _ in group]) == (0, [4, 7, 7])
    group = next(groups([micro_batch(0)], 1))
    assert numbers_of(group) == [0]
    assert group.samples is None


def test_what_a_group_leaves_is_passed_over_and_does_not_count():
    """So that the groups of all ranks stay side by side."""
    loader = make_loader([micro_batch(i)[0] for i in range(12)], 2, epochs=1, shuffle=False)
    grouped = groups(loader, 2)
    first, second = next(grouped), next(grouped)
    next(iter(first))
    assert (numbers_of(second), (first.samples, second.samples)) == ([4, 6], (2, 4))
    for group in (first, second):
        with pytest.raises(RuntimeError, match=r"has been used or skipped: .* = list\(grou"):
            next(iter(group))
