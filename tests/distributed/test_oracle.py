"""Every layout finds the gradient, and the parameters after some steps, of one process in float64.

The default run takes the cells that ``matrix.py`` chooses, ``make oracle`` the full product.
Selected cells of a layout share jobs of the pool; one that raises or hangs fails those that share
its job, so select it alone (``-k``) to look closer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
from distributed.cells import Found, merge, run_layout
from distributed.compare import check
from distributed.matrix import (
    Cell,
    default_cells,
    full_cells,
    routed_cells,
    routed_default,
)
from distributed.reference import expect
from pool import RankError

CELLS_OF_A_JOB = 16
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def found(request):
    """What the ranks found, by cell; a job runs when its first cell is asked for."""
    helper = ThreadPoolExecutor(1)  # the reference of the next cells, while the ranks compute
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    given = [call.params.get("cell") for call in calls if call]
    cells = [cell for cell in given if isinstance(cell, Cell)]
    answers: dict[Cell, Sequence[Found] | RankError] = {}

    def get(cell: Cell) -> Found:
        if cell not in answers:
            following = dict.fromkeys(cells[cells.index(cell) :])
            alike = (other for other in following if other.layout == cell.layout)
            job = list(itertools.islice(alike, CELLS_OF_A_JOB))
            expected = [helper.submit(expect, other) for other in job]
            try:
                answers.update(zip(job, run_layout(job), strict=True))
            except RankError as error:
                answers.update(dict.fromkeys(job, error))
            wait(expected)
        answer = answers.pop(cell)
        if isinstance(answer, RankError):
            raise answer
        return merge(answer)

    yield get
    helper.shutdown()


@pytest.mark.parametrize("cell", default_cells(), ids=str)
def test_a_layout_finds_what_one_process_finds(cell, found):
    check(cell, found(cell))


@pytest.mark.oracle
@pytest.mark.parametrize("cell", full_cells(), ids=str)
def test_the_full_product(cell, found):
    check(cell, found(cell))


@pytest.mark.parametrize("cell", routed_default(), ids=str)
def test_a_layout_with_experts_finds_what_one_process_finds(cell, found):
    """Routers, shared experts, experts and dense parameters apart; counts and balance bitwise."""
    check(cell, found(cell))


@pytest.mark.oracle
@pytest.mark.parametrize("cell", routed_cells(), ids=str)
def test_every_layout_with_experts_finds_what_one_process_finds(cell, found):
    check(cell, found(cell))
