"""Layers of experts on the pretend device: the host reads the sizes of an exchange at most."""

from __future__ import annotations

import pytest
from device.pretend import NAME, watching
from parallel.test_expert_layouts import MOE, POSITIONS, build, data_ranks, loss_fn, rows, split
from pool import run_again
from tensordict import TensorDict
from torch import float32

import forgekit as fk

SETUP = "device.pretend:install"


def _watch(_rank, _world, sizes, options):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **sizes}), device=NAME)
    model = fk.parallelize(build(float32, capacity=1.1), mesh, **options)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    step = fk.make_step(loss_fn, schedule=fk.constant(0.01))
    own, among = data_ranks(mesh)
    for seed in range(3):
        batches = [batch[own::among] for batch in split(rows(seed, positions=POSITIONS), [4, 4])]
        with watching() as ledger:
            state, _ = step(state, [_pinned(batch) for batch in batches])
    return [wait.splitlines()[-1].rpartition(" ")[2] for wait in ledger.waits]


def _pinned(batch):
    there = {key: value.contiguous().pin_memory() for key, value in batch.items()}
    return TensorDict(there, batch.batch_size)


@pytest.mark.parametrize(
    ("sizes", "what", "reads"),
    [
        ({"dp_shard": 2}, "none", 0),
        pytest.param({"tp": 2}, "none", 0, marks=pytest.mark.oracle),
        ({"dp_shard": 2, "ep": 2}, "none", 1),
        pytest.param({"dp_shard": 2, "ep": 2}, "full", 2, marks=pytest.mark.oracle),
    ],
)
def test_the_host_reads_the_sizes_of_each_exchange_and_nothing_else(sizes, what, reads):
    """Once for each layer with experts and micro-batch, and once more where it is recomputed."""
    layers, micros = len(range(MOE.first, 4, MOE.every)), 2
    for waits in run_again(_watch, 2, sizes, {"activation_checkpoint": what}, setup=SETUP):
        assert waits == ["_splits"] * (reads * layers * micros)
