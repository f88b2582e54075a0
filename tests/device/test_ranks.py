"""Two ranks on the pretend device: what stands around a step there."""

from __future__ import annotations

from unittest import mock

import torch
from device.pretend import NAME, PEAK, watching
from lab import SPEC, full_tensors, global_batch, head_loss, lay_out, relative_error
from pool import run_ranks

import forgekit as fk
from forgekit.run.health import Health

SETUP = "device.pretend:install"


# A state that is sharded over two ranks

SCHEDULE = fk.warmup_cosine(peak=0.01, warmup=1, total=8)


def new_state(device, **options):
    with torch.device("meta"):
        model = fk.Transformer(SPEC).double()
    return lay_out(model, device=device, **options)


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
    """Twice while the next step writes: into fresh memory, and into that of the save before."""
    state, saved = new_state(NAME), []
    step = fk.make_step(head_loss, schedule=SCHEDULE, max_norm=0.5)
    for number in range(2):
        state, _ = step(state, batches_of(rank, world, number))
        saved.append(on_host(state))
        with watching() as ledger:
            pending = fk.checkpoint_save(state, directory / str(number))
        numbers = sum(p.to_local().numel() for p in state.model.parameters())
        assert ledger.copied["from"] > 3 * 8 * numbers
        assert ledger.copied["pageable"] == 0
        state, _ = step(state, batches_of(rank, world, 2))
        pending.wait()
    return saved


def load(_rank, _world, directory, device):
    found = []
    for number in range(2):
        state = fk.checkpoint_load(new_state(device), directory / str(number))
        moments = state.optimizer.state[next(state.model.parameters())]
        assert moments["exp_avg"].device.type == device
        found.append(on_host(state))
    return found


def test_a_checkpoint_of_before_the_next_step_moves_between_devices_and_numbers_of_ranks(tmp_path):
    expected, _ = run_ranks(save, 2, tmp_path, setup=SETUP)
    for world, device, setup in ((2, NAME, SETUP), (1, "cpu", "")):
        for found in run_ranks(load, world, tmp_path, device, setup=setup):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def log_and_stop(rank, world, out):
    """Rows of two steps each, a meeting after each row, a stop that only rank 1 was asked for."""
    state, stop = new_state(NAME), fk.StopSignal(signals=())
    step, heard, rows = fk.make_step(head_loss, schedule=SCHEDULE, stop=stop), [], []
    log = fk.MetricsLog(out, every=2, total=6, is_writer=rank == 0)
    with log, Health(out, state.mesh, every=2, timeout_s=9.0, first_timeout_s=20.0) as health:
        for index in range(6):
            if index == 1 and rank == 1:
                stop.request("enough")
            with watching() as ledger:
                state, metrics = step(state, batches_of(rank, world, index)[:1])
                heard.append(stop.requested)
            assert not ledger.waits, ledger.waits[0]
            rows.append(log(state, metrics))
            if index == 3:
                waited = mock.patch.object(torch.accelerator, "synchronize")
                with waited as wait, log.outside(state.targets.device):
                    wait.assert_called_once()  # steps that are queued still take a while
            with watching() as ledger:
                met = health(state)
            assert (met is not None) == (rows[-1] is not None)
            assert met or not ledger.waits, ledger.waits[0]
    assert [row and row["step"] for row in rows] == [None, 2, None, 4, None, 6]
    for row in rows[1::2]:
        assert row["memory/peak_gib"] == PEAK / 2**30
        assert row["train/loss"] > 0
    return heard, [row["train/loss"] for row in rows if row]


def test_ranks_read_rows_meet_and_agree_on_a_stop_without_a_wait(tmp_path):
    first, second = run_ranks(log_and_stop, 2, tmp_path, setup=SETUP)
    assert first == second
    assert first[0] == [False, False, False, True, True, True]
