"""The step on the pretend device in every layout: as on the CPU, and the host waits for nothing."""

from __future__ import annotations

import pytest
from device.pretend import NAME, watching
from distributed.cells import LaidOut, lay_out, merge, own_batches, run_cell
from distributed.compare import check
from distributed.matrix import LAYOUTS, Cell
from distributed.models import LOSSES, SCHEDULES
from pool import run_again
from tensordict import TensorDict

import forgekit as fk

SETUP = "device.pretend:install"
CELLS = [
    Cell(layout, micros, "ragged", True, recompute, "head", "fp64", steps=2)
    for layout, micros, recompute in (
        ("tp2", 1, "none"),
        ("pp2-zbv", 3, "none"),
        ("ep2", 2, "selective"),
    )
]
LARGE = [
    Cell(layout, row.micros[1], "rank_without", True, "full", "head", "fp64", steps=2)
    for layout, row in LAYOUTS.items()
    if layout not in {cell.layout for cell in CELLS}
]
"""Every other layout."""


def run_and_watch(_rank, _world, cell):
    """What a cell finds, and what the host did in a step after the first."""
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **cell.row.sizes}), device=NAME)
    laid_out = LaidOut(lay_out(cell, mesh), mesh)
    found, state = run_cell(cell, laid_out), laid_out.state("adamw")
    step = fk.make_step(LOSSES[cell.loss], schedule=SCHEDULES["adamw"], max_norm=1.0)
    for _ in range(2):
        batches = list(pinned(own_batches(cell, mesh, 0)))
        with watching() as ledger:
            state, _ = step(state, batches)
    return found, ledger


def pinned(batches):
    for batch in batches:
        there = {key: value.contiguous().pin_memory() for key, value in batch.items()}
        yield TensorDict(there, batch.batch_size)


@pytest.mark.parametrize(
    "cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.oracle) for cell in LARGE)], ids=str
)
def test_a_layout_gives_on_the_device_what_one_process_gives_and_the_host_waits_for_nothing(cell):
    by_rank = run_again(run_and_watch, cell.row.world, cell, setup=SETUP, timeout_s=200)
    check(cell, merge([found for found, _ in by_rank]))
    exchanges = cell.row.layers * cell.micros if cell.row.experts else 0
    for _, ledger in by_rank:
        # Ranks that exchange tokens have to know how many will come.
        waits = [wait for wait in ledger.waits if not wait.endswith(" _splits")]
        assert not waits, waits[0]
        assert len(ledger.waits) == exchanges * (2 if cell.recompute != "none" else 1)
        assert ledger.copied["pageable"] == 0
