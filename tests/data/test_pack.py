"""Packing against naive packers, and the rules that every method keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgekit.data.packing import Bins, pack

METHODS = ["best_fit", "sequential"]


def in_bins(bins, column="documents"):
    """Lists of one column's numbers, bin by bin."""
    cuts = bins.offsets[1:-1]
    return [part.tolist() for part in np.split(getattr(bins, column), cuts)] if len(bins) else []


def naive_best_fit(rooms, capacity):
    """Deal from the largest to the smallest, equal ones in order, one at a time."""
    left, bins = [], []
    for item in sorted(range(len(rooms)), key=lambda i: -rooms[i]):
        fitting = [number for number, space in enumerate(left) if space >= rooms[item]]
        if not fitting:
            left.append(capacity)
            bins.append([])
            fitting = [len(left) - 1]
        number = min(fitting, key=lambda n: left[n])
        left[number] -= rooms[item]
        bins[number].append(item)
    return bins


def naive_next_fit(rooms, capacity):
    bins, left = [], 0
    for item, room in enumerate(rooms):
        if room > left:
            bins.append([])
            left = capacity
        bins[-1].append(item)
        left -= room
    return bins


@st.composite
def problems(draw, longest=1.0):
    """Lengths, a capacity, and an alignment that divides it."""
    align = draw(st.integers(1, 4))
    capacity = align * draw(st.integers(1, 12))
    length = st.integers(0, int(capacity * longest))
    return draw(st.lists(length, max_size=60)), {"capacity": capacity, "align": align}


@given(problems())
@settings(max_examples=150, deadline=None)
def test_bins_are_those_of_the_naive_packers(problem):
    """Of best fit the rooms that are left: which of two with equal room is taken, is open."""
    lengths, options = problem
    capacity, align = options.values()
    there = [i for i, length in enumerate(lengths) if length]
    rooms = [-(-lengths[i] // align) * align for i in there]
    expected = naive_best_fit(rooms, capacity)
    taken = in_bins(pack(lengths, **options), "lengths")
    assert sorted(sum(-(-n // align) * align for n in each) for each in taken) == sorted(
        sum(rooms[item] for item in each) for each in expected
    )
    following = naive_next_fit(rooms, capacity)
    found = pack(lengths, method="sequential", **options)
    assert in_bins(found) == [[there[i] for i in each] for each in following]


@pytest.mark.parametrize("method", METHODS)
@given(problem=problems(longest=3.5), long=st.sampled_from(["split", "drop"]))
@settings(max_examples=80, deadline=None)
def test_every_token_is_in_a_bin_once_and_every_rule_is_kept(method, problem, long):
    lengths, options = problem
    bins = pack(lengths, method=method, long=long, **options)
    capacity, align = options["capacity"], options["align"]
    kept = [0 if long == "drop" and length > capacity else length for length in lengths]
    assert bins.dropped == sum(length > capacity for length in lengths if long == "drop")
    assert (bins.capacity, bins.align) == (capacity, align)

    pieces = zip(bins.documents.tolist(), bins.starts.tolist(), bins.lengths.tolist(), strict=True)
    tokens = [(d, token) for d, start, n in pieces for token in range(start, start + n)]
    assert sorted(tokens) == [(d, token) for d, n in enumerate(kept) for token in range(n)]
    whole = [d for d, n in enumerate(kept) if 0 < n <= capacity]
    assert [bins.documents.tolist().count(d) for d in whole] == [1] * len(whole)
    for documents, sizes in zip(in_bins(bins), in_bins(bins, "lengths"), strict=True):
        assert sum(-(-size // align) * align for size in sizes) <= capacity
        assert documents == sorted(set(documents))
    if method == "sequential":
        assert np.lexsort((bins.starts, bins.documents)).tolist() == list(range(len(bins.starts)))


def lognormal(documents, median=500, sigma=1.2, longest=8192):
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, documents)
    return lengths.clip(1, longest).astype(np.int64)


def test_bins_of_a_corpus_come_within_one_of_the_lower_bound():
    lengths = lognormal(200_000)
    bins = pack(lengths, 8192)
    assert -(-int(lengths.sum()) // 8192) == 23_828
    assert len(bins) <= 23_829
    assert bins.tokens == lengths.sum()
    assert bins.fill > 0.9999


PINNED = {"best_fit": "94668e7e450a3ba7", "sequential": "fabfeee0c86b5c35"}


@pytest.mark.parametrize("method", METHODS)
def test_bins_are_the_same_on_every_machine_and_version(method):
    """A cache or a resumed run would otherwise go on with other rows."""
    lengths = (np.arange(1, 5000) ** 2 % 3001).astype(np.uint16)
    assert pack(lengths, 2048, method=method, align=4).fingerprint[:16] == PINNED[method]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_makes_no_bins(method, lengths):
    bins = pack(lengths, 8, method=method)
    assert (len(bins), bins.offsets.tolist(), bins.tokens, bins.fill) == (0, [0], 0, 0.0)


def test_long_documents_are_cut_at_multiples_of_the_capacity():
    bins = pack([3, 20, 2], 8, method="sequential")
    assert in_bins(bins) == [[0], [1], [1], [1, 2]]
    assert in_bins(bins, "starts") == [[0], [0], [8], [16, 0]]
    assert in_bins(bins, "lengths") == [[3], [8], [8], [4, 2]]
    assert in_bins(pack([8, 1], 8, long="error")) == [[0], [1]]


BAD = {
    "capacity 0 must be at least 1": {"capacity": 0},
    "capacity 100 must be divisible by align 16; .* 96 and 112": {"capacity": 100, "align": 16},
    'method is .ffd.; it is one of "best_fit", "sequential"': {"method": "ffd"},
    'long is .cut.; it is one of "split", "error", "drop"': {"long": "cut"},
    r'document 1 has 20 tokens; a bin has 8 positions\. Pass long="spl': {
        "lengths": [3, 20, 9],
        "long": "error",
    },
    "length -2 must be at least 0": {"lengths": [1, -2]},
    "Cannot cast array data": {"lengths": [1.5]},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with pytest.raises((ValueError, TypeError), match=message):
        pack(**{"lengths": [3, 4], "capacity": 8, **BAD[message]})


def test_bins_may_be_ones_own():
    bins = Bins([0, 2, 3], [0, 2, 1], [0, 0, 0], [5, 2, 6], align=4)
    assert (bins.capacity, bins.tokens, len(bins), bins.documents.dtype) == (12, 13, 2, np.int64)
    for offsets, starts in (([0, 2, 3], [0, 0]), ([0, 1, 2], [0, 0, 0])):
        with pytest.raises(ValueError, match="offsets go from 0 to the number of pieces"):
            Bins(offsets, [0, 2, 1], starts, [5, 2, 6])
