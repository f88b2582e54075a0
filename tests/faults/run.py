"""Ranks that do not come any more, and data that end apart: within a time all ranks say so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from faults.planting import value
from faults.table import Check, Fault, saying
from lab import SPEC, global_batch, lay_out, logits_loss

import forgekit as fk

LATE_S, TIMEOUT_S = 8, 2.0
USER: dict[str, Any] = {
    "before": lambda rank, step: None,
    "step_end": lambda end: end,
    "groups_end": lambda end: end,
}


def _watched(rank: int, world: int, folder: Path) -> str:
    """Three steps under ``Health``, whose groups wait two seconds."""
    store = dist.FileStore(str(folder / "store"), world)
    patience = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=patience)
    try:
        return _train(rank, world, folder)
    finally:
        (folder / f"left_{rank}").touch()
        while len([*folder.glob("left_*")]) < world:  # a rank that left would be an answer
            time.sleep(0.05)
        dist.destroy_process_group()


@saying
def _train(rank: int, world: int, folder: Path) -> str:
    state = lay_out(fk.Transformer(SPEC))
    step = fk.make_step(logits_loss, schedule=fk.constant(0.1))
    with fk.Health(folder, state.mesh, every=1, timeout_s=TIMEOUT_S) as health:
        for number in range(3):
            USER["before"](rank, number)
            state, _ = step(state, [row[rank] for row in global_batch(world)])
            health(state)
    return ""


def _waiting(by_rank: Sequence[str]) -> str:
    """What the rank says that waits for the other one."""
    return by_rank[0]


def _late(rank: int, step: int) -> None:
    """Rank 1 does not come to the second step in time."""
    if (rank, step) == (1, 1):
        time.sleep(LATE_S)


def _broken(rank: int, step: int) -> None:
    if (rank, step) == (1, 1):
        raise KeyError("a broken row")


@saying
def _ending(rank: int, world: int) -> str:
    """Data that end on rank 1 a step earlier; all ranks take the same steps."""
    state, end = lay_out(fk.Transformer(SPEC)), fk.run.DataEnd("pad")
    step = fk.make_step(logits_loss, schedule=fk.constant(0.1), end=USER["step_end"](end))
    stream = [row[rank] for row in global_batch(world)[: 2 + (rank == 0)]]
    for batches in fk.groups(iter(stream), 1, end=USER["groups_end"](end)):
        state, _ = step(state, batches)
    return "" if state.step == 3 else f"{state.step} steps"


CHECKS = {
    "watched": Check(measure=_watched, judge=_waiting, alone=True, breaks=True),
    "ending": Check(measure=_ending, alone=True),
}
LATE, BROKEN = value(USER, "before", _late), value(USER, "before", _broken)
UNKNOWN = value(USER, "groups_end", lambda end: None)
FAILED = "^HangError.*rank 1 failed: KeyError: 'a broken row'"
FAULTS = [
    Fault("an end that groups does not know", "ending", UNKNOWN, "to make_step but not to groups"),
    Fault("a rank that hangs", "watched", LATE, r"^HangError.*rank 1 is at run\.py:\d+ in _late"),
    Fault("a rank that fails", "watched", BROKEN, FAILED),
]
