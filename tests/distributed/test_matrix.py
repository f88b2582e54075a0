"""The table covers what it says."""

from __future__ import annotations

import itertools

import pytest
from distributed.matrix import FACTORS, LAYOUTS, default_cells, factors_of, full_cells, pairwise

CELLS = default_cells(list(LAYOUTS))


def test_the_default_run_has_at_least_200_cells_and_all_differ():
    assert len(set(CELLS)) == len(CELLS) >= 200


SMALL = [name for name, row in LAYOUTS.items() if row.world == 2]
LARGE = [name for name in LAYOUTS if name not in SMALL]


def _fp32(layout):
    return [cell for cell in CELLS if cell.layout == layout and cell.dtype == "fp32"]


def _pairs(cells, first, second):
    return {(getattr(cell, first), getattr(cell, second)) for cell in cells}


@pytest.mark.parametrize("layout", SMALL)
def test_every_pair_of_values_of_two_factors_occurs_in_a_layout_of_two_ranks(layout):
    factors = factors_of(layout)
    for first, second in itertools.combinations(factors, 2):
        pairs = set(itertools.product(factors[first], factors[second]))
        assert _pairs(_fp32(layout), first, second) == pairs
    assert {cell.dtype for cell in CELLS if cell.layout == layout} == {"fp32", "fp64", "bf16"}


@pytest.mark.parametrize("layout", LARGE)
def test_every_value_of_every_factor_occurs_in_a_larger_layout(layout):
    for factor, values in factors_of(layout).items():
        assert {getattr(cell, factor) for cell in _fp32(layout)} == set(values)
    dtypes = {cell.dtype for cell in CELLS if cell.layout == layout}
    assert len(dtypes) == (1 if LAYOUTS[layout].dear else 2)


def test_every_pair_of_values_occurs_among_the_larger_layouts():
    cells = [cell for layout in LARGE for cell in _fp32(layout)]
    for first, second in itertools.combinations(FACTORS, 2):
        pairs = set(itertools.product(FACTORS[first], FACTORS[second]))
        assert _pairs(cells, first, second) == pairs


def test_another_dtype_occurs_in_larger_layouts_of_every_dimension():
    for dimension in ("dp_shard", "dp_replicate", "cp", "tp", "pp", "ep"):
        alike = [cell for cell in CELLS if cell.layout in LARGE and cell.row.size(dimension) > 1]
        assert len({cell.dtype for cell in alike}) >= 2
    assert {cell.dtype for cell in CELLS if cell.layout in LARGE} == {"fp32", "fp64", "bf16"}


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
