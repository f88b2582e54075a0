"""Combinations of options: a covering choice in the default run, all of them in ``make oracle``."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

__all__ = ["covering", "first_of", "in_turn", "one_at_a_time", "pairwise", "some_of"]

TRIES = 20


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of a value from each axis, as parameters of a test.

    In the default run every pair of values of any two axes occurs; the combinations that no pair
    needs are marked ``oracle``.
    """
    numbers = {str(axis): range(len(values)) for axis, values in enumerate(axes)}
    chosen = [
        tuple(axis[number] for axis, number in zip(axes, row.values(), strict=True))
        for row in pairwise(numbers, seed=0)
    ]
    return first_of(chosen, itertools.product(*axes))


def first_of(chosen: Sequence[tuple[Any, ...]], every: Iterable[tuple[Any, ...]]) -> list[Any]:
    """``every`` combination as parameters; those that are not chosen are marked ``oracle``."""
    rest = [row for row in every if row not in chosen]
    parameters = [pytest.param(*row) for row in chosen]
    return parameters + [pytest.param(*row, marks=pytest.mark.oracle) for row in rest]


def some_of(names: Iterable[str], *rest: str) -> list[Any]:
    """Names as parameters of a test, of which the ``rest`` is marked ``oracle``."""
    names = list(names)
    assert set(rest) < set(names)
    return first_of([(n,) for n in names if n not in rest], [(n,) for n in names])


def one_at_a_time(*axes: Iterable[Any]) -> list[Any]:
    """As ``covering``, but in the default run each axis varies while the others are at their first.

    The first values are then the cheap ones.
    """
    values = [list(axis) for axis in axes]
    firsts = [axis[0] for axis in values]
    chosen = dict.fromkeys(
        (*firsts[:place], value, *firsts[place + 1 :])
        for place, axis in enumerate(values)
        for value in axis
    )
    return first_of(list(chosen), itertools.product(*values))


def in_turn(*axes: Sequence[Any]) -> list[Any]:
    """As ``covering``, but in the default run only every value occurs: the axes turn together."""
    turns = max(map(len, axes))
    chosen = [tuple(axis[turn % len(axis)] for axis in axes) for turn in range(turns)]
    return first_of(chosen, itertools.product(*axes))


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Rows in which every pair of values of any two factors occurs, few and deterministic.

    Greedy from several shuffles; ends early at the least possible number, the product of the two
    largest factors.

    Examples:
        >>> len(pairwise({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, seed=0))
        4
    """
    generator = random.Random(seed)
    rows = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    least = math.prod(sorted(map(len, factors.values()))[-2:])
    best = rows
    for _ in range(TRIES):
        generator.shuffle(rows)
        best = min(best, _greedy(rows), key=len)
        if len(best) == least:
            break
    return best


def _greedy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = [frozenset(itertools.combinations(row.items(), 2)) for row in rows]
    left = set().union(*pairs)
    chosen = []
    while left:
        index = max(range(len(rows)), key=lambda i: len(pairs[i] & left))
        chosen.append(rows[index])
        left -= pairs[index]
    return chosen
