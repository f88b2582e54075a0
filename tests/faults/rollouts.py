"""Rollouts that are lost or trained twice, and weights that are not the trainer's."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from fakeredis import FakeRedis, FakeServer
from faults.folders import shared_folder
from faults.planting import Plant, method, value
from faults.table import Check, Fault
from lab import SPEC, alone, global_batch, head_loss
from rollouts.answers import message
from rollouts.lives import train

import forgekit as fk
from forgekit.rollouts import weights
from forgekit.rollouts.sources import RedisSource
from forgekit.rollouts.stream import RolloutStream

TOTAL = 8
UNTIED = attrs.evolve(SPEC, tied=False)
USER: dict[str, Any] = {"publish": fk.publish_weights}


class Killed(BaseException):
    """A life that ended."""


def _die() -> None:
    raise Killed


def _lives(rank: int, world: int) -> str:
    """Three lives of a trainer with a bad step, and a generator that repeats what it has put."""
    redis = FakeRedis(server=FakeServer())
    source = RedisSource(redis)
    for number in (*range(TOTAL), *range(3)):
        source.put(message(number), key=str(number))
    source.end()
    with shared_folder() as folder:
        for kill in (("noted", 3), ("saved", 4)):
            try:
                train(redis, str(folder), TOTAL, kill, bad_step=1, end=_die)
            except Killed:
                continue
            return "it was not killed"
        counts = train(redis, str(folder), TOTAL)
    lost = [number for number, count in enumerate(counts) if not count]
    twice = [number for number, count in enumerate(counts) if count > 1]
    left = f"left {redis.xlen('rollouts')}" if redis.xlen("rollouts") else ""
    return " ".join([f"lost {lost}"] * bool(lost) + [f"twice {twice}"] * bool(twice) + [left])


def _published(rank: int, world: int) -> str:
    """A generator of other values reads what a trainer publishes after a step."""
    state, generator = alone(fk.Transformer(UNTIED)), fk.Transformer(UNTIED, seed=1)
    step = fk.make_step(head_loss, schedule=fk.constant(0.02))
    state, _ = step(state, [row[0] for row in global_batch(1)])
    with shared_folder() as folder:
        try:
            USER["publish"](state, folder, version=1)
            fk.read_weights(generator, folder)
        except fk.CheckpointError as error:
            return str(error)
    ids = torch.arange(16)[None]
    same = torch.equal(state.model(ids), generator(ids))
    return "" if same else "another model samples, and nobody says so"


def _acknowledge_at_once(read: Any, self: Any, timeout_s: float) -> Any:
    found = read(self, timeout_s)
    self.acknowledge([] if found is None else [found.id])
    return found


def _forget_bad_step(judge: Any, self: Any) -> None:
    """What a bad step was given passes for trained."""
    self._steps = []
    judge(self)


def _publish_old(state: Any, folder: Any, version: int) -> None:
    """The optimizer's step goes elsewhere: what is gathered is a copy from before it."""
    old = fk.Transformer(UNTIED)
    with method(weights, "named_tensors", lambda named, _: named(old))():
        fk.publish_weights(state, folder, version)


def _published_of(keep: Any) -> Plant:
    """Some tensors alone."""

    def publish(state: Any, folder: Any, version: int) -> None:
        def some(named: Any, model: Any) -> Any:
            tensors = named(model)
            return {n: t for i, (n, t) in enumerate(tensors.items()) if keep(i, n)}

        with method(weights, "named_tensors", some)():
            fk.publish_weights(state, folder, version)

    return value(USER, "publish", publish)


def _commit_early(commit: Any, self: Any, state: Any, **_: Any) -> Any:
    return commit(self, state)


def _load_untrained(load: Any, self: Any, state: Any) -> Any:
    return load(self, {**state, "trained": []})


def _put_without_key(put: Any, self: Any, content: Any, **_: Any) -> Any:
    return put(self, content)


CHECKS = {
    "lives of a trainer": Check(measure=_lives, world=1),
    "published weights": Check(measure=_published, world=1),
}
LIVES, PUBLISHED = CHECKS
AT_ONCE = method(RedisSource, "read", _acknowledge_at_once)
EARLY = method(RolloutStream, "commit", _commit_early)
UNTRAINED = method(RolloutStream, "load_state_dict", _load_untrained)
KEPT = method(RolloutStream, "_judge", _forget_bad_step)
REPEATED = method(RedisSource, "put", _put_without_key)
OLD = value(USER, "publish", _publish_old)
HALF = _published_of(lambda number, _: number % 2)
HEADLESS = _published_of(lambda _, name: name != "output.weight")
FAULTS = [
    Fault("acknowledged as it is read", LIVES, AT_ONCE, "lost"),
    Fault("acknowledged before the save", LIVES, EARLY, "lost"),
    Fault("a loaded state that acknowledges nothing", LIVES, UNTRAINED, "twice"),
    Fault("a bad step that keeps its rollouts", LIVES, KEPT, "lost"),
    Fault("a generator's repetition is another sample", LIVES, REPEATED, "twice"),
    Fault("old weights under a new version", PUBLISHED, OLD, "nats on the probe"),
    Fault("half the tensors", PUBLISHED, HALF, "is of another model"),
    Fault("a lost head", PUBLISHED, HEADLESS, r"adds \['output.weight'\]"),
]
