"""The table covers what it says."""

from __future__ import annotations

import itertools

import attrs
import pytest
from distributed import proofs
from distributed.matrix import FACTORS, LAYOUTS, default_cells, full_cells

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


def test_the_full_product_holds_every_combination_and_the_default_run():
    product = full_cells(list(LAYOUTS))
    assert len(product) == len(LAYOUTS) * 2 * 2 * 2 * 3 * 2
    assert {attrs.evolve(cell, steps=5) for cell in SINGLE} < set(product)


def test_the_page_of_what_is_proven_where_is_that_of_the_tables():
    assert proofs.TARGET.read_text() == proofs.page()
