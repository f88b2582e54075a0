"""Combinations of options: a choice in the default run, all of them in ``make oracle``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest


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


def in_turn(*axes: Sequence[Any]) -> list[Any]:
    """Every combination of a value from each axis as parameters of a test.

    In the default run only every value occurs: the axes turn together.
    """
    turns = max(map(len, axes))
    chosen = [tuple(axis[turn % len(axis)] for axis in axes) for turn in range(turns)]
    return first_of(chosen, product(*axes))
