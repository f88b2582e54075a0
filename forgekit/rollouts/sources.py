"""Sources of rollouts: an iterator, a queue of other processes, or a Redis stream.

A source hands out one message at a time, keeps it until it is acknowledged where it can, and says
when no more will come. What a message holds is up to the function that builds batches of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import queue
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import attrs

LOOK_S = 1.0
"""Maximum seconds of a wait before stop requests are checked."""
MARK_S = 7 * 24 * 3600
"""Seconds for which Redis remembers message keys, so that none is put twice."""

log = logging.getLogger("forgekit")


@attrs.define(eq=False)
class Message:
    """A message of a generator.

    Attributes:
        id: Its name in the source.
        content: What ``to_batch`` of a stream takes.
        bad_steps: How many steps that it was in changed nothing.
    """

    id: str
    content: Any = attrs.field(repr=False)
    bad_steps: int = 0


class Source(Protocol):
    """The interface that a stream needs from a source; one thread calls ``read``."""

    has_ended: bool
    """Whether the source has ended; may become True when ``read`` returns None."""

    def read(self, timeout_s: float) -> Message | None:
        """Return the next message; None if none comes within the time-out."""
        ...

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Forget trained messages."""
        ...

    def set_aside(self, message: Message, problem: str) -> None:
        """Store a message that cannot be trained separately."""
        ...


def as_source(source: Any) -> Source:
    """Wrap an iterable, a queue, or a function without arguments that returns None at its end.

    Raises:
        TypeError: If it is nothing of these.
    """
    if hasattr(source, "read"):
        return cast(Source, source)
    if hasattr(source, "get") and hasattr(source, "put"):
        return QueueSource(source)
    if callable(source):  # not iter(source, None), which compares: an array has no truth value
        replies = itertools.starmap(source, itertools.repeat(()))
        source = itertools.takewhile(lambda message: message is not None, replies)
    return IteratorSource(source)


