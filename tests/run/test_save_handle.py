"""What saves share is in the state's handle: runs of one process do not wait for each other."""

from __future__ import annotations

import os
import threading

import attrs
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import forgekit as fk
from forgekit.checkpoints.save import GROUP_NAME

LONG_S = 20


def build(width=3, mesh=None):
    torch.manual_seed(width)
    model = nn.Linear(4, width).double()
    model = model if mesh is None else fk.parallelize(model, mesh)
    return fk.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.1), mesh=mesh)


def train(state):
    state.optimizer.zero_grad()
    state.model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    state.optimizer.step()
    return fk.donate(state, step=state.step + 1)


def weight(state):
    found = state.model.weight.detach()
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).clone()


@pytest.fixture
def gate(monkeypatch):
    """Hold the syncs of saves into ``first`` until it is opened."""
    opened, reached, fsync = threading.Event(), threading.Event(), os.fsync

    def held(descriptor):
        if "/first/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            reached.set()
            assert opened.wait(LONG_S)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", held)
    yield opened, reached
    opened.set()
    fk.run.wait_for_saves()


def test_a_save_waits_for_the_run_that_it_belongs_to_and_for_no_other(tmp_path, gate):
    opened, reached = gate
    first, second = train(build(3)), train(build(5))
    expected = weight(first), weight(second)
    held = fk.checkpoint_save(first, tmp_path / "first")
    assert reached.wait(LONG_S)
    for step in (1, 2):
        done = fk.checkpoint_save(second, tmp_path / "second").wait()
        assert done.name == f"step_{step:08d}"
        second = train(second)
    fk.run.wait_for_saves(second)
    assert not held.done
    opened.set()
    fk.run.wait_for_saves(train(first))
    assert held.done
    assert weight(fk.checkpoint_load(build(3), tmp_path / "first")).equal(expected[0])
    assert weight(fk.checkpoint_load(build(5), tmp_path / "second", step=1)).equal(expected[1])


def test_a_failed_save_is_raised_in_its_own_run_alone(tmp_path):
    (tmp_path / "file").write_text("in the way")
    first, second = build(3), build(5)
    fk.checkpoint_save(first, tmp_path / "file" / "checkpoints")
    fk.checkpoint_save(second, tmp_path / "good").wait()
    fk.checkpoint_save(second, tmp_path / "good", blocking=True)
    with pytest.raises(fk.CheckpointError, match=r"step 0 could not be saved to .*Not a dire"):
        fk.run.wait_for_saves(train(first))


def test_loading_waits_for_what_another_state_of_the_process_is_saving(tmp_path, gate):
    opened, reached = gate
    state = train(build())
    fk.checkpoint_save(state, tmp_path / "first")
    assert reached.wait(LONG_S)
    threading.Timer(0.05, opened.set).start()
    assert fk.checkpoint_load(build(), tmp_path / "first").step == 1


def test_without_a_state_running_saves_are_waited_for_and_raise(tmp_path, gate, monkeypatch):
    opened, reached = gate
    pending = fk.checkpoint_save(build(), tmp_path / "first")
    assert reached.wait(LONG_S)

    def fail(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    threading.Timer(0.05, opened.set).start()
    with pytest.raises(fk.CheckpointError, match="Input/output error"):
        fk.run.wait_for_saves()
    assert pending.done
    fk.run.wait_for_saves()


def test_the_states_of_a_run_share_a_handle_and_other_runs_have_their_own():
    state = build()
    handle = state.saves
    assert attrs.evolve(state, seed=3).saves is handle
    assert fk.donate(state, step=1).saves is handle
    assert build().saves is not handle


def interleave(rank, world, folder):
    """Two runs save by turns; each has one group, and both checkpoints are their own run's."""
    mesh = fk.build_mesh(device="cpu")
    runs = {"wide": build(8, mesh), "small": build(4, mesh)}
    for _ in range(3):
        for name, state in runs.items():
            runs[name] = train(state)
            fk.checkpoint_save(runs[name], folder / name, keep=None)
    for state in runs.values():
        fk.run.wait_for_saves(state)
    groups = [group.group_desc for group in dist.distributed_c10d._world.pg_map]
    return {name: weight(state) for name, state in runs.items()}, groups.count(GROUP_NAME)


def alone(rank, world, width):
    state = build(width, fk.build_mesh(device="cpu"))
    for _ in range(3):
        state = train(state)
    return weight(state)


def test_interleaved_runs_on_two_ranks_save_what_each_does_alone(tmp_path):
    for weights, groups in run_ranks(interleave, 2, tmp_path):
        assert groups == 2
        for name, width in (("wide", 8), ("small", 4)):
            expected = run_ranks(alone, 2, width)[0]
            assert weights[name].equal(expected)
            assert weight(fk.checkpoint_load(build(width), tmp_path / name)).equal(expected)
