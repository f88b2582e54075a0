"""What a sample number costs: the same anywhere, and memory that no data set makes grow."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from pairs import Times, ratio, take_turns

import forgekit as fk

ROUNDS = 15
SIZES = {"code": 10**7, "prose": 6 * 10**6, "mathematics": 10**5}
WEIGHTS = {"code": 0.6, "prose": 0.3, "mathematics": 0.1}
PHASES = (fk.Phase(10**6, {"code": 0.1}), fk.Phase(10**8, {"mathematics": 0.5}))
FAR = 10**9
MOST_FAR = 2.0

START, AWAY = "at the start", "at 10^9"
ONE, CALLS = "order(i), far apart", 20
MANY, COUNT = "order.span", 16 * 1024
NEXT, ROWS, PULLED = "the next 8", 8, 128

ARRAYS, FOUND = "arrays in memory, numpy", "order.span"


def _order():
    return fk.make_order(SIZES, WEIGHTS, phases=PHASES)


def _fresh(start: int, distance: int, use: Callable[[int], object], calls: int = 1):
    """Use one number after the other, none a second time."""
    numbers = itertools.count(start, distance)

    def run() -> None:
        for _ in range(calls):
            use(next(numbers))

    return run


@pytest.fixture(scope="module")
def places() -> dict[str, Times]:
    order = _order()
    ways = {
        ONE: lambda start: _fresh(start, 5003, order, CALLS),
        MANY: lambda start: _fresh(start, COUNT, lambda i: order.span(i, COUNT)),
        NEXT: lambda start: _fresh(start, ROWS, lambda i: order.span(i, ROWS), PULLED),
    }
    return {name: take_turns({START: way(0), AWAY: way(FAR)}, ROUNDS) for name, way in ways.items()}


@pytest.mark.parametrize("name", [START, AWAY])
@pytest.mark.parametrize(("way", "samples"), [(ONE, CALLS), (MANY, COUNT), (NEXT, ROWS * PULLED)])
def test_distance(show, places, way, samples, name):
    times = places[way]
    best = min(times[name]) / min(times[START])
    microseconds = min(times[name]) / samples * 1e6
    show(way, times, name, best_to_best=best, microseconds_per_sample=microseconds)
    if name == AWAY:
        assert best <= MOST_FAR, f"{way}: {best:.2f}x the time of the start"


@pytest.fixture(scope="module")
def spans() -> Times:
    """What one would write without an order: sources drawn at random, rows from shuffled arrays.

    It holds every row's number, knows nothing of what was taken before, and starts in the middle
    only by drawing all that comes before.
    """
    order = _order()
    rng = np.random.default_rng(0)
    shuffled = [rng.permutation(size) for size in SIZES.values()]
    weights = np.array([*WEIGHTS.values()])
    taken = np.zeros(len(SIZES), dtype=np.int64)

    def draw(_: int) -> np.ndarray:
        sources = rng.choice(len(SIZES), COUNT, p=weights)
        rows = np.empty(COUNT, dtype=np.int64)
        for source, array in enumerate(shuffled):
            here = np.flatnonzero(sources == source)
            rows[here] = array[(taken[source] + np.arange(len(here))) % len(array)]
            taken[source] += len(here)
        return rows

    entries = {
        ARRAYS: _fresh(0, COUNT, draw),
        FOUND: _fresh(0, COUNT, lambda i: order.span(i, COUNT)),
    }
    return take_turns(entries, ROUNDS)


@pytest.mark.parametrize("name", [ARRAYS, FOUND])
def test_spans(show, spans, name):
    rate = COUNT / sorted(spans[name])[ROUNDS // 2]
    group = f"{COUNT} samples of {len(SIZES)} sources"
    show(group, spans, name, ratio=ratio(spans, name, ARRAYS), samples_per_second=rate)


def test_memory_does_not_grow_with_the_data():
    peaks = []
    for scale in (1, 1, 10**6):  # the first warms up
        tracemalloc.start()
        order = fk.make_order({name: size * scale for name, size in SIZES.items()}, WEIGHTS)
        for start in (0, FAR, FAR * 10**3):
            order.span(start, COUNT)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] <= 1.05 * peaks[1], f"{peaks[1]} bytes became {peaks[2]}"
    assert peaks[2] < 4e6
