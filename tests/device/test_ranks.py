"""Two ranks on the pretend device: what stands around a step there."""

from __future__ import annotations

import time

import pytest
from device.pretend import NAME
from distributed.cells import lay_out, own_batches
from distributed.matrix import Cell
from distributed.models import LOSSES
from ranks import run_ranks

import forgekit as fk

SETUP = "device.pretend:install"
PIPELINE = Cell("pp2-gpipe", 3, "ragged", False, "none", "logits", "fp64")


class Trip(Exception):
    pass


def trip(*_):
    raise Trip


def tripping(rank, cell):
    """A loss with which rank 0 sends what rank 1, which raises earlier, never receives."""
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        if rank == 0 and len(calls) == cell.micros:
            time.sleep(0.5)  # until rank 1 has the first message
            raise Trip
        loss = LOSSES["logits"](model, batch)
        if rank == 1:
            raise Trip
        return loss

    return loss_fn


BROKEN = "an exception broke off an earlier schedule of this pipeline, and messages between devices"
OTHER = "rank 0 of the pipeline raised before the first micro-batch"


def retry(rank, _world, cell, where):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **cell.row.sizes}), device=NAME)
    model = lay_out(cell, mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    batches = own_batches(cell, mesh, 0)
    fk.accumulate(state, batches, LOSSES["logits"])
    if where == "on both ranks":
        with pytest.raises(Trip):
            fk.accumulate(state, batches, tripping(rank, cell))
    elif rank == 0:
        next(model.parameters()).register_post_accumulate_grad_hook(trip)  # after the last send
        with pytest.raises(Trip):
            fk.accumulate(state, batches, LOSSES["logits"])
    else:
        fk.accumulate(state, batches, LOSSES["logits"])
    for again in (fk.accumulate, fk.evaluate):
        is_told = rank == 1 and where == "on the first rank" and again is fk.accumulate
        with pytest.raises(RuntimeError, match=OTHER if is_told else BROKEN):
            again(state, batches, LOSSES["logits"])


@pytest.mark.parametrize("where", ["on both ranks", "on the first rank"])
def test_a_pipeline_that_an_exception_broke_off_is_refused_where_messages_have_no_tags(where):
    run_ranks(retry, 2, PIPELINE, where, setup=SETUP)
