"""Two ranks on the pretend device: what stands around a step there."""

from __future__ import annotations

import time

import pytest
import torch
from device.pretend import NAME, PEAK, watching
from distributed.cells import lay_out, own_batches
from distributed.matrix import Cell
from distributed.models import LOSSES
from lab import SPEC, full_tensors, global_batch, head_loss, relative_error
from pool import run_ranks

import forgekit as fk
from forgekit.run.health import Health
from forgekit.run.rendezvous import HangError

SETUP = "device.pretend:install"
PIPELINE = Cell("pp2-gpipe", 3, "ragged", False, "none", "logits", "fp64")


class Trip(Exception):
    pass


def tripping(rank, cell):
    """A loss with which rank 0 raises in its last micro-batch, and rank 1 in its first."""
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        if rank == 0 and len(calls) == cell.micros:
            raise Trip
        loss = LOSSES["logits"](model, batch)
        if rank == 1:
            raise Trip
        return loss

    return loss_fn


def retry(rank, _world, cell):
    mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **cell.row.sizes}), device=NAME)
    model = lay_out(cell, mesh)
    state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
    batches, found = own_batches(cell, mesh, 0), []
    for _ in range(2):
        fk.accumulate(state, batches, LOSSES["logits"])
        gradients = full_tensors(model, gradients=True)
        found.append({name: gradient.cpu() for name, gradient in gradients.items()})
        with pytest.raises(Trip):
            fk.accumulate(state, batches, tripping(rank, cell))
        assert all(parameter.grad is None for parameter in model.parameters())
    return all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())


def test_a_step_of_a_pipeline_on_a_device_that_raised_can_be_tried_again():
    assert run_ranks(retry, 2, PIPELINE, setup=SETUP) == [True, True]


# A state that is sharded over two ranks

SCHEDULE = fk.warmup_cosine(peak=0.01, warmup=1, total=8)


def new_state(device, **options):
    mesh = fk.build_mesh(device=device)
    with torch.device("meta"):
        model = fk.Transformer(SPEC).double()
    model = fk.parallelize(model, mesh, **options)
    return fk.TrainState.create(model, fk.adamw(model), mesh=mesh)


def batches_of(rank, world, seed=0):
    """The micro-batches of a rank, in pinned memory where there is a device."""
    rows = [row[rank] for row in global_batch(world, seed=seed)]
    if not torch.accelerator.is_available():
        return rows
    return [row.apply(lambda tensor: tensor.contiguous().pin_memory()) for row in rows]


def trained(rank, world, device, **options):
    state = new_state(device, **options)
    step = fk.make_step(head_loss, schedule=SCHEDULE, max_norm=0.5)
    for seed in range(2):
        state, _ = step(state, batches_of(rank, world, seed))
    return state


def on_host(state):
    return {name: tensor.cpu() for name, tensor in full_tensors(state.model).items()}


def offload(rank, world):
    found, expected = trained(rank, world, NAME, cpu_offload=True), trained(rank, world, NAME)
    for entry in found.optimizer.state.values():
        assert {tensor.device.type for tensor in entry.values()} == {"cpu"}
    shards = [parameter.to_local() for parameter in found.model.parameters()]
    assert {(shard.device.type, shard.is_pinned()) for shard in shards} == {("cpu", True)}
    assert found.targets.device.type == NAME
    return relative_error(on_host(found), on_host(expected))


def test_parameters_that_live_on_the_host_are_trained_as_those_on_the_device():
    assert all(error < 1e-13 for error in run_ranks(offload, 2, setup=SETUP))


def save(rank, world, directory):
    state = trained(rank, world, NAME)
    fk.checkpoint_save(state, directory).wait()
    return on_host(state)


def load(_rank, _world, directory, device):
    state = fk.checkpoint_load(new_state(device), directory)
    moments = state.optimizer.state[next(state.model.parameters())]
    assert state.step == 2
    assert moments["exp_avg"].device.type == device
    return on_host(state)


def test_a_checkpoint_moves_between_devices_and_numbers_of_ranks(tmp_path):
    expected, _ = run_ranks(save, 2, tmp_path, setup=SETUP)
    for world, device, setup in ((2, NAME, SETUP), (1, "cpu", "")):
        for found in run_ranks(load, world, tmp_path, device, setup=setup):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected), device


def log_and_stop(rank, world, out):
    """Two rows of two steps, and a stop that only rank 1 was asked for."""
    state, stop = new_state(NAME), fk.StopSignal(signals=())
    step, heard, waits, rows = fk.make_step(head_loss, schedule=SCHEDULE, stop=stop), [], [], []
    with fk.MetricsLog(out, every=2, total=6, is_writer=rank == 0) as log:
        for index in range(6):
            if index == 1 and rank == 1:
                stop.request("enough")
            with watching() as ledger:
                state, metrics = step(state, batches_of(rank, world, index)[:1])
                heard.append(stop.requested)
                rows.append(log(state, metrics))
            waits.append(len(ledger.waits))
    assert [row and row["step"] for row in rows] == [None, 2, None, 4, None, 6]
    for row in rows[1::2]:
        held = [row[f"memory/{name}_gib"] for name in ("parameters", "gradients", "optimizer")]
        assert row["memory/peak_gib"] == PEAK / 2**30
        assert row["memory/activations_gib"] == pytest.approx(PEAK / 2**30 - sum(held))
    return heard, [row["train/loss"] for row in rows if row]


def test_ranks_read_rows_and_agree_on_a_stop_without_a_wait(tmp_path):
    first, second = run_ranks(log_and_stop, 2, tmp_path, setup=SETUP)
    assert first == second
    assert first[0] == [False, False, False, True, True, True]


# Health


def watch(rank, world, out):
    state = new_state(NAME)
    step = fk.make_step(head_loss, schedule=SCHEDULE)
    with Health(out, state.mesh, every=2, timeout_s=1.0, first_timeout_s=20.0) as health:
        for index in range(3):
            state, _ = step(state, batches_of(rank, world)[:1])
            with watching() as ledger:
                row = health(state)
            assert (row is not None) == (index == 1)
            assert row or not ledger.waits, ledger.waits[0]
        if rank == 1:
            time.sleep(3)
        with pytest.raises(HangError, match=r"'step 4': rank 1 did not come within 1 s; rank 1 is"):
            health(fk.donate(state, step=4))
    return sorted(path.name for path in (out / "hang").iterdir())


def test_health_meets_without_a_wait_and_names_who_is_missing(tmp_path):
    files = ["rank_0.txt", "rank_1.txt"]
    assert files in run_ranks(watch, 2, tmp_path, setup=SETUP)
