"""The order is a permutation, another one for each seed and epoch, and looks like a shuffle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgekit.data.hashing import hash_integers
from forgekit.data.permutation import permute, sample_rows

SIZES = st.one_of(st.integers(1, 600), st.sampled_from([2**12, 2**12 + 1, 2**13 - 1]))


@given(n=SIZES, key=st.integers(-(2**63), 2**64))
@settings(max_examples=40, deadline=None)
def test_every_index_is_taken_once(n, key):
    assert sorted(permute(np.arange(n), n, key)) == list(range(n))


@given(n=SIZES, key=st.integers(0, 2**32), data=st.data())
@settings(max_examples=30, deadline=None)
def test_an_index_alone_goes_where_it_goes_among_others(n, key, data):
    index = data.draw(st.integers(0, n - 1))
    assert permute(index, n, key) == permute(np.arange(n), n, key)[index]


@given(n=st.integers(30, 2000), seed=st.integers(0, 2**32), epoch=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(n, seed, epoch):
    samples = np.arange(epoch * n, (epoch + 1) * n)
    orders = [
        sample_rows(samples, n, seed).tolist(),
        sample_rows(samples + n, n, seed).tolist(),
        sample_rows(samples, n, seed + 1).tolist(),
        list(range(n)),
    ]
    assert all(sorted(order) == orders[-1] for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("n", [100, 257, 1000, 4097])
def test_statistics_are_those_of_a_shuffle(n):
    """Of a random order one place stays and one neighbour follows on average (Poisson, mean 1)."""
    orders = np.stack([permute(np.arange(n), n, key) for key in range(300)])
    spread = 4 / np.sqrt(300)
    assert abs((orders == np.arange(n)).sum(1).mean() - 1) < spread
    assert abs((np.diff(orders, axis=1) == 1).sum(1).mean() - 1) < spread
    assert abs((np.diff(orders, axis=1) == -1).sum(1).mean() - 1) < spread
    assert abs((np.diff(orders, axis=1) > 0).mean() - 0.5) < 4 / np.sqrt(12 * n * 300) + 1e-4
    counts = np.bincount(orders[:, 7] * 16 // n, minlength=16)
    expected = np.bincount(np.arange(n) * 16 // n) * 300 / n
    assert ((counts - expected) ** 2 / expected).sum() < 45  # chi-squared of 15: 1e-4 of cases


@pytest.mark.parametrize("n", [100, 257, 1000, 4097])
def test_neighbours_part(n):
    """Neighbours land at any distance, and a place says nothing of where the next ones go."""
    orders = np.stack([permute(np.arange(n), n, key) for key in range(300)])
    distances = np.diff(orders, axis=1) % n
    counts = np.bincount(distances.ravel(), minlength=n)[1:]
    expected = distances.size / (n - 1)
    excess = (((counts - expected) ** 2 / expected).sum() - (n - 2)) / np.sqrt(2 * (n - 2))
    assert abs(excess) < 5
    centred = orders - (n - 1) / 2
    for lag in (1, 2, 7):
        correlations = (centred[lag:] * centred[:-lag]).mean(axis=1) / ((n * n - 1) / 12)
        assert abs(correlations.mean()) < 5 / np.sqrt(n * (300 - lag))
        assert abs(correlations.std() * np.sqrt(n - 1) - 1) < 0.2


@given(data=st.data(), seed=st.integers(0, 2**64))
@settings(max_examples=20, deadline=None)
def test_ranges_of_several_sizes_at_once_are_those_one_by_one(data, seed):
    sizes = data.draw(st.lists(st.one_of(SIZES, st.integers(1, 2**62)), min_size=1, max_size=9))
    samples = [data.draw(st.integers(0, 2**62)) for _ in sizes]
    seeds = hash_integers(np.arange(len(sizes)), seed)
    one_by_one = [sample_rows(*each) for each in zip(samples, sizes, seeds, strict=True)]
    assert sample_rows(samples, sizes, seeds).tolist() == [int(row) for row in one_by_one]


@pytest.mark.parametrize("n", [2**40, 2**40 + 1, 10**15])
def test_ranges_too_large_to_hold_are_permuted_too(n):
    places = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])
    rows = permute(places, n, 5)
    assert len(np.unique(rows)) == rows.size
    assert 0 <= rows.min() <= rows.max() < n
    counts = np.bincount(rows * 16 // n, minlength=16)
    assert ((counts - 6250) ** 2 / 6250).sum() < 45  # chi-squared of 15: 1e-4 of cases


def test_the_order_is_pinned():
    """A change here would silently change the order of every resumed run."""
    assert sample_rows(range(6), 10, seed=3).tolist() == [2, 5, 1, 9, 6, 7]
    far = sample_rows([0, 1, 999_999, 1_000_000, 10**12], 10**6, seed=3)
    assert far.tolist() == [658298, 109115, 330889, 736272, 825934]
    assert hash_integers([0, 1, -1]).tolist() == [
        5197578548964807871,
        12035550249420947055,
        17896504823353187392,
    ]


def test_one_bit_of_the_input_turns_half_of_the_output():
    values = np.arange(1000)
    for bit in (0, 7, 40, 62):
        turned = hash_integers(values) ^ hash_integers(values ^ (1 << bit))
        assert abs(np.unpackbits(turned.view(np.uint8)).mean() - 0.5) < 0.01


def test_without_shuffle_rows_keep_their_order():
    assert sample_rows(range(7), 3, seed=5, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]


BAD = {
    "n": (lambda: permute(0, 0, 1), ValueError, "n 0 must be positive"),
    "rows": (lambda: sample_rows(0, 0, 1), ValueError, "n 0 must be positive: there are no rows"),
    "high": (lambda: permute([0, 5], 5, 1), IndexError, r"index 5 is outside range\(5\)"),
    "low": (lambda: permute(-1, 5, 1), IndexError, r"index -1 is outside range\(5\)"),
    "sample": (lambda: sample_rows(-1, 5, 1), ValueError, "sample -1 is negative"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
