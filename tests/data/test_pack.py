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


def naive(rooms, capacity, choose):
    """Deal from the largest to the smallest, equal ones in order, one at a time."""
    left, bins = [], []
    for item in sorted(range(len(rooms)), key=lambda i: -rooms[i]):
        fitting = [number for number, space in enumerate(left) if space >= rooms[item]]
        if not fitting:
            left.append(capacity)
            bins.append([])
            fitting = [len(left) - 1]
        number = choose(fitting, left)
        left[number] -= rooms[item]
        bins[number].append(item)
    return bins


def naive_best_fit(rooms, capacity):
    return naive(rooms, capacity, lambda fitting, left: min(fitting, key=lambda n: left[n]))


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
def problems(draw, longest=1.0, **options):
    """Lengths, a capacity, and an alignment that divides it."""
    align = draw(st.integers(1, 4))
    capacity = align * draw(st.integers(1, 12))
    length = st.integers(0, int(capacity * longest))
    return draw(st.lists(length, max_size=60)), {"capacity": capacity, "align": align, **options}


@given(problems())
@settings(max_examples=300, deadline=None)
def test_best_fit_leaves_the_rooms_that_the_naive_packer_leaves(problem):
    """Which of two bins with equal room takes a document is open; no number depends on it."""
    lengths, options = problem
    rooms = [-(-length // options["align"]) * options["align"] for length in lengths if length]
    expected = naive_best_fit(rooms, options["capacity"])
    found = pack(lengths, method="best_fit", **options)
    taken = [sum(-(-n // options["align"]) for n in each) for each in in_bins(found, "lengths")]
    assert sorted(t * options["align"] for t in taken) == sorted(
        sum(rooms[item] for item in each) for each in expected
    )


@given(problems())
@settings(max_examples=200, deadline=None)
def test_sequential_is_next_fit(problem):
    lengths, options = problem
    there = [i for i, length in enumerate(lengths) if length]
    rooms = [-(-lengths[i] // options["align"]) * options["align"] for i in there]
    expected = naive_next_fit(rooms, options["capacity"])
    found = pack(lengths, method="sequential", **options)
    assert in_bins(found) == [[there[i] for i in each] for each in expected]


@pytest.mark.parametrize("method", METHODS)
@given(problem=problems(longest=3.5), long=st.sampled_from("sd"))
@settings(max_examples=200, deadline=None)
def test_every_token_is_in_a_bin_once_and_every_rule_is_kept(method, problem, long):
    lengths, options = problem
    long = {"s": "split", "d": "drop"}[long]
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


def test_best_fit_agrees_with_the_naive_one_on_thousands_of_documents():
    lengths = lognormal(3_000, median=60, longest=1024)
    assert len(pack(lengths, 1024)) == len(naive_best_fit(lengths.tolist(), 1024))


PINNED = {"best_fit": "94668e7e450a3ba7", "sequential": "fabfeee0c86b5c35"}


@pytest.mark.parametrize("method", METHODS)
def test_bins_are_the_same_on_every_machine_and_version(method):
    """A cache or a resumed run would otherwise go on with other rows."""
    numbers = np.arange(1, 5000)
    for lengths in (numbers**2 % 3001, (numbers**2 % 3001).astype(np.uint16)):
        bins = pack(lengths, 2048, method=method, align=4)
        assert bins.fingerprint[:16] == PINNED[method]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [[], [0, 0], np.zeros(0, dtype=np.float64)])
def test_nothing_makes_no_bins(method, lengths):
    bins = pack(lengths, 8, method=method)
    assert (len(bins), bins.offsets.tolist(), bins.tokens, bins.fill) == (0, [0], 0, 0.0)


def test_long_documents_are_cut_at_multiples_of_the_capacity():
    bins = pack([3, 20, 2], 8, method="sequential")
    assert in_bins(bins) == [[0], [1], [1], [1, 2]]
    assert in_bins(bins, "starts") == [[0], [0], [8], [16, 0]]
    assert in_bins(bins, "lengths") == [[3], [8], [8], [4, 2]]


def test_long_documents_are_refused_or_dropped_as_asked():
    with pytest.raises(
        ValueError,
        match=r"document 1 has 20 tokens; a bin has 8 positions, and 1 more .*long=\"spl",
    ):
        pack([3, 20, 9], 8, long="error")
    assert in_bins(pack([8, 1], 8, long="error")) == [[0], [1]]
    bins = pack([3, 20, 9], 8, long="drop")
    assert (in_bins(bins), bins.dropped) == ([[0]], 2)


BAD = {
    "capacity": ({"capacity": 0}, "capacity 0 must be at least 1"),
    "divisible": (
        {"capacity": 100, "align": 16},
        "capacity 100 must be divisible by align 16; the nearest are 96 and 112",
    ),
    "method": (
        {"method": "ffd"},
        'method is .ffd.; it is one of "best_fit", "sequential"',
    ),
    "long": ({"long": "cut"}, 'long is .cut.; it is one of "split", "error", "drop"'),
    "negative": ({"lengths": [1, -2]}, "document 1 has length -2; lengths are tokens, 0 or more"),
    "float": (
        {"lengths": [1.5]},
        r"lengths must be integers \[documents\], not float64 of shape \(1,\)",
    ),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        pack(**{"lengths": [3, 4], "capacity": 8, **options})


def test_bins_may_be_ones_own():
    bins = Bins([0, 2, 3], [0, 2, 1], [0, 0, 0], [5, 2, 6], align=4)
    assert (bins.capacity, bins.tokens, len(bins)) == (12, 13, 2)
    assert bins.documents.dtype == np.int64
    with pytest.raises(
        ValueError, match=r"shapes \[\[3\], \[2\], \[3\]\], and offsets from \[0\] to"
    ):
        Bins([0, 2, 3], [0, 2, 1], [0, 0], [5, 2, 6])
    with pytest.raises(ValueError, match=r"from \[0\] to \[2\]; they must go from 0 to the number"):
        Bins([0, 1, 2], [0, 2, 1], [0, 0, 0], [5, 2, 6])
