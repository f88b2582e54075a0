"""A trainer and a generator that may be killed at any moment, as functions for processes."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from rollouts.answers import Policy, State, message, spoiling
from torch import Tensor

import forgekit as fk
from forgekit.rollouts.sources import RedisSource
from forgekit.rollouts.stream import RolloutStream


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Counted(State):
    """How often the weights of this state have seen each message."""

    counts: Tensor


def end_process() -> None:
    """Let the kernel kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    redis: Any,
    folder: str,
    total: int,
    kill: tuple[str, int] | None = None,
    *,
    bad_step: int | None = None,
    end: Callable[[], None] = end_process,
) -> list[int]:
    """Train to the end of the stream, saving each step; from the last checkpoint on, if any.

    Args:
        redis: URL or client.
        folder: Of checkpoints.
        total: Number of messages.
        kill: A point of the loop, and the step at which this process is killed there.
        bad_step: A step whose loss is NaN.
        end: What kills it.
    """

    def reach(point: str) -> None:
        if kill == (point, state.step):
            end()

    stream = RolloutStream(RedisSource(redis), batch_size=2)
    model, seen = Policy(), list[list[int]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = torch.zeros(total, dtype=torch.int64)
    state = Counted.create(model, optimizer, stream=stream, counts=counts)
    if fk.latest_checkpoint(folder) is not None:
        state = fk.checkpoint_load(state, folder)

    loss = spoiling(lambda _: state.step == bad_step, seen)
    step = fk.make_step(loss, schedule=fk.constant(0.1), end=stream)
    for group in fk.groups(stream, 1, end=stream):
        seen.clear()
        reach("started")
        state, metrics = step(state, group)
        reach("trained")
        if not metrics["skipped"]:
            trained = torch.tensor([*itertools.chain(*seen)], dtype=torch.int64)
            times = torch.bincount(trained, minlength=total)
            state = fk.donate(state, counts=state.counts + times)
        stream.commit(state, saved=False)
        reach("noted")
        fk.checkpoint_save(state, folder, blocking=True, keep=2)
        reach("saved")
        stream.commit(state)
        reach("committed")
    return state.counts.tolist()


def generate(url: str, total: int, done: str, pause_s: float) -> None:
    """Put every message that is not there yet, and then the end."""
    source = RedisSource(url)
    for number in range(total):
        source.wait_for_room(6)
        if source.put(message(number), key=str(number)):
            time.sleep(pause_s)
    source.end()
    Path(done).touch()
