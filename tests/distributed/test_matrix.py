"""The table covers what it says."""

from __future__ import annotations

import itertools

import pytest
from distributed.matrix import LAYOUTS, default_cells, factors_of, full_cells, pairwise

CELLS = default_cells(list(LAYOUTS))


def test_the_default_run_has_at_least_200_cells_and_all_differ():
    assert len(set(CELLS)) == len(CELLS) >= 200


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_of_values_of_two_factors_occurs_in_every_layout(layout):
    cells = [cell for cell in CELLS if cell.layout == layout and cell.dtype == "fp32"]
    factors = factors_of(layout)
    for first, second in itertools.combinations(factors, 2):
        pairs = {(getattr(cell, first), getattr(cell, second)) for cell in cells}
        assert pairs == set(itertools.product(factors[first], factors[second]))
    assert {cell.dtype for cell in CELLS if cell.layout == layout} == {"fp32", "fp64", "bf16"}


def test_pairwise_rows_cover_factors_of_any_size():
    factors = {"a": range(4), "b": range(3), "c": range(2), "d": range(3)}
    rows = pairwise(factors, seed=1)
    assert len(rows) < 4 * 3 * 2 * 3 / 4
    for first, second in itertools.combinations(factors, 2):
        pairs = {(row[first], row[second]) for row in rows}
        assert pairs == set(itertools.product(factors[first], factors[second]))


def test_the_full_product_holds_every_combination_and_the_default_run():
    product = full_cells(list(LAYOUTS))
    assert len(product) == len(LAYOUTS) * 2 * 2 * 2 * 3 * 2
    assert {cell for cell in CELLS if cell.dtype == "fp32"} < set(product)
