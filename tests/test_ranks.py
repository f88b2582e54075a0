"""The helper that every multi-rank test stands on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
from lab import SPEC
from pool import MOST_THREADS, RankError, run_ranks

import forgekit as fk

ROOT = Path(__file__).parents[1]


def _sum(rank, world, start):
    value = start + rank
    dist.all_reduce(value)
    return value


def _raise_on_one(rank, world):
    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def _die(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _sleep(rank, world):
    time.sleep(30)


def _folder(rank, world):
    return Path.cwd()


def test_neither_tests_nor_ranks_run_in_the_checkout():
    """There a user's own commands leave data and runs, and a recipe would read them."""
    for folder in (Path.cwd(), *run_ranks(_folder, 2)):
        assert not folder.is_relative_to(ROOT)


def test_an_error_on_one_rank_surfaces_and_the_next_job_is_clean():
    with pytest.raises(RankError, match="rank one is unwell"):
        run_ranks(_raise_on_one, 2)
    assert [sums.item() for sums in run_ranks(_sum, 4, torch.tensor(1.0))] == [10.0] * 4


def test_a_hang_is_given_up_after_the_timeout():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not finish in 0.5 s"):
        run_ranks(_sleep, 2, timeout_s=0.5)


def test_a_rank_that_dies_is_noticed_at_once():
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(_die, 2)
    assert time.monotonic() - start < 20


def _count_threads(rank, world):
    return len(os.listdir("/proc/self/task"))


def _lay_out(rank, world, dim):
    mesh = fk.build_mesh(fk.MeshSpec(tp=2), device="cpu")
    spec = attrs.evolve(SPEC, vocab_size=36, dim=dim)
    model = fk.parallelize(fk.Transformer(spec), mesh)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()


def test_jobs_do_not_leave_ever_more_groups_alive_on_their_workers():
    """Each would keep a thread that polls."""
    for dim in range(24, 24 * 7, 24):
        run_ranks(_lay_out, 2, dim)
        assert max(run_ranks(_count_threads, 2, group=False)) <= MOST_THREADS
