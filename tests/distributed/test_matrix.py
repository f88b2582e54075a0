"""The table covers what it says."""

from __future__ import annotations

import pytest
from distributed.matrix import (
    FACTORS,
    LAYOUTS,
    ROUTED,
    WIDTHS,
    default_cells,
    full_cells,
    routed_cells,
    routed_default,
)
from distributed.proofs import TARGET, page

CELLS = default_cells() + routed_default()


@pytest.mark.parametrize("dimension", ["dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"])
def test_each_dimension_meets_each_value_of_each_factor(dimension):
    cells = [cell for cell in CELLS if cell.row.size(dimension) > 1]
    assert {cell.dtype for cell in cells} >= set(WIDTHS)
    for factor, values in FACTORS.items():
        if factor != "recompute" or dimension not in ("dp_replicate", "ep"):
            assert {getattr(cell, factor) for cell in cells} == set(values)


def test_the_full_product_holds_every_combination():
    assert len(full_cells()) == len(LAYOUTS) * 2 * 2 * 2 * 3 * 2
    assert {cell.layout for cell in routed_cells()} == ROUTED.keys()


def test_the_page_of_what_is_proven_where_is_that_of_the_tables():
    assert TARGET.read_text() == page()
