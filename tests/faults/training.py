"""A few steps in a layout, compared with one process in float64: the check of numerical faults."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from distributed.cells import merge, run_cells
from distributed.compare import check, errors
from distributed.matrix import LAYOUTS, ROUTED, Cell
from faults.table import Check


def cell_of(layout: str, dtype: str, steps: int = 1) -> Cell:
    """Ragged targets and the larger number of micro-batches: nothing neutral."""
    micros = (LAYOUTS | ROUTED)[layout].micros[1]
    return Cell(layout, micros, "ragged", False, "none", "logits", dtype, steps=steps)


def training(layouts: Sequence[str], dtype: str, steps: int = 1) -> dict[str, Check]:
    """A check of each layout, as ``"<layout> <dtype>"``, and ``"<n> steps"`` of more than one."""
    more = f" {steps} steps" if steps > 1 else ""
    cells = {f"{layout} {dtype}{more}": cell_of(layout, dtype, steps) for layout in layouts}
    return {
        name: Check(
            measure=partial(_measure, cell),
            world=cell.row.world,
            judge=partial(_errors, cell),
            control=partial(_control, cell),
        )
        for name, cell in cells.items()
    }


def _measure(cell: Cell, rank: int, world: int) -> Any:
    (found,) = run_cells(rank, world, [cell])
    return found


def _errors(cell: Cell, by_rank: Sequence[Any]) -> dict[str, float]:
    return errors(cell, merge(by_rank, agree=False))


def _control(cell: Cell, by_rank: Sequence[Any]) -> dict[str, float]:
    """Besides, ranks agree bitwise, and counters are those of one process."""
    found = merge(by_rank)
    check(cell, found)
    return errors(cell, found)
