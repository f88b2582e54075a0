"""Hangs are found, named and written down on every rank that can still speak."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import attrs
import pytest
import torch
import torch.distributed as dist
from covering import some_of
from lab import SPEC, lay_out
from pool import RankError, run_ranks
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import forgekit as fk
from forgekit.checkpoints.save import GROUP_NAME
from forgekit.run import watchdog
from forgekit.run.health import LEAST_S, Health
from forgekit.run.rendezvous import HangError, RankStore, barrier

LONG_S = 40
"""Time-out of the groups before the first step: a test that waits for it has failed."""
SHORT_S = 1.0
DELAY_S = 0.3


def create(mesh=None, step=0):
    """A state that nothing trains: health reads its step, and compares its weight."""
    model, zero = nn.Linear(1, 1, bias=False), torch.zeros((), dtype=torch.int64)
    nn.init.ones_(model.weight)
    counts = {"targets": zero, "skipped": zero, "loss_scale": torch.ones(()), "step": step}
    optimizer = torch.optim.SGD(model.parameters())
    return fk.TrainState(model=model, optimizer=optimizer, mesh=mesh, **counts)


def mesh_of(world):
    return init_device_mesh("cpu", (1, world), mesh_dim_names=("dp_replicate", "dp_shard"))


def seconds_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def wait_for(path: Path):
    """Stand still until another rank has made a file, as a rank that hangs does."""
    deadline = time.monotonic() + LONG_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@contextmanager
def fragile_group(rank: int, world: int, folder: Path) -> Iterator[DeviceMesh]:
    """A group that the job may break: nothing meets in it at the end."""
    store, patience = dist.FileStore(str(folder / "store"), world), timedelta(seconds=LONG_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    try:
        yield mesh_of(world)
    finally:
        dist.destroy_process_group()


def lose(rank, world, out, kind):
    """Rank 1 hangs or leaves; rank 0 waits for it in a collective."""
    began, cause = time.monotonic(), None
    with fragile_group(rank, world, out) as mesh, patch.object(watchdog, "GRACE_S", 1.0):
        try:
            with Health(out, mesh, every=0, timeout_s=SHORT_S, first_timeout_s=LONG_S) as health:
                health(create(mesh, step=1))
                if rank == 0:
                    dist.all_reduce(torch.ones(1), group=mesh.get_group("dp_shard"))
                elif kind == "hangs":
                    wait_for(out / "done")
            ended = "no error"
        except RuntimeError as error:
            ended, cause = f"{type(error).__name__}: {error}", error.__cause__
        if rank == 0:
            (out / "done").touch()
        wait_for(out / "done")  # rank 1 stays, so the connection does too
    return ended, time.monotonic() - began, str(cause)


LOST = {
    "hangs": r"rank 1 is at test_health.py:\d+ in wait_for, after step 1",
    "leaves": "rank 1 left the loop after step 1",
}
ALONE = "^HangError: the ranks lost each other after step 1: rank 0 failed: RuntimeError: .*; "


@pytest.mark.parametrize("kind", some_of(LOST, "leaves"))
def test_a_collective_that_loses_a_rank_says_soon_where_that_rank_is(tmp_path, kind):
    """Where it raises an error is a row of ``tests/faults/run.py``."""
    (message, seconds, cause), (other, *_) = run_ranks(lose, 2, tmp_path, kind, group=False)
    assert re.search(rf"{ALONE}{LOST[kind]}\. Stacks .* are in .*hang\.$", message)
    assert other == "no error"
    assert SHORT_S <= seconds < LONG_S / 2
    assert "Timed out waiting 1000ms" in cause
    assert "all_reduce" in (tmp_path / "hang" / "rank_0.txt").read_text()


def fail_in_a_stage(rank, world, out):
    """Rank 1 raises in the third micro-batch of a second step, and ends."""
    batches = [TensorDict({"input_ids": torch.full((1, 4), n)}, [1]) for n in range(4)]
    broken = -1

    def loss_fn(model, batch):
        if rank == broken and batch["input_ids"][0, 0] == 2:
            raise KeyError("a broken row")
        return fk.Loss(model(batch["input_ids"]).sum(), 1)

    with fragile_group(rank, world, out), patch.object(watchdog, "GRACE_S", 1.0):
        state = lay_out(fk.Transformer(SPEC), {"pp": 2})
        fk.accumulate(state, batches, loss_fn)  # ranks have nothing left to compare
        state, broken = fk.donate(state, step=1), 1
        try:
            with Health(out, state.mesh, every=0) as health:
                health(state)
                fk.accumulate(state, batches, loss_fn)
        except KeyError:
            os._exit(1)


def test_a_rank_that_fails_in_a_stage_is_named_by_the_one_that_waits_for_it(tmp_path):
    with pytest.raises(RankError, match=rf"{ALONE[1:]}rank 1 failed: KeyError: 'a broken row'\."):
        run_ranks(fail_in_a_stage, 2, tmp_path, group=False, timeout_s=20)


def watch_timeouts(rank, world, out):
    state = lay_out(nn.Linear(2, 2))
    fk.checkpoint_save(state, out / "checkpoints", blocking=True)
    own = dist.new_group(timeout=timedelta(seconds=31))

    def seconds():
        groups = {group: seconds_of(group) for group in dist.distributed_c10d._world.pg_map}
        checkpoints = [groups.pop(group) for group in [*groups] if group.group_desc == GROUP_NAME]
        return groups.pop(own), {*groups.values()}, checkpoints

    found = [seconds()]
    with Health(out, state.mesh, timeout_s=SHORT_S) as health:
        found.append(seconds())
        health(fk.donate(state, step=1))
        found.append(seconds())
        dist.barrier()
    return [*found, seconds()]


def test_time_outs_are_short_from_the_first_step_to_the_end(tmp_path):
    """But for checkpoints: there the others wait for as long as the slowest rank writes."""
    for before, entered, inside, after in run_ranks(watch_timeouts, 2, tmp_path):
        own, others, checkpoints = before
        assert before == entered == after
        assert inside == (SHORT_S, {SHORT_S}, checkpoints)
        assert (own, len(checkpoints)) == (31, 1)
        assert min(others) == 40


def part_ways(rank, world, out):
    mesh = mesh_of(world)
    with Health(out, mesh, every=10) as health, pytest.raises(HangError) as error:
        health(create(mesh, step=10 + 10 * rank))
    return str(error.value)


def test_ranks_at_different_steps_are_told(tmp_path):
    expected = "ranks are at different steps: rank 0 at 'step 10'; rank 1 at 'step 20'. Look"
    assert all(m.startswith(expected) for m in run_ranks(part_ways, 2, tmp_path))


@contextmanager
def warnings_of_the_library() -> Iterator[list[str]]:
    """What is logged on this rank: caplog is in another process."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("forgekit").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("forgekit").removeHandler(handler)


