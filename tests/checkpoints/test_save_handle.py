"""What saves share is in the state's handle: runs of one process do not wait for each other."""

from __future__ import annotations

import os
import threading

import attrs
import pytest
from lab import train
from pool import run_again
from saved import assert_same, build, everything

import forgekit as fk

LONG_S = 20


@pytest.fixture
def gate(monkeypatch):
    """Hold the syncs of saves into ``first`` until it is opened; ``failing`` holds their error."""
    opened, reached, failing, fsync = threading.Event(), threading.Event(), [], os.fsync

    def held(descriptor):
        if "/first/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            reached.set()
            assert opened.wait(LONG_S)
            for error in failing:
                raise error
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", held)
    yield opened, reached, failing
    opened.set()
    fk.checkpoints.wait_for_saves()


def test_a_save_waits_for_the_run_that_it_belongs_to_and_for_no_other(tmp_path, gate):
    opened, reached, _ = gate
    first, second = train(build(seed=3), 1), train(build(seed=5), 1)
    assert attrs.evolve(first, seed=3).saves is first.saves is not second.saves
    expected = everything(first)
    held = fk.checkpoint_save(first, tmp_path / "first")
    assert reached.wait(LONG_S)
    for step in (1, 2):
        done = fk.checkpoint_save(second, tmp_path / "second").wait()
        assert done.name == f"step_{step:08d}"
        second = train(second, 1)
    fk.checkpoints.wait_for_saves(second)
    assert not held.done
    threading.Timer(0.05, opened.set).start()
    # Loading waits for what another state of the process is saving.
    assert_same(everything(fk.checkpoint_load(build(), tmp_path / "first")), expected)
    fk.checkpoints.wait_for_saves(train(first, 1))
    assert held.done


def test_without_a_state_running_saves_are_waited_for_and_raise(tmp_path, gate):
    opened, reached, failing = gate
    pending = fk.checkpoint_save(build(), tmp_path / "first")
    assert reached.wait(LONG_S)
    failing.append(OSError(5, "Input/output error"))
    threading.Timer(0.05, opened.set).start()
    with pytest.raises(fk.CheckpointError, match="Input/output error"):
        fk.checkpoints.wait_for_saves()
    assert pending.done
    fk.checkpoints.wait_for_saves()


def test_a_failure_nobody_waited_for_is_raised_once_in_its_own_run_alone(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    first, second = build(seed=3), build(seed=5)
    message = "step 0 could not be saved to .*/file/checkpoints: Not a directory"
    for use in (
        lambda: fk.checkpoint_save(first, tmp_path),
        lambda: fk.checkpoints.wait_for_saves(first),
    ):
        fk.checkpoint_save(first, tmp_path / "file" / "checkpoints")
        fk.checkpoint_save(second, tmp_path / "good", blocking=True)
        with pytest.raises(fk.CheckpointError, match=message):
            use()
        assert "could not be saved" in caplog.text
        fk.checkpoints.wait_for_saves(first)
    assert fk.checkpoint_save(first, tmp_path / "good").wait().name == "step_00000000"


def interleave(rank, world, folder):
    """Two runs save by turns, and both checkpoints are their own run's."""
    runs = {seed: build(world, seed=seed) for seed in (3, 5)}
    for _ in range(2):
        for seed, state in runs.items():
            runs[seed] = train(state, 1)
            fk.checkpoint_save(runs[seed], folder / str(seed), keep=None)
    for seed, state in runs.items():
        fk.checkpoints.wait_for_saves(state)
        expected = everything(train(build(world, seed=seed), 2))
        assert_same(everything(state), expected)
        assert_same(everything(fk.checkpoint_load(build(world), folder / str(seed))), expected)


def test_interleaved_runs_on_two_ranks_save_what_each_does_alone(tmp_path):
    run_again(interleave, 2, tmp_path)
