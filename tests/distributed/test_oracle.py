"""Every layout finds the gradient, and the parameters after some steps, of one process in float64.

``make oracle`` runs the full product. A layout's cells run in one job of the pool, those that were
selected; one that raises or hangs fails them all, so select it alone (``-k``) to look closer.
"""

from __future__ import annotations

import pytest
from distributed.cells import Found, merge, run_layout
from distributed.compare import check
from distributed.matrix import LAYOUTS, Cell, default_cells, full_cells
from ranks import RankError


@pytest.fixture(scope="session")
def found(request):
    """What the ranks found, by cell; a layout's job runs when its first cell is asked for."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    cells = [call.params["cell"] for call in calls if call and "cell" in call.params]
    answers: dict[str, list[tuple[Cell, Found]] | RankError] = {}

    def ask(layout: str) -> list[tuple[Cell, Found]] | RankError:
        selected = list(dict.fromkeys(cell for cell in cells if cell.layout == layout))
        try:
            return list(zip(selected, run_layout(selected), strict=True))
        except RankError as error:
            return error

    def get(cell: Cell) -> Found:
        if cell.layout not in answers:
            answers[cell.layout] = ask(cell.layout)
        answer = answers[cell.layout]
        if isinstance(answer, RankError):
            raise answer
        return merge(dict(answer)[cell])

    return get


@pytest.mark.parametrize("cell", default_cells(list(LAYOUTS)), ids=str)
def test_a_layout_finds_what_one_process_finds(cell, found):
    check(cell, found(cell))


@pytest.mark.oracle
@pytest.mark.parametrize("cell", full_cells(list(LAYOUTS)), ids=str)
def test_the_full_product(cell, found):
    check(cell, found(cell))