@attrs.frozen
class Rows:
    """A dataset, slow to read on one rank."""

    delay_s: float

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        time.sleep(self.delay_s)
        return TensorDict({"x": torch.tensor([float(index)])})


def work(seconds):
    """Use the processor for so long, however many others use it, too."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def lag(rank, world, out, slow, kind):
    mesh = mesh_of(world)
    delay = DELAY_S if rank == slow else 0.0
    found, rows = [], Rows(delay if kind == "data" else 0.0)
    loader = fk.make_loader(rows, batch_size=1, rank=rank, world=world)
    health = Health(out, mesh, every=2, timeout_s=LONG_S, loader=loader)
    with warnings_of_the_library() as warned, health, loader:
        for step, _ in zip(range(1, 5), loader, strict=False):
            if kind == "step":
                work(delay)
            dist.all_reduce(torch.ones(1))
            found.append(health(create(mesh, step=step)))
    return found, warned


@pytest.mark.parametrize(
    ("slow", "kind"), [(0, "data"), pytest.param(1, "step", marks=pytest.mark.oracle)]
)
def test_the_rank_that_the_others_wait_for_is_named(tmp_path, slow, kind):
    (rows, warned), (others, silent) = run_ranks(lag, 2, tmp_path, slow, kind)
    assert rows == others
    assert [step for step, row in enumerate(rows, 1) if row is not None] == [2, 4]
    row = rows[-1]
    assert row["health/slowest_rank"] == slow
    assert row["health/own_seconds_max"] > 0.8 * DELAY_S
    # A busy machine makes both slower.
    assert row["health/own_seconds_median"] < 0.5 * row["health/own_seconds_max"]
    assert (row["health/data_wait_seconds_max"] > 0.8 * DELAY_S) == (kind == "data")
    assert silent == []
    assert re.search(rf"step 4: rank {slow} \(.+\) is slow: \d+\.\d+ s of each step", warned[-1])


def keep_pace(rank, world, out):
    mesh = mesh_of(world)
    group = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    with warnings_of_the_library() as warned, Health(out, mesh, every=50) as health:
        health(create(mesh, step=1))
        dist.barrier()
        before = group._get_sequence_number_for_group(), store.num_keys()
        for step in range(2, 50):
            assert health(create(mesh, step=step)) is None
        after = group._get_sequence_number_for_group(), store.num_keys()
        dist.barrier()
        longest = 0.0
        for step in range(50, 500, 50):
            began = time.perf_counter()
            health(create(mesh, step=step))
            longest = max(longest, time.perf_counter() - began)
        dist.barrier()
        grown = store.num_keys() - after[1]
        dist.barrier()
    return before, after, grown, warned, longest


def test_steps_without_a_probe_tell_nobody_and_probes_leave_nothing(tmp_path):
    for before, after, grown, warned, longest in run_ranks(keep_pace, 2, tmp_path):
        assert before == after
        # Steps of microseconds are no ground for calling a rank slow; a machine that stalls is.
        assert warned == [] or longest > LEAST_S / 2
        assert grown <= 4 * 2  # what one meeting keeps, however many there were


def meet(rank, world, tags, timeout_s):
    before = dist.group.WORLD._get_sequence_number_for_group()
    try:
        for tag in tags[rank]:
            barrier(tag, timeout_s=timeout_s)
    except HangError as error:
        return str(error)
    finally:
        assert dist.group.WORLD._get_sequence_number_for_group() == before
    return "fine"


BUILT = ["built", "loaded"]
OTHERS = "ranks are at different barriers: rank 0 at 'loaded'; rank 1 at 'data is ready'."
ABSENT = r"barrier 'loaded': rank 0 did not come within 0.5 s; rank 0 was last at 'built'\."
BARRIERS = {
    "at different ones": (20, [BUILT, ["built", "data is ready"]], [OTHERS] * 2),
    "never there": (0.5, [BUILT, []], ["barrier 'built': rank 1 .*; rank 1 was never", "fine"]),
    "the first is missing": (0.5, [["built"], BUILT], ["fine", ABSENT]),
}


@pytest.mark.parametrize(("timeout_s", "tags", "found"), BARRIERS.values(), ids=BARRIERS)
def test_a_barrier_says_who_is_where_and_who_is_missing(timeout_s, tags, found):
    for message, expected in zip(run_ranks(meet, 2, tags, timeout_s), found, strict=True):
        assert re.match(expected, message)


def _signalled(rank, world):
    def stop(*_):
        raise InterruptedError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(InterruptedError):
        RankStore(store, 0, (0, 1)).gather("meeting", "here", None, 30)


def test_a_signal_is_heard_while_ranks_are_waited_for():
    run_ranks(_signalled, 1, group=False, timeout_s=15)


# One process


def test_on_one_process_only_garbage_and_memory_remain(tmp_path):
    threads = set(threading.enumerate())  # those of earlier tests may end meanwhile
    barrier("set up")
    for mesh in (None, fk.build_mesh(device="cpu")):
        with Health(tmp_path, mesh, every=1, collect_every=2) as health:
            assert [health(create(mesh, step=step)) for step in (1, 2, 3)] == [None] * 3
            assert set(threading.enumerate()) <= threads
            assert not gc.isenabled()
        assert gc.isenabled()
    fk.shutdown()
    assert list(tmp_path.iterdir()) == []
