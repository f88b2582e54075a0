"""A generator and a trainer on a simulated clock: what lazy micro-batches are good for.

The stream is the library's own, and so is the staleness of each token that it finds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import attrs
from tensordict import TensorDict

from forgekit.rollouts.sources import Message
from forgekit.rollouts.stream import RolloutStream


@attrs.define
class Clock:
    """A source whose generator takes one unit of time for a message.

    The generator takes the newest weights for each message, and waits while enough messages wait.

    Attributes:
        most: Messages that may wait for the trainer.
        now: The trainer's time.
        idle: Time in which the trainer waited.
        made: When each message was begun, and the version of its weights.
        taken: When the trainer took each of them.
        published: When each version was published.
    """

    most: int
    has_ended = False
    now: float = 0.0
    idle: float = 0.0
    made: list[tuple[float, int]] = attrs.Factory(list)
    taken: list[float] = attrs.Factory(list)
    published: list[float] = attrs.Factory(lambda: [0.0])

    def read(self, timeout_s: float) -> Message:  # noqa: ARG002
        """Wait for the next message."""
        number = len(self.taken)
        while len(self.made) <= number:
            behind = len(self.made) - self.most
            room = self.taken[behind] if behind >= 0 else 0.0
            begins = max(self.made[-1][0] + 1 if self.made else 0.0, room)
            self.made.append((begins, sum(when <= begins for when in self.published) - 1))
        begins, version = self.made[number]
        self.idle += max(0.0, begins + 1 - self.now)
        self.now = max(self.now, begins + 1)
        self.taken.append(self.now)
        answer = {"prompts": [[1]], "ids": [[1, 2, 3]], "log_probs": [[-1.0, -1.0]]}
        return Message(str(number), {**answer, "rewards": [1.0], "versions": version})

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Nothing is kept."""

    def set_aside(self, message: Message, problem: str) -> None:
        """Nothing is kept."""


@attrs.frozen
class Simulation:
    """What happened.

    Attributes:
        clock: When messages were made and versions published.
        trained: When the trainer began with each message, and its staleness.
    """

    clock: Clock
    trained: list[tuple[float, int]]

    @property
    def staleness(self) -> float:
        """The mean over tokens; all messages have as many."""
        return sum(stale for _, stale in self.trained) / len(self.trained)

    @property
    def idle(self) -> float:
        """The share of the time in which the trainer waited."""
        return self.clock.idle / self.clock.now


def simulate(*, eager: bool, most: int = 8, steps: int = 20, micro_batches: int = 8) -> Simulation:
    """Train on messages that take as long to sample as to train.

    Args:
        eager: Whether a step begins once all its messages are there.
        most: Messages that may wait for the trainer.
        steps: Steps of the trainer; each publishes its weights.
        micro_batches: Messages of a step.

    Returns:
        The whole of it.
    """
    clock = Clock(most)
    stream, trained = RolloutStream(clock), []
    for version in range(steps):
        stream.version = version
        batches: Iterable[TensorDict] = islice(stream, micro_batches)
        for batch in list(batches) if eager else batches:
            stale: Any = batch["staleness"][batch["labels"] != -100]
            trained.append((clock.now, int(stale.max())))
            clock.now += 1
        clock.published.append(clock.now)
    return Simulation(clock, trained)
