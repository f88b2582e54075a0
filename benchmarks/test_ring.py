"""What ring attention saves: time beside one process, memory beside a slice on one rank."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
import torch.distributed as dist
from pairs import Times, band, ratio
from pool import run_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import forgekit as fk
from forgekit.parallel.context.ring_attention import ring_attention
from forgekit.parallel.context.sequence_exchange import Members

ONE, AGAIN, RING = "one process", "one process again", "ring of 2 ranks"
BESIDE = "one process beside another"
SLICE, SHARED = "a slice on one rank", "a slice in a ring"
ROUNDS = 30
LEAST_SPEEDUP = 1.6
MOST_MEMORY = 1.3


@attrs.frozen
class Size:
    """Places of the whole sequence, and the heads that attend."""

    places: int = 4096
    heads: int = 4
    kv_heads: int = 2
    channels: int = 64

    def run(self, attend: Callable[..., Tensor], ranks: int) -> Callable[[], None]:
        """Build a function that attends once, forward and backward, from one rank's places."""

        def run() -> None:
            shapes = [(1, self.places // ranks, h, self.channels) for h in self._all_heads]
            q, k, v = (torch.randn(shape).requires_grad_() for shape in shapes)
            attend(q, k, v).backward(torch.ones(shapes[0]))

        return run

    def block_bytes(self, ranks: int) -> int:
        """Keys and values of one rank's places."""
        return 2 * 4 * self.places // ranks * self.kv_heads * self.channels

    @property
    def _all_heads(self) -> tuple[int, int, int]:
        return self.heads, self.kv_heads, self.kv_heads


def time_ring(rank: int, world: int, size: Size, rounds: int) -> Times:
    """Rank 0 alone with the whole sequence, twice, all ranks with it, and all with their slices."""
    ring = size.run(ring_attention(Members.of(dist.group.WORLD)), world)
    whole = size.run(fk.model.attend_causal, 1)
    alone = whole if rank == 0 else _nothing
    entries = {ONE: alone, RING: ring, AGAIN: alone, BESIDE: whole}
    times: Times = {name: [] for name in entries}
    for number in range(rounds + 1):
        for name, run in entries.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            if number:  # the first round warms up
                times[name].append(time.perf_counter() - began)
    return times


def measure_ring(rank: int, world: int, size: Size) -> dict[str, float]:
    """Highest allocations of a rank, with its slice alone and in the ring."""
    runs = {
        SLICE: size.run(fk.model.attend_causal, world),
        SHARED: size.run(ring_attention(Members.of(dist.group.WORLD)), world),
    }
    peaks = {}
    for name, run in runs.items():
        run()
        peaks[name] = _peak_bytes(run)
    return peaks


def _nothing() -> None:
    pass


def _peak_bytes(run: Callable[[], None]) -> float:
    """Bytes by which the CPU allocator's total grows at its highest, by torch's own account."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("name") == "[memory]"]
    found = [event["args"] for event in sorted(found, key=lambda event: event["ts"])]
    before = found[0]["Total Allocated"] - found[0]["Bytes"]
    return max(event["Total Allocated"] for event in found) - before


@pytest.fixture(scope="module")
def times() -> Times:
    return run_ranks(time_ring, 2, Size(), ROUNDS, timeout_s=600)[0]


@pytest.mark.parametrize("name", [ONE, AGAIN, BESIDE, RING])
def test_ring_time(show, times, name):
    here, noise = ratio(times, name, ONE), band(times, AGAIN, ONE)
    rate = Size().places / sorted(times[name])[ROUNDS // 2]
    group = "causal attention to 4,096 places, forward and backward"
    show(group, times, name, ratio=here, band=noise, places_per_second=rate, speedup=1 / here)
    if name == RING:
        assert here <= 1 / LEAST_SPEEDUP + noise, f"{1 / here:.2f} times as fast, A/A {noise:.3f}"


SIZES = {"one head each": Size(kv_heads=4), "two to a key": Size(), "one key": Size(kv_heads=1)}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("world", [2, 4])
def test_ring_memory(show, world, kind):
    """A rank needs little more than for its own slice, and one block of another's."""
    began = time.perf_counter()
    found = run_ranks(measure_ring, world, SIZES[kind], timeout_s=300)
    times = {SHARED: [time.perf_counter() - began]}
    peaks = {name: max(peak[name] for peak in found) for name in found[0]}
    most = MOST_MEMORY * peaks[SLICE] + SIZES[kind].block_bytes(world)
    facts = {name: peak / 2**20 for name, peak in peaks.items()}
    show(f"MiB of a rank of {world}, {kind}", times, SHARED, **facts, most=most / 2**20)
    assert peaks[SHARED] <= most, f"{facts}, at most {most / 2**20:.1f} MiB"
