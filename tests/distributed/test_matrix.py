"""The table covers what it says."""

from __future__ import annotations

import itertools

import attrs
import pytest
from covering import covering, in_turn, one_at_a_time, pairwise
from distributed import proofs
from distributed.matrix import FACTORS, LAYOUTS, default_cells, factors_of, full_cells, some_cells

CELLS = default_cells()
SINGLE = [cell for cell in CELLS if cell.dtype == "fp32"]


def test_each_layout_occurs_in_float32_and_no_cell_twice():
    assert [cell.layout for cell in SINGLE] == list(LAYOUTS)
    assert len(set(CELLS)) == len(CELLS) < 2 * len(LAYOUTS)


@pytest.mark.parametrize("larger", [False, True], ids=["two ranks", "more ranks"])
def test_every_pair_of_values_occurs_among_the_layouts(larger):
    cells = [cell for cell in SINGLE if (cell.row.world > 2) == larger]
    for first, second in itertools.combinations(FACTORS, 2):
        pairs = set(itertools.product(FACTORS[first], FACTORS[second]))
        assert _pairs(cells, first, second) == pairs
    for factor, values in FACTORS.items():
        taken = {(cell.row.micros.index(cell.micros), getattr(cell, factor)) for cell in cells}
        assert taken == set(itertools.product((0, 1), values))


def _pairs(cells, first, second):
    return {(getattr(cell, first), getattr(cell, second)) for cell in cells}


@pytest.mark.parametrize("dimension", ["dp_shard", "dp_replicate", "cp", "tp", "pp", "ep"])
def test_every_value_of_every_factor_occurs_in_layouts_of_every_dimension(dimension):
    alike = [cell for cell in CELLS if cell.row.size(dimension) > 1]
    for factor, values in FACTORS.items():
        assert {getattr(cell, factor) for cell in alike} == set(values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_value_of_every_factor_occurs_in_the_table_of_errors(layout):
    for factor, values in factors_of(layout).items():
        assert {getattr(cell, factor) for cell in some_cells(layout)} == set(values)


@pytest.mark.parametrize("dimension", ["dp_shard", "dp_replicate", "cp", "tp", "pp", "ep"])
def test_every_dtype_occurs_in_layouts_of_every_dimension(dimension):
    alike = [cell for cell in CELLS if cell.row.size(dimension) > 1]
    assert {cell.dtype for cell in alike} == {"fp32", "fp64", "bf16"}


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
    assert {attrs.evolve(cell, steps=5) for cell in SINGLE} < set(product)


def test_what_is_not_chosen_is_left_to_the_oracle():
    axes = ("a", "b", "c", "d"), (1, 2, 3), (True, False)
    product = set(itertools.product(*axes))
    for every, least in ((covering(*axes), 12), (one_at_a_time(*axes), 7), (in_turn(*axes), 4)):
        assert len(every) == len(product)
        assert {one.values for one in every} == product
        chosen = [one.values for one in every if not one.marks]
        assert len(chosen) == least
        assert [set(values) for values in zip(*chosen, strict=True)] == [*map(set, axes)]


def test_the_page_of_what_is_proven_where_is_that_of_the_tables():
    assert proofs.TARGET.read_text() == proofs.page()
