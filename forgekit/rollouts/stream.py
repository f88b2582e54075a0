"""Rollouts as a stream of micro-batches that loses nothing and trains nothing twice.

A message of a source is a sample. Samples are numbered as they are handed out, over all ranks:
micro-batch ``m`` of ``R`` data-parallel ranks with ``B`` messages takes, on rank ``r``, the numbers
``start + (m * R + r) * B + (0..B-1)``, so that ``state.samples`` says which of them are trained. A
message is acknowledged when its number is below that of a state that was saved; until then its
source hands it out again after a kill, and a step that changed nothing gives its messages back.

::

    source ---> handed out ---> trained ---> acknowledged
                 |     ^         commit(state, saved=False)   commit(state)
                 |     |
                 +-----+  a bad step, a step that failed, a kill

Each message is read by the first of the ranks that share data (``tp``, ``cp``, ``pp``), which sends
the micro-batch to the others. While it waits, all of them look at the stop request every second.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forgekit.checks import brief, check_integers, check_numbers, counted
from forgekit.data.batch import IGNORED, mask_batch
from forgekit.data.groups import count_micro_batches
from forgekit.mesh import data_ranks, process_rank
from forgekit.parallel.agreement import exchange
from forgekit.ranks import explain
from forgekit.rollouts.batch import join_rollouts
from forgekit.rollouts.sharing import Sharing
from forgekit.rollouts.sources import LOOK_S, Message, RedisSource, as_source
from forgekit.state import TrainState
from forgekit.steps.make_step import Vote
from forgekit.tensors import HostCopy

FAILED = 2.0**20
"""Vote of a rank whose source failed: larger than all votes for an end together."""
KEPT = 16
"""Number of set-aside messages that a stream keeps; persistent sources keep all."""

log = logging.getLogger("forgekit")

_Outcome = tuple[TensorDict | None, str | None, bool]
"""A micro-batch, or why there is none: a problem, a stop request, or (neither) the end."""


class RolloutStream:
    """Messages of generators as one data-parallel rank's micro-batches, lazily.

    It is the ``end`` of ``groups`` and ``make_step`` too, and belongs in a field of the state, so
    that checkpoints hold which samples they have trained::

        stream = fk.rollouts.RolloutStream(source, batch_size=4, mesh=mesh, stop=stop)
        step = fk.make_step(loss_fn, schedule=schedule, stop=stop, end=stream)
        for batches in fk.groups(stream, micro_batches, end=stream):
            state, metrics = step(state, batches)
            stream.commit(state, saved=False)
            if every(save_every, state):
                fk.checkpoint_save(state, checkpoints, blocking=True)
                stream.commit(state)

    A rank whose messages have ended goes on with padding until no rank has any; the last step has
    none at all and changes nothing. A rank whose source fails, or lets it wait too long, pads its
    step, and after it all ranks raise. After a stop request, no further messages are
    awaited.

    Args:
        source: An iterator, or a function that returns the next message and None at the end, read
            when a micro-batch needs it; a queue of ``multiprocessing``; or a ``RedisSource``.
        batch_size: Messages of a micro-batch on each data-parallel rank.
        to_batch: Makes a micro-batch of a list of messages; of none a row of padding.
            ``functools.partial(join_rollouts, pad_to=...)`` gives rows one length.
        mesh: What ``build_mesh`` returned.
        shared: Whether one of the ranks that share data reads for all of them. False asks the
            source of each, which must give them the same messages: a model that generates here on
            all of them does.
        start: ``state.samples`` where the stream begins.
        stop: The run's ``StopSignal``.
        timeout_s: Seconds to wait for a message that can be trained.
        attempts: Bad steps after which a message is set aside.

    Attributes:
        samples: Numbers that all ranks have handed out.
        version: The trainer's version of the weights: set it after each publication. Batches then
            hold ``staleness`` ``[b s]``, and messages of later versions are set aside.
        world: Number of data-parallel ranks.
        wait_seconds: How long this rank has waited.
        set_aside: The last messages that could not be trained, with the reason.

    Raises:
        TypeError: If the source is none.
        ValueError: If a number is out of range.

    Examples:
        >>> answers = {"prompts": [[5]], "ids": [[5, 7]], "log_probs": [[-0.5]], "rewards": [1.0]}
        >>> stream = RolloutStream(iter([answers]))
        >>> [batch["labels"].tolist() for batch in stream], stream.samples
        ([[[7]]], 1)
    """

    def __init__(
        self,
        source: Any,
        batch_size: int = 1,
        *,
        to_batch: Callable[[Sequence[Any]], TensorDict] = join_rollouts,
        mesh: DeviceMesh | None = None,
        shared: bool = True,
        start: int = 0,
        stop: Vote | None = None,
        timeout_s: float = 600.0,
        attempts: int = 3,
    ) -> None:
        check_integers(batch_size=(batch_size, 1), start=(start, 0), attempts=(attempts, 1))
        check_numbers(timeout_s=(timeout_s, 0))
        self.rank, self.world = data_ranks(mesh)
        self.samples = start
        self.version: int | None = None
        self.wait_seconds = self._came = 0.0  # the latter: time of the last message
        self.set_aside: deque[tuple[Any, str]] = deque(maxlen=KEPT)
        self._sharing = Sharing(mesh if shared else None)
        self._round = 0  # round of sharing; messages of earlier rounds are void
        self._source = as_source(source) if self._sharing.is_first else None
        if isinstance(self._source, RedisSource):
            self._source.consumer = f"rank{self.rank}"
        self._batch_size, self._to_batch = batch_size, to_batch
        self._stop, self._timeout_s, self._attempts = stop, timeout_s, attempts
        self._last: TensorDict | None = None
        self._built: TensorDict | None = None  # of the last message taken
        self._taken: list[Message] = []  # for the next micro-batch
        self._again: deque[Message] = deque()  # given back
        self._out: dict[int, Message] = {}  # handed out but not acknowledged, by number
        # Of each committed step the samples, and the number of consecutive bad steps up to it.
        self._steps: list[tuple[range, HostCopy]] = []
        self._noted = start  # samples below it belong to committed steps
        self._trained: set[str] = set()  # trained in the loaded state, but not acknowledged yet
        self._is_over = self._is_stopped = self._is_watched = False
        self._is_empty = True  # whether the step has only padding so far
        self._problem: str | None = None
        self._heard = self._unnoted = 0
        self._votes: HostCopy | None = None

    def micro_batches(self, global_batch_size: int) -> int:
        """Count the micro-batches of a step, given its number of messages over all ranks.

        Raises:
            ValueError: If that is not a whole number of at least 1.
        """
        return count_micro_batches(global_batch_size, self._batch_size, self.world)

    def __iter__(self) -> Iterator[TensorDict]:
        return self

    def __next__(self) -> TensorDict:
        if self.world > 1 and not self._is_watched:
            raise RuntimeError(
                f"this stream is one of {self.world} and ends on its own, so the others would wait "
                "forever. Pass it as end= to forgekit.groups and forgekit.make_step."
            )
        began = time.monotonic()
        batch = None if self._is_over else self._next(began)
        self.wait_seconds += time.monotonic() - began
        if batch is None and not self._is_watched:
            if self._problem is not None:
                raise RuntimeError(self._problem)
            raise StopIteration
        first = self.samples + self.rank * self._batch_size
        self.samples += self.world * self._batch_size
        if batch is None:
            if self._last is None:
                self._last = self._to_batch([])
            return self._with_staleness(mask_batch(self._last))
        self._is_empty = False
        self._out.update(enumerate(self._taken, start=first))
        self._taken = []
        self._last = batch
        return self._with_staleness(batch)

    def _next(self, began: float) -> TensorDict | None:
        """Wait for the next micro-batch, with the ranks that share it; None at the end."""
        if self._sharing.is_first:
            outcome = self._read_batch(began)
            self._sharing.send((self._round, outcome))
        else:
            sent, outcome = self._sharing.receive(self._pass_stop_on)
            while sent != self._round:
                sent, outcome = self._sharing.receive(self._pass_stop_on)
        batch, self._problem, self._is_stopped = outcome
        self._is_over = batch is None
        return batch

    def _wants_stop(self) -> bool:
        return self._stop is not None and self._stop.vote() > 0

    def _pass_stop_on(self) -> None:
        if self._wants_stop():
            self._sharing.ask_to_stop()

    def _read_batch(self, began: float) -> _Outcome:
        """Read until there is a micro-batch, or until the end."""
        while True:
            batch, problem = self._look(began)
            is_over = batch is None and self._source_has_ended()
            if batch is not None or problem is not None or is_over:
                return batch, problem, False
            if self._wants_stop() or self._sharing.is_asked_to_stop():
                return None, None, True

    def _look(self, began: float) -> tuple[TensorDict | None, str | None]:
        """Read for up to a second; return a micro-batch, or why none will come."""
        looked = time.monotonic()
        try:
            while len(self._taken) < self._batch_size and (message := self._read()):
                self._take(message)
                if time.monotonic() - max(looked, self._came) > LOOK_S:
                    break  # messages come, but all are set aside
            is_due = len(self._taken) == self._batch_size or self._source_has_ended()
            if is_due and len(self._taken) == 1:
                return self._built, None
            if is_due and self._taken:
                return self._to_batch([message.content for message in self._taken]), None
            began = max(began, self._came)
            if time.monotonic() - began > self._timeout_s:
                raise TimeoutError(self._waited(began))
        except Exception as error:
            if not dist.is_initialized() or dist.get_world_size() == 1:
                raise
            return None, f"rank {process_rank()}: {explain(error)}"
        return None, None

    def _read(self) -> Message | None:
        if self._again:
            return self._again.popleft()
        if self._source is None or self._source.has_ended:
            return None
        message = self._source.read(LOOK_S)
        while message is not None and message.id in self._trained:
            message = self._source.read(LOOK_S)
        return message

    def _source_has_ended(self) -> bool:
        return self._source is not None and self._source.has_ended and not self._again

    def _take(self, message: Message) -> None:
        """Add a message to the next micro-batch, or set it aside if it is not valid."""
        try:
            batch = self._to_batch([message.content])
            newest = int(batch["versions"].max()) if "versions" in batch else 0
        except Exception as error:
            return self._set_aside(message, explain(error))
        if self.version is not None and newest > self.version:
            problem = f"was sampled with version {newest}, and the trainer's is {self.version}"
            return self._set_aside(message, problem)
        self._built, self._came = batch, time.monotonic()
        return self._taken.append(message)

    def _set_aside(self, message: Message, problem: str) -> None:
        log.warning("set aside message %s (%s): %s", message.id, brief(message.content), problem)
        self.set_aside.append((message.content, problem))
        assert self._source is not None
        try:
            self._source.set_aside(message, problem)
        except ConnectionError as error:
            log.warning("%s; message %s will come again", error, message.id)

    def _with_staleness(self, batch: TensorDict) -> TensorDict:
        if self.version is not None:
            is_trained = batch["labels"] != IGNORED
            batch["staleness"] = torch.where(is_trained, self.version - batch["versions"], 0)
        return batch

    def _waited(self, began: float) -> str:
        asides = f"; {self.set_aside[-1][1]}" if self.set_aside else ""
        return (
            f"rank {process_rank()}, reader {self.rank} of {self.world}, has waited "
            f"{time.monotonic() - began:.0f} s for sample {self.samples} of {self._source!r}, and "
            f"{len(self._taken)} of {counted(self._batch_size, 'message')} came{asides}. Are the "
            "generators alive?"
        )

    def commit(self, state: TrainState, *, saved: bool = True) -> None:
        """Record the messages that a step has trained; acknowledge them once a save has them.

        Call it after each step, on every rank: what a bad step was given is read again. It reads
        one number from the device, at once if ``saved``.

        Args:
            state: What the step returned.
            saved: Whether the state is safe: written to disk, or never to be gone back to. If not,
                messages are kept until a later call.

        Raises:
            RuntimeError: If more was handed out than the state has taken, because a step failed, or
                steps were taken without a call.
        """
        if state.samples != self.samples:
            raise RuntimeError(
                f"samples up to {self.samples} were handed out, but the state has taken "
                f"{state.samples}: a step failed in between (call stream.give_back() then), or "
                "the stream did not start at state.samples."
            )
        if self._unnoted > 1:
            raise RuntimeError(
                f"{self._unnoted} steps were taken since the last commit, so it is unknown which "
                "of them changed nothing. Call stream.commit(state, saved=False) after each."
            )
        self._unnoted = 0
        if self.samples > self._noted:
            steps = range(self._noted, self.samples)
            self._steps.append((steps, HostCopy(state.skipped)))
            self._noted = self.samples
        if saved:
            self._judge()
            self._acknowledge()

    def give_back(self) -> None:
        """Take back messages handed out since the last commit, as after a step that raised."""
        self._again.extend(self._out.pop(n) for n in sorted(self._out) if n >= self._noted)
        self.samples = self._noted
        self._round += 1
        self._reopen()

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the trained but unacknowledged messages, as JSON values.

        Raises:
            RuntimeError: If a step was not committed: it may have changed nothing.
        """
        if self.samples != self._noted:
            raise RuntimeError(
                f"samples {self._noted} to {self.samples} were handed out but not committed. Call "
                "stream.commit(state, saved=False) after the step and before the save."
            )
        self._judge()
        trained = sorted({message.id for message in self._out.values()} | self._trained)
        return {"samples": self.samples, "reader": [self.rank, self.world], "trained": trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state: acknowledge its trained messages, read the others again.

        Raises:
            ValueError: If it is the position of another reader.
        """
        if (reader := [self.rank, self.world]) != [*state["reader"]]:
            raise ValueError(
                f"the stream's position belongs to reader {state['reader']}, but this is {reader} "
                "(rank, number of data-parallel ranks); each knows only its own messages. Resume "
                "on the same number of ranks."
            )
        self._trained = set(state["trained"])
        out = [self._out[number] for number in sorted(self._out)]
        self._again.extend(message for message in out if message.id not in self._trained)
        self._steps, self._out = [], {}
        self.samples = self._noted = state["samples"]
        self._round += 1
        self._reopen()
        self._acknowledge()

    def _judge(self) -> None:
        """Take back the messages of bad steps, which changed nothing."""
        for numbers, skipped in self._steps:
            if not int(skipped.read()):
                continue
            self._reopen()
            for message in [self._out.pop(n) for n in numbers if n in self._out]:
                message.bad_steps += 1
                if message.bad_steps < self._attempts:
                    self._again.append(message)
                else:
                    self._set_aside(message, f"was in {counted(self._attempts, 'bad step')}")
        self._steps = []

    def _reopen(self) -> None:
        """Let all ranks that share the reader ask it again: messages may have come back."""
        self._is_over = self._problem is not None or self._is_stopped

    def _acknowledge(self) -> None:
        if self._source is None:
            return
        try:
            self._source.acknowledge([*self._trained, *(m.id for m in self._out.values())])
        except ConnectionError as error:
            log.warning("%s; what is trained is acknowledged later", error)
        else:
            self._trained, self._out = set(), {}

    def watch(self, has_more: Callable[[], bool]) -> None:  # noqa: ARG002
        """Continue with padding after the end; never reads ahead, which would sample early."""
        self._is_watched, self._heard, self._votes = True, 0, None

    def vote(self) -> float:
        """Return 1.0 if this rank's messages ended before this step; more if its source failed."""
        # Before the step: one with messages may turn out bad and give them back.
        return FAILED if self._problem is not None else float(self._is_over and self._is_empty)

    def receive(self, votes: Tensor) -> None:
        """Take the votes of all ranks, ``[]`` on the device."""
        self._heard += 1
        self._unnoted += 1
        self._is_empty = True
        self._votes = HostCopy(votes)

    def goes_on(self, groups: int) -> bool:
        """Whether another group follows after so many; the same on all ranks.

        Raises:
            RuntimeError: On all ranks, if the source of one has failed, or if steps have voted
                less often than there were groups.
        """
        if self._heard < groups:
            raise RuntimeError(
                "the stream was passed as end= to groups but not to make_step, so ranks would wait "
                "for each other forever; pass it to both."
            )
        self._judge()
        if self._votes is None:
            return True
        votes = float(self._votes.read())
        if votes >= FAILED:
            problems = dict.fromkeys(problem for problem in exchange(self._problem) if problem)
            raise RuntimeError("; ".join(problems))
        return votes < (dist.get_world_size() if dist.is_initialized() else 1)
