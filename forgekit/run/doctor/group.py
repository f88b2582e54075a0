"""What the ranks of a job can do together: reach each other, see one folder, agree on the time."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from forgekit.mesh import build_mesh
from forgekit.run.doctor.check import Check
from forgekit.run.doctor.folder import nearest

TRIPS = 20
NUMBERS = 2**20
"""Of float32 in the large sum: 4 MiB."""
SKEW_S = 1.0
"""Clocks that are further apart put log lines and time limits of ranks into a wrong order."""


def check_group(directory: str, device: str | None = None) -> list[Check]:
    """Let all ranks of this job talk to each other; each rank calls it, and its group stays.

    Args:
        directory: A run directory, which all ranks have to see.
        device: As for ``build_mesh``.

    Returns:
        What was found, the same on every rank.
    """
    mesh = build_mesh(device=device)
    return [*_round_trips(mesh.device_type), _shared(nearest(Path(directory))), _clocks()]


def _round_trips(kind: str) -> Iterator[Check]:
    world = dist.get_world_size()
    for device in dict.fromkeys((kind, "cpu")):
        one = torch.ones((), device=device)
        seconds = statistics.median(_sum_seconds(one) for _ in range(TRIPS))
        large = torch.ones(NUMBERS, device=device)
        rate = large.nbytes / 2**20 / min(_sum_seconds(large) for _ in range(3))
        total = torch.ones((), device=device)
        dist.all_reduce(total)
        name = f"sum on {device}"
        if total.item() != world:
            said = f"{world} ranks added ones up to {total.item():g}. Update the driver and torch."
            yield Check(name, "bad", said)
            continue
        said = f"{world} ranks add up one number in {1e6 * seconds:,.0f} us, 4 MiB at {rate:,.0f}"
        yield Check(name, "good", f"{said} MiB/s")


def _sum_seconds(numbers: torch.Tensor) -> float:
    """Time of one all-reduce until its result can be read."""
    start = time.perf_counter()
    dist.all_reduce(numbers)
    numbers.view(-1)[0].item()
    return time.perf_counter() - start


def _shared(folder: Path) -> Check:
    """Whether every rank sees a file that the first one has written."""
    names: list[str | None] = [f".forgekit-doctor-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names)
    file = folder / str(names[0])
    is_first = dist.get_rank() == 0
    with contextlib.suppress(OSError):  # the others wait for it, whether or not it can write
        if is_first:
            file.touch()
    dist.barrier()
    seen = _all_ranks(float(os.path.exists(file)))
    dist.barrier()
    if is_first and seen[0]:
        file.unlink(missing_ok=True)
    if not seen[0]:
        said = f"rank 0 cannot write into {folder}. Make it writable, or choose another out="
        return Check("shared folder", "bad", f"{said}.")
    blind = [rank for rank, value in enumerate(seen) if not value]
    if not blind:
        return Check("shared folder", "good", f"{len(seen)} of {len(seen)} ranks see {folder}")
    said = f"ranks {', '.join(map(str, blind))} do not see a file that rank 0 wrote into {folder}."
    return Check("shared folder", "bad", f"{said} Choose an out= that all machines share.")


def _clocks() -> Check:
    """How far the clocks of ranks are from the first one's, by the fastest of some exchanges."""
    skews = _all_ranks(_skew())
    rank = max(range(len(skews)), key=lambda rank: abs(skews[rank]))
    said = f"at most {1000 * abs(skews[rank]):.1f} ms from the clock of rank 0 (rank {rank})"
    if abs(skews[rank]) <= SKEW_S:
        return Check("clock skew", "good", said)
    return Check("clock skew", "bad", f"{said}. Let the machines keep time: chrony or systemd.")


def _skew() -> float:
    """This rank's clock minus the first one's, in seconds; every rank calls it.

    The first rank answers with its time; half of the trip had passed then. Source: Cristian,
    "Probabilistic clock synchronization", 1989.
    """
    own, there = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    best, skew = float("inf"), 0.0
    for rank in range(1, dist.get_world_size()):
        for _ in range(TRIPS):
            if dist.get_rank() == 0:
                dist.recv(own, src=rank)
                dist.send(torch.tensor(time.time(), dtype=torch.float64), dst=rank)
            elif dist.get_rank() == rank:
                start = time.time()
                dist.send(own, dst=0)
                dist.recv(there, src=0)
                end = time.time()
                if end - start < best:
                    best, skew = end - start, (start + end) / 2 - there.item()
    return skew


def _all_ranks(value: float) -> list[float]:
    values = torch.zeros(dist.get_world_size(), dtype=torch.float64)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()
