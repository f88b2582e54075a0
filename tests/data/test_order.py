"""Shares are exact, every row has its turn, and only the number of a sample counts."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forgekit as fk
from forgekit.data.order import BLOCK, sample_rows
from forgekit.hashing import hash_integers, permute

FAR = 2**61
WEIGHTS = st.one_of(st.integers(1, 9), st.floats(0.05, 20))


@pytest.mark.parametrize("n", [100, 1000, 1024])
def test_every_index_is_taken_once_as_in_a_shuffle(n):
    """Of a random order one place stays and one neighbour follows on average (Poisson, mean 1)."""
    orders = np.stack([permute(np.arange(n), n, key) for key in range(300)])
    assert (np.sort(orders) == np.arange(n)).all()
    steps = np.diff(orders, axis=1)
    for often in (orders == np.arange(n), steps == 1, steps == -1):
        assert abs(often.sum(1).mean() - 1) < 4 / np.sqrt(300)
    assert abs((steps > 0).mean() - 0.5) < 4 / np.sqrt(12 * n * 300) + 1e-4


def test_ranges_too_large_to_hold_are_permuted_too():
    n = 2**40 + 1
    places = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])
    rows = permute(places, n, 5)
    assert len(np.unique(rows)) == rows.size
    assert 0 <= rows.min() <= rows.max() < n


def test_the_rows_are_pinned():
    """A change here would silently change the order of every resumed run."""
    assert sample_rows(range(6), 10, seed=3).tolist() == [2, 5, 1, 9, 6, 7]
    assert sample_rows(range(4), 256, seed=3).tolist() == [91, 229, 234, 74]
    assert sample_rows(range(4), 257, seed=3).tolist() == [222, 77, 35, 120]
    far = sample_rows([0, 1, 999_999, 1_000_000, 10**12], 10**6, seed=3)
    assert far.tolist() == [658298, 109115, 330889, 736272, 825934]
    numbers = hash_integers([0, 1, -1]).tolist()
    assert numbers == [5197578548964807871, 12035550249420947055, 17896504823353187392]
    phases = [fk.Phase(1000, {"b": 2.0})]
    order = fk.make_order({"a": 1000, "b": 300}, {"a": 0.7, "b": 0.3}, seed=3, phases=phases)
    found = [order(sample) for sample in (0, 1, 999, 1000, 10**9, 10**12, FAR)]
    names, rows = zip(*found, strict=True)
    assert ("".join(names), rows) == ("bbbbbbb", (74, 34, 259, 234, 239, 41, 28))
    assert order.fingerprint[:16] == "dc198957f9031726"


@st.composite
def orders(draw, longest=4):
    """An order of some sources with some phases; at least the first source always comes."""
    names = "abcdef"[: draw(st.integers(1, longest))]
    sizes = {name: draw(st.integers(1, 400)) for name in names}
    weights = {name: draw(st.one_of(WEIGHTS, st.just(0))) for name in names} | {"a": draw(WEIGHTS)}
    starts = sorted(draw(st.sets(st.integers(0, 5000), max_size=3)))
    changes = st.dictionaries(st.sampled_from(names), WEIGHTS)
    phases = [fk.Phase(start, draw(changes), 0.5) for start in starts]
    seed = draw(st.integers(-(2**40), 2**70))
    temperature = draw(st.sampled_from([1.0, 0.5, 3.0, float("inf")]))
    return fk.make_order(sizes, weights, temperature=temperature, seed=seed, phases=phases)


def walks(order, start, count):
    """The rows of each source, in the sequence in which they come."""
    sources, rows = order.span(start, count)
    return [rows[sources == source].tolist() for source in range(len(order.sources))]


@given(order=orders())
@settings(max_examples=20, deadline=None)
def test_each_source_is_walked_epoch_by_epoch_across_all_phases(order):
    for walk, size in zip(walks(order, 0, 8000), order.sizes, strict=True):
        epochs = [tuple(walk[at : at + size]) for at in range(0, len(walk), size)]
        for epoch in epochs:
            assert len(epoch) == size or epoch == epochs[-1]
            assert len({row for row in epoch if 0 <= row < size}) == len(epoch)
        if size > 25:
            assert len(set(epochs)) == len(epochs)
            assert tuple(range(size)) not in epochs


@given(
    order=orders(),
    start=st.one_of(st.integers(0, 9000), st.integers(0, FAR)),
    count=st.integers(1, 3000),
    data=st.data(),
)
@settings(max_examples=25, deadline=None)
def test_a_span_is_its_samples_one_by_one_and_what_it_takes_can_be_counted(
    order, start, count, data
):
    sources, rows = order.span(start, count)
    order = pickle.loads(pickle.dumps(order))  # as for a worker that is a process
    for at in data.draw(st.lists(st.integers(0, count - 1), max_size=5)):
        assert order(start + at) == (order.sources[sources[at]], rows[at])
        some_sources, some_rows = order.span(start + at, count - at)
        assert (some_sources == sources[at:]).all()
        assert (some_rows == rows[at:]).all()
    shuffled = np.random.default_rng(0).permutation(count)
    for found, expected in zip(order.find(start + shuffled), (sources, rows), strict=True):
        assert (found == expected[shuffled]).all()
    counts = np.bincount(sources, minlength=len(order.sources))
    assert (order.taken(start + count) - order.taken(start)).tolist() == counts.tolist()
    assert order.taken(start).sum() == start
    assert order.shares(start, count).tolist() == (counts / count).tolist()


@pytest.mark.parametrize(
    "parts",
    [[7, 3], [0, 1, 0, 2], [10**7, 100, 17, 6 * 10**6, 333], range(1, 40)],
    ids=["two", "none", "few", "many"],
)
@pytest.mark.parametrize("first", [61, 10**9])
def test_shares_are_right_to_a_sample_of_each_source_in_every_block(parts, first):
    """And roundings do not add up; the largest source takes what those of the others leave."""
    weights = {f"s{number}": part for number, part in enumerate(parts)}
    order = fk.make_order(dict.fromkeys(weights, 10), weights, seed=1)
    shares = [BLOCK * part / sum(parts) for part in parts]
    tolerance = [len(parts) if part == max(parts) else 1.001 for part in parts]
    before = order.taken(first * BLOCK)
    for blocks in range(first + 1, first + 20):
        taken = order.taken(blocks * BLOCK)
        assert (abs(taken - before - shares) < tolerance).all()
        expected = np.multiply(shares, blocks)
        assert (abs(taken - expected) < tolerance + 1e-6 * expected).all()
        before = taken


def test_many_sources_never_take_more_than_there_is():
    """Of 300 like ones the largest could not give each its half a sample in 16,384."""
    names = [f"s{number}" for number in range(300)]
    order = fk.make_order(dict.fromkeys(names, 10), dict.fromkeys(names, 1.0) | {"s9": 1.1})
    counts = [order.taken(stop) for stop in range(0, 400_000, 50_021)]
    assert all((after >= before).all() for before, after in itertools.pairwise(counts))
    assert np.bincount(order.span(0, 90_000)[0], minlength=300).min() > 280


@pytest.mark.parametrize("start", [0, 999, BLOCK + 500])
def test_a_phase_starts_at_its_sample_and_inherits_nothing(start):
    sizes, weights = {"a": 70, "b": 50, "c": 9}, {"a": 3, "b": 1, "c": 0}
    phases = fk.Phase(start, {"a": 0, "c": 3}), fk.Phase(start + 2 * BLOCK, {"b": 9}, 0.1)
    plain, order = (fk.make_order(sizes, weights, seed=2, phases=each) for each in ((), phases))
    for rows, expected in zip(order.span(0, start), plain.span(0, start), strict=True):
        assert (rows == expected).all()
    blocks = order.span(start, 4 * BLOCK)[0].reshape(4, BLOCK)
    counts = [np.bincount(sources, minlength=3).tolist() for sources in blocks]
    quarter = BLOCK // 4
    assert counts == 2 * [[0, quarter, 3 * quarter]] + 2 * [[quarter, 3 * quarter, 0]]
    later = start + 2 * BLOCK, 10**6 * BLOCK
    assert order.shares(*later).tolist() == [0.25, 0.75, 0]


@pytest.mark.parametrize(("temperature", "share"), [(2.0, 0.8), (0.5, 256 / 257), (np.inf, 0.5)])
def test_temperature_is_a_root_of_the_weights_in_every_phase(temperature, share):
    phases = [fk.Phase(2 * BLOCK, {"a": 1, "b": 16})]
    sizes, weights = {"a": 1600, "b": 100, "c": 50}, {"a": 16, "b": 1, "c": 0}
    order = fk.make_order(sizes, weights, temperature=temperature, phases=phases)
    assert order.shares(0, 2 * BLOCK) == pytest.approx([share, 1 - share, 0], abs=5e-4)
    later = order.shares(2 * BLOCK, BLOCK * 10**6)
    assert later == pytest.approx([1 - share, share, 0], abs=1e-8)


def test_seeds_and_names_give_walks_of_their_own():
    sizes = {"a": 500, "b": 500}
    first = [walks(fk.make_order(sizes, seed=seed), 0, 1000) for seed in (0, 1)]
    walked = [tuple(walk[:400]) for order_walks in first for walk in order_walks]
    assert len(set(walked)) == 4
    mixes = {fk.make_order(sizes, seed=seed).span(0, 1024)[0].tobytes() for seed in range(9)}
    assert len(mixes) == 9
    other = fk.make_order({"new": 9, "b": 500, "a": 500}, {"new": 0, "a": 1, "b": 1})
    assert tuple(walks(other, 0, 1024)[2][:400]) == walked[0]


def order_of(*phases, **options):
    return fk.make_order(**{"sizes": {"a": 40, "b": 60}, "phases": phases, **options})


def test_a_fingerprint_is_that_of_the_samples_not_of_their_description():
    alike = [
        order_of(),
        order_of(weights={"a": 0.4, "b": 0.6}),
        order_of(weights={"a": 16, "b": 36}, temperature=2.0, seed=np.int64(0)),
        order_of(fk.Phase(0, {"a": 4, "b": 6}), weights={"a": 9, "b": 1}),
        order_of(fk.Phase(500, lr_scale=0.1), fk.Phase(900, {"a": 0.4})),
    ]
    assert len({order.fingerprint for order in alike}) == 1
    assert len({tuple(map(bytes, order.span(0, 3000))) for order in alike}) == 1
    others = [
        order_of(sizes={"a": 41, "b": 60}),
        order_of(sizes={"a": 40, "c": 60}),
        order_of(sizes={"b": 60, "a": 40}),
        order_of(weights=BOTH),
        order_of(seed=1),
        order_of(fk.Phase(10**6, {"a": 1})),
    ]
    assert len({order.fingerprint for order in [*others, *alike]}) == 1 + len(others)


def test_a_phase_to_come_may_still_change():
    plans = [[], [fk.Phase(2000, {"a": 1})], [fk.Phase(2001, {"a": 1})]]
    orders = [order_of(*plan) for plan in plans]
    for samples, kinds in ((0, 1), (2000, 1), (2001, 2), (2002, 3)):
        assert len({order.fingerprint_at(samples) for order in orders}) == kinds
        if kinds == 1:
            assert len({tuple(map(bytes, order.span(0, samples))) for order in orders}) == 1
    assert len({tuple(map(bytes, order.span(0, 2500))) for order in orders}) == 3


BOTH = {"a": 1, "b": 1}
NOBODY = fk.Phase(9, {"a": 0, "b": 0})
BAD = {
    '^weights lack "b"': lambda: order_of(weights={"a": 1}),
    '^weights name "c"; the sources are "a", "b"': lambda: order_of(weights=BOTH | {"c": 1}),
    r"at sample 9: weights\['a'\] is nan": lambda: order_of(fk.Phase(9, {"a": np.nan})),
    "^the phase at sample 9: weights are all 0": lambda: order_of(NOBODY),
    "^temperature nan must be above 0": lambda: order_of(temperature=np.nan),
    "^a phase at sample 3 follows one at sample 9": lambda: order_of(fk.Phase(9), fk.Phase(3)),
    "the share of 'b' is 5.0e-07": lambda: order_of(weights={"a": 1, "b": 5e-7}),
    r"index -1 is outside range\(5\)": lambda: permute([0, -1], 5, 1),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_an_order_is_refused(message):
    with pytest.raises((ValueError, IndexError), match=message):
        BAD[message]()