class IteratorSource:
    """Messages of an iterator in this process, each made on request."""

    def __init__(self, messages: Iterable[Any]) -> None:
        self.has_ended = False
        self._contents = iter(messages)
        self._ids = (f"{uuid.uuid4().hex[:8]}-{number}" for number in itertools.count())

    def __repr__(self) -> str:
        return "an iterator"

    def read(self, timeout_s: float) -> Message | None:  # noqa: ARG002
        """Return the iterator's next message; ignores the time-out."""
        for content in self._contents:
            return Message(next(self._ids), content)
        self.has_ended = True
        return None

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Nothing to do: an iterator keeps no messages."""

    def set_aside(self, message: Message, problem: str) -> None:
        """Nothing to do: the stream reports it."""


class QueueSource(IteratorSource):
    """Messages of a queue that other processes or threads fill; None ends the stream.

    A queue lives in memory: what was taken from it dies with this process. Give it a ``maxsize``,
    so that generators wait for the trainer.
    """

    def __init__(self, messages: Any) -> None:
        super().__init__(())
        self._queue = messages

    def __repr__(self) -> str:
        return "a queue"

    def read(self, timeout_s: float) -> Message | None:
        """Wait for the next message."""
        try:
            content = None if self.has_ended else self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self.has_ended = content is None
        return None if content is None else Message(next(self._ids), content)


class RedisSource:
    """Messages of a Redis stream, which outlive trainers and generators; both sides use this class.

    Trainers are consumers of one group: a message goes to one of them, and to the same one again
    until it is acknowledged, also after it was killed. Acknowledged messages are deleted. Where
    Redis itself may be killed, run it with ``appendonly yes`` and ``appendfsync always``; while it
    is away, both sides wait.

    Args:
        redis: A URL such as ``"redis://host:6379"``, or a client.
        name: Of the stream; other keys begin with it.

    Attributes:
        consumer: Names this reader, the same when it is started again. A ``RolloutStream`` names it
            after its data-parallel rank: two of one name would read the same messages.
    """

    GROUP = "trainer"

    def __init__(self, redis: Any, name: str = "rollouts") -> None:
        from redis import Redis, exceptions

        self.has_ended = False
        self.name, self.consumer = name, "rank0"
        timeouts = {"socket_timeout": 5 * LOOK_S, "socket_connect_timeout": LOOK_S}
        is_url = isinstance(redis, str)
        self._redis: Any = Redis.from_url(redis, **timeouts) if is_url else redis
        self._exceptions = exceptions
        self._away = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
        self._held: set[str] = set()
        self._looked_back: str | None = "0"  # pending messages are read up to this id; None: all

    def __repr__(self) -> str:
        return f"the Redis stream {self.name!r} (consumer {self.consumer!r})"

    def read(self, timeout_s: float) -> Message | None:
        """Wait for a message; earlier ones of this consumer come first."""
        try:
            message = self._look_back() or self._new(timeout_s)
            if message is None:
                # The reply with a message may have been lost: read pending ones again.
                self._looked_back = "0"
                if self._redis.exists(f"{self.name}:ended"):
                    message = self._look_back() or self._new(0)
                    self.has_ended = message is None
        except self._away as error:
            log.warning("waiting for %r: %s", self, error)
            self._looked_back = "0"
            time.sleep(min(timeout_s, LOOK_S / 4))
            return None
        return message

    def acknowledge(self, ids: Sequence[str]) -> None:
        """Delete trained messages.

        Raises:
            ConnectionError: If Redis is away; it may be tried again.
        """
        if ids:
            with self._redis.pipeline(transaction=True) as pipe:
                self._delete(pipe, ids)

    def set_aside(self, message: Message, problem: str) -> None:
        """Move a message to the stream ``<name>:set_aside``, with the reason."""
        kept = {"id": message.id, "rollout": _encode(message.content), "problem": problem}
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.xadd(f"{self.name}:set_aside", kept)
            try:
                self._delete(pipe, [message.id])
            except ConnectionError:
                self._held.discard(message.id)  # to be read again
                raise

    def put(self, content: Any, key: str | None = None, timeout_s: float = 600.0) -> bool:
        """Send a message; called by generators.

        Args:
            content: Numbers, texts, lists and dicts of them, and tensors, which become lists.
            key: Names what was sampled, such as its number. A message whose key was put before is
                left out, so that a generator which was killed, or whose reply was lost, may repeat.
            timeout_s: Seconds to wait for Redis.

        Returns:
            Whether it is new.

        Raises:
            ValueError: If a number is not finite.
            ConnectionError: If Redis stays away.
        """
        text, mark = _encode(content), f"{self.name}:put:{key}"
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with self._redis.pipeline(transaction=True) as pipe:
                    if key is not None:
                        pipe.watch(mark)
                        if pipe.exists(mark):
                            return False
                        pipe.multi()
                        pipe.set(mark, 1, ex=MARK_S)
                    pipe.xadd(self.name, {"rollout": text})
                    pipe.execute()
                    return True
            except self._exceptions.WatchError:
                continue  # another generator was faster
            except self._away:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_S / 4)

    def wait_for_room(self, most: int, timeout_s: float = 600.0) -> None:
        """Wait until fewer than ``most`` messages wait for a trainer; call it before sampling.

        This paces generators, which bounds both the length of the stream and the staleness of what
        is in it: with ``n`` generators a message waits behind at most ``most + n - 1`` others.

        Raises:
            TimeoutError: If trainers take none in time.
        """
        deadline = time.monotonic() + timeout_s
        while (waiting := self._waiting()) is None or waiting >= most:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"a generator has waited {timeout_s:g} s for room in {self!r}, which has "
                    f"{waiting} of at most {most} messages. Does the trainer run?"
                )
            time.sleep(LOOK_S / 50)

    def end(self) -> None:
        """Mark the end of the stream."""
        self._redis.set(f"{self.name}:ended", 1)

    def _waiting(self) -> int | None:
        """Count messages that no trainer has taken; None while Redis is unreachable."""
        try:
            try:
                taken = self._redis.xpending(self.name, self.GROUP)["pending"]
            except self._exceptions.ResponseError:  # no trainer has connected yet
                taken = 0
            return self._redis.xlen(self.name) - taken
        except self._away:
            return None

    def _look_back(self) -> Message | None:
        """Return this consumer's next message that is neither held here nor acknowledged."""
        while self._looked_back is not None:
            entries = self._entries(self._looked_back, count=64)
            self._looked_back = None
            for id_, fields in entries:
                self._looked_back = id_
                if not fields:  # deleted by hand
                    self.acknowledge([id_])
                elif id_ not in self._held:
                    return self._hold(id_, fields)
        return None

    def _new(self, timeout_s: float) -> Message | None:
        for id_, fields in self._entries(">", count=1, block=int(timeout_s * 1000) or None):
            return self._hold(id_, fields)
        return None

    def _entries(self, after: str, **options: Any) -> list[tuple[str, Any]]:
        arguments = self.GROUP, self.consumer, {self.name: after}
        try:
            streams = self._redis.xreadgroup(*arguments, **options)
        except self._exceptions.ResponseError:  # the group does not exist yet
            with contextlib.suppress(self._exceptions.ResponseError):  # another rank was faster
                self._redis.xgroup_create(self.name, self.GROUP, id="0", mkstream=True)
            streams = self._redis.xreadgroup(*arguments, **options)
        rows = streams.values() if isinstance(streams, dict) else [row for _, row in streams or ()]
        flat = itertools.chain(*rows)
        return [(_text(id_), fields) for id_, fields in flat]

    def _hold(self, id_: str, fields: Mapping[Any, Any]) -> Message:
        self._held.add(id_)
        text = {_text(name): _text(value) for name, value in fields.items()}.get("rollout", "")
        try:
            content = json.loads(text)
        except ValueError:
            content = text  # cannot be a batch, so it is set aside
        return Message(id_, content)

    def _delete(self, pipe: Any, ids: Sequence[str]) -> None:
        pipe.xack(self.name, self.GROUP, *ids)
        pipe.xdel(self.name, *ids)
        try:
            pipe.execute()
        except self._away as error:
            raise ConnectionError(f"{self!r} cannot be reached: {error}") from error
        self._held.difference_update(ids)


def _encode(content: Any) -> str:
    return json.dumps(content, default=lambda value: value.tolist(), allow_nan=False)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
