"""The step on the pretend device in every layout: as on the CPU, and the host waits for nothing."""

from __future__ import annotations

import pytest
from device.pretend import NAME, watching
from distributed.cells import LaidOut, lay_out, merge, own_batches, run_cells
from distributed.compare import check
from distributed.matrix import Cell
from distributed.models import LOSSES, SCHEDULES
from ranks import run_ranks
from tensordict import TensorDict

import forgekit as fk

SETUP = "device.pretend:install"
CELLS = [
    Cell("fsdp2", 2, "ragged", True, "selective", "head", "fp64"),
    Cell("hsdp2x2", 2, "ragged", False, "none", "head", "fp64"),
    Cell("tp2", 1, "ragged", True, "none", "head", "fp64"),
    Cell("cp2-ring", 2, "ragged", True, "none", "head", "fp64"),
    Cell("cp2-ulysses", 1, "ragged", False, "none", "head", "fp64"),
    Cell("pp2-1f1b", 2, "ragged", False, "none", "logits", "fp64"),
    Cell("pp2-zbv", 3, "ragged", True, "none", "head", "fp64"),
    Cell("ep2", 2, "ragged", False, "none", "logits", "fp64"),
]


LARGE = [
    Cell(layout, 4, "rank_without", True, "full", "head", "fp64", steps=2)
    for layout in ("fsdp4", "pp4-1f1b", "ep2-fsdp2")
]


@pytest.mark.parametrize(
    "cell", [*CELLS, *(pytest.param(cell, marks=pytest.mark.oracle) for cell in LARGE)], ids=str
)
def test_a_layout_gives_on_the_device_what_one_process_gives(cell):
    by_rank = run_ranks(run_cells, cell.row.world, [cell], [None], NAME, setup=SETUP, timeout_s=200)
    check(cell, merge([found for (found,) in by_rank]))


def pinned(batches):
    for batch in batches:
        there = {key: value.contiguous().pin_memory() for key, value in batch.items()}
        yield TensorDict(there, batch.batch_size)


def watched_step(_rank, _world, cell):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **cell.row.sizes}), device=NAME)
    state = LaidOut(lay_out(cell, mesh), mesh).state("adamw")
    step = fk.make_step(LOSSES[cell.loss], schedule=SCHEDULES["adamw"], max_norm=1.0)
    ledgers = []
    for _index in range(3):
        batches = list(pinned(own_batches(cell, mesh, 0)))
        with watching() as ledger:
            state, _ = step(state, batches)
        ledgers.append(ledger)
    return ledgers[-1]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_host_waits_for_nothing_in_a_step(cell):
    exchanges = cell.row.layers * cell.micros if cell.row.experts else 0
    for ledger in run_ranks(watched_step, cell.row.world, cell, setup=SETUP):
        # Ranks that exchange tokens have to know how many will come.
        waits = [wait for wait in ledger.waits if not wait.endswith(" _splits")]
        assert not waits, waits[0]
        assert len(ledger.waits) == exchanges
        assert ledger.copied["pageable"] == 0
