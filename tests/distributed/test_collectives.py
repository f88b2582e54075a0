"""A step runs the collectives that its layout needs, and one more."""

from __future__ import annotations

from distributed.cells import lay_out, own_batches
from distributed.collectives import Collectives
from distributed.matrix import LAYOUTS, Cell
from distributed.models import BUILDERS, logits_loss

import forgekit as fk


def _count(rank, world, layout):
    """Collectives of the second and the third step."""
    cell = Cell(layout, LAYOUTS[layout].micros[1], "ragged", True, "none", "logits")
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **cell.row.sizes}), device="cpu")
    model = lay_out(cell, mesh)
    state = fk.TrainState.create(model, BUILDERS["adamw"](model), mesh=mesh)
    step = fk.make_step(logits_loss, schedule=fk.constant(0.01))
    counted = []
    for index in range(3):
        batches = own_batches(cell, mesh, index)
        with Collectives() as collectives:
            state, _ = step(state, batches)
        counted.append(dict(collectives.found))
    return counted[1:]
