"""Garbage is taken at known steps, a lack of memory is written down, and steps keep nothing."""

from __future__ import annotations

import gc
import os
import weakref
from itertools import islice
from pathlib import Path

import pytest
import torch
from lab import SPEC, alone, count_tensors, head_loss
from pool import run_ranks

import forgekit as fk
from forgekit.run.memory import periodic_collection, report_out_of_memory


class Node:
    """An object that can be in a cycle and be watched."""


def make_cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def test_garbage_is_taken_at_the_steps_that_are_due_and_at_no_others():
    assert gc.isenabled()
    with periodic_collection(3) as collect:
        cycles = []
        junk = [[] for _ in range(100_000)]  # Python itself would have collected by now
        for step in range(1, 7):
            cycles.append(make_cycle())
            assert collect(step) == (step % 3 == 0)
            assert all((cycle() is None) == (step % 3 == 0) for cycle in cycles[-1:])
        assert not any(cycle() for cycle in cycles)
        del junk
    assert gc.isenabled()


def test_collection_is_as_before_whatever_is_raised():
    gc.disable()
    try:
        with pytest.raises(KeyError), periodic_collection(1) as collect:  # noqa: PT012
            collect(1)
            assert gc.get_freeze_count() > 0
            raise KeyError
        assert (gc.isenabled(), gc.get_freeze_count()) == (False, 0)
    finally:
        gc.enable()


def test_running_out_of_memory_leaves_a_snapshot_and_the_error_goes_on(
    tmp_path, caplog, monkeypatch
):
    """The device's allocator is torch's, and there is none here: its one call writes a file."""

    def full(out, error=torch.OutOfMemoryError):
        with pytest.raises(error, match="no more"), report_out_of_memory(out, rank=3):
            raise error("no more")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    full(tmp_path)
    full(tmp_path, error=RuntimeError)
    assert list(tmp_path.iterdir()) == [], "no device, or another error"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    full(tmp_path)
    assert (tmp_path / "memory" / "rank_3.pickle").exists()
    assert f"out of memory; what filled it is in {tmp_path}/memory/rank_3" in caplog.text
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "memory").write_text("in the way")
    full(tmp_path / "b")
    assert "out of memory, and no snapshot of it" in caplog.text


# A training loop keeps nothing


def resident_bytes():
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(rank, world, out):
    """Tensors and resident bytes after 30 and after 60 steps."""
    rows = [torch.randint(1, 37, (400,)).numpy() for _ in range(100)]
    fk.write_tokens(out / "data", rows, vocab_size=37, eos_id=0)
    state = alone(fk.Transformer(SPEC))
    step = fk.make_step(head_loss, schedule=fk.constant(1e-3), max_norm=1.0)
    loader = fk.make_loader(fk.token_dataset(out / "data", 16), batch_size=4, workers=1)
    found = []
    with loader, fk.MetricsLog(out, every=5, loader=loader) as log:
        for batches in islice(fk.groups(loader, 2), 60):
            state, metrics = step(state, batches)
            log(state, metrics)
            if fk.every(15, state):
                fk.checkpoint_save(state, out / "checkpoints", keep=2, blocking=True)
            if fk.every(30, state):
                gc.collect()
                found.append((count_tensors(), resident_bytes()))
    return found


def test_a_training_loop_keeps_nothing(tmp_path):
    """30 steps, 2 saves and 6 rows after a warm-up."""
    [[before, after]] = run_ranks(measure, 1, tmp_path, group=False)
    assert after[0] - before[0] <= 10, "tensors that Python sees"
    assert after[1] - before[1] <= 3 * 2**20, "bytes, also of graphs behind one tensor"
