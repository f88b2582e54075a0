"""A stream of rollouts: lazy, committed after the step, none lost and none trained twice."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import threading
import time
from functools import partial
from queue import Queue
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fakeredis import FakeRedis, FakeServer
from rollouts.answers import Policy, State, build_state, loss_fn, message, numbers, spoiling, train
from tensordict import TensorDict

import forgekit as fk
from forgekit.rollouts import stream as stream_file
from forgekit.rollouts.sources import RedisSource
from forgekit.rollouts.stream import RolloutStream


def filled(count: int, **changes: Any) -> FakeRedis:
    """A server with that many messages."""
    redis = FakeRedis(server=FakeServer())
    source = RedisSource(redis)
    for number in range(count):
        assert source.put(message(number, **changes), key=str(number))
    return redis


def queue_of(count: int) -> Any:
    queue = multiprocessing.get_context("spawn").Queue()
    for number in range(count):
        queue.put(message(number))
    queue.put(None)
    return queue


def ended(count: int) -> FakeRedis:
    """The same, and the end."""
    RedisSource(redis := filled(count)).end()
    return redis


SOURCES = {
    "iterator": lambda count: map(message, range(count)),
    "function": lambda count: partial(next, map(message, range(count)), None),
    "queue": queue_of,
    "redis": lambda count: RedisSource(ended(count)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_hands_out_each_message_once_and_in_order(kind):
    stream = RolloutStream(SOURCES[kind](7), batch_size=2)
    assert [numbers(batch) for batch in stream] == [[0, 1], [2, 3], [4, 5], [6]]
    assert stream.samples == 8


def test_messages_of_a_function_may_be_anything_but_none_and_it_may_be_asked_again():
    """An array that is compared with None is an array."""
    replies = [np.arange(3), TimeoutError("busy"), np.zeros(2), None, np.ones(1)]
    reply = partial(mock.Mock(side_effect=replies))

    def joined(arrays: Any) -> TensorDict:
        return TensorDict({"labels": torch.from_numpy(np.stack(arrays)).long()}, [1])

    stream = RolloutStream(reply, to_batch=joined, timeout_s=5)
    assert next(stream)["labels"].tolist() == [[0, 1, 2]]
    with pytest.raises(TimeoutError, match="busy"):
        next(stream)
    assert [batch["labels"].tolist() for batch in stream] == [[[0, 0]]]


def test_no_message_is_made_before_its_micro_batch_is_due():
    made, seen = list[int](), list[int]()

    def generate() -> Any:
        for number in itertools.count():
            made.append(number)
            yield message(number)

    def loss(model: Any, batch: Any) -> fk.Loss:
        seen.append(len(made))
        return loss_fn(model, batch)

    train(RolloutStream(generate(), batch_size=2), 3, loss, steps=2)
    assert seen == [2, 4, 6, 8, 10, 12]


def test_tensors_and_bits_survive_the_way_through_redis_and_a_key_is_put_once():
    redis = FakeRedis(server=FakeServer())
    exact = torch.tensor([-1 / 3, -0.1], dtype=torch.float32)
    sent = {"prompts": [[5]], "ids": [torch.tensor([5, 6, 7])], "log_probs": [exact]}
    for key, is_new in (("a", True), ("a", False), (None, True)):
        assert RedisSource(redis).put({**sent, "rewards": [1.0]}, key=key) == is_new
    assert redis.xlen("rollouts") == 2
    batch = next(RolloutStream(RedisSource(redis)))
    assert torch.equal(batch["log_probs"], exact[None])
    assert batch["labels"].tolist() == [[6, 7]]


def test_a_generator_waits_until_fewer_messages_wait():
    """What is taken, though not acknowledged, is trained and kept, and must not stop anybody."""
    redis = filled(3)
    source = RedisSource(redis)
    with pytest.raises(TimeoutError, match=r"3 of at most 3 messages\. Does the"):
        source.wait_for_room(3, timeout_s=0.1)
    next(RolloutStream(RedisSource(redis)))
    source.wait_for_room(3, timeout_s=0.1)
    assert redis.xlen("rollouts") == 3


def trained(redis: FakeRedis, steps: int) -> State:
    """Steps of two messages on what a server has."""
    return train(RolloutStream(RedisSource(redis), batch_size=2), steps=steps)


def left(redis: FakeRedis) -> list[int]:
    rows = [json.loads(fields[b"rollout"]) for _, fields in redis.xrange("rollouts")]
    return [row["prompts"][0][1] * 8 + row["prompts"][0][2] for row in rows]


def test_messages_are_acknowledged_with_the_state_that_was_saved(tmp_path):
    redis = filled(8)
    state = trained(redis, steps=2)
    assert left(redis) == [*range(8)]
    fk.checkpoint_save(state, tmp_path, blocking=True)
    assert left(redis) == [*range(8)]
    state.stream.commit(state)
    assert left(redis) == [4, 5, 6, 7]


def test_what_a_loaded_state_has_trained_is_not_trained_while_redis_is_away(tmp_path):
    redis = filled(6)
    state = trained(redis, steps=1)
    fk.checkpoint_save(state, tmp_path, blocking=True)
    server = redis.connection_pool.connection_kwargs["server"]
    server.connected = False
    stream, saved = RolloutStream(RedisSource(redis), batch_size=2), state.stream.state_dict()
    state = fk.checkpoint_load(build_state(stream), tmp_path)
    assert stream.state_dict() == saved  # which the next save will hold
    threading.Timer(0.5, setattr, (server, "connected", True)).start()
    assert numbers(next(stream)) == [2, 3]
    stream.give_back()
    stream.commit(state)
    assert left(redis) == [2, 3, 4, 5]


def test_a_lost_reply_is_read_again():
    redis = filled(2)
    redis.xgroup_create("rollouts", "trainer", id="0")
    source = RedisSource(redis)
    source._looked_back = None  # it looked back, and then the reply to its first question was lost
    redis.xreadgroup("trainer", "rank0", {"rollouts": ">"}, count=1)
    stream = RolloutStream(source)
    assert (numbers(next(stream)), numbers(next(stream))) == ([1], [0])


def test_what_could_not_be_set_aside_comes_again():
    redis = filled(1)
    source, server = RedisSource(redis), redis.connection_pool.connection_kwargs["server"]
    (first,) = filter(None, (source.read(0.01) for _ in range(2)))
    server.connected = False
    with pytest.raises(ConnectionError, match="cannot be reached"):
        source.set_aside(first, "was bad")
    server.connected = True
    (again,) = filter(None, (source.read(0.01) for _ in range(2)))
    assert again.id == first.id


@pytest.mark.parametrize("saved", [True, False])
def test_a_bad_step_gives_its_messages_back_and_a_spoiled_one_is_set_aside(saved):
    redis, seen = ended(4), list[Any]()
    stream = RolloutStream(RedisSource(redis), batch_size=1, attempts=2)
    state = train(stream, 1, spoiling(lambda given: given == [1], seen), saved=saved)
    stream.commit(state)
    assert (seen, left(redis)) == ([[0], [1], [1], [2], [3], []], [])
    ((_, aside),) = redis.xrange("rollouts:set_aside")
    assert aside[b"problem"] == b"was in 2 bad steps"
    assert json.loads(aside[b"rollout"]) == message(1)


def test_a_bad_last_step_is_tried_again():
    """Its group knows that no more will come."""
    seen: list[Any] = []
    loss = spoiling(lambda given: given == [2] and seen.count([2]) == 1, seen)
    state = train(RolloutStream(map(message, range(3))), 2, loss)
    assert (state.step, int(state.targets)) == (4, 9)


def test_a_step_that_failed_gives_its_messages_back():
    stream = RolloutStream(map(message, range(4)), batch_size=2)
    state = build_state(stream)
    with pytest.raises(ZeroDivisionError):
        fk.accumulate(state, next(fk.groups(stream, 1)), lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match="up to 2 were handed out, but the state has taken"):
        stream.commit(state)
    stream.give_back()
    state = train(stream, state=state, steps=1)
    assert (state.samples, int(state.targets)) == (2, 6)


MALFORMED = {
    "no JSON": (None, "Can|string|indices"),
    "no ids": ({"ids": []}, "but 0 ids"),
    "another prompt": ({"prompts": [[1], [1]]}, "do not begin with its prompt"),
    "a reward short": ({"rewards": [1.0]}, "shape|came with"),
    "an empty group": (message(0, answers=0), "has no answer"),
    "a later version": ({"versions": 7}, "sampled with version 7, and the trainer's is 3"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_message_is_set_aside_with_the_reason(case):
    changes, problem = MALFORMED[case]
    redis = filled(1)
    text = "{" if changes is None else json.dumps({**message(1), **changes})
    redis.xadd("rollouts", {"rollout": text})
    RedisSource(redis).put(message(2))
    stream = RolloutStream(RedisSource(redis), batch_size=2)
    stream.version = 3
    assert numbers(next(stream)) == [0, 2]
    ((_, why),) = stream.set_aside
    ((_, aside),) = redis.xrange("rollouts:set_aside")
    assert aside[b"problem"].decode() == why
    assert re.search(problem, why), why
    assert len(left(redis)) == 2


def test_a_reward_that_is_no_number_is_refused_where_it_is_put():
    nan = message(0, rewards=[float("nan"), 0.0])
    with pytest.raises(ValueError, match="Out of range float"):
        RedisSource(FakeRedis(server=FakeServer())).put(nan)
    stream = RolloutStream(iter([nan, message(1)]))
    assert numbers(next(stream)) == [1]
    assert "reward of answer 0" in stream.set_aside[0][1]


def test_staleness_is_the_trainers_version_less_that_of_each_token():
    one = {"prompts": [[1], [1]], "ids": [[1, 2, 3], [1, 4, 5, 6]], "rewards": [0, 1]}
    one |= {"log_probs": [[-1.0] * 2, [-1.0] * 3], "versions": [[3, 3], [5, 4, 3]]}
    stream = RolloutStream(iter([one]))
    stream.version = 5
    batch = next(stream)
    assert batch["staleness"].tolist() == [[0, 1, 2], [2, 2, 0]]
    total, count = loss_fn(Policy(), batch).metrics["rollout/staleness"]
    assert (float(total), float(count)) == (7, 5)


def test_a_wait_ends_with_the_stop_request_and_loses_nothing():
    redis = filled(3)
    stop = fk.StopSignal(signals=())
    stream = RolloutStream(RedisSource(redis), batch_size=2, stop=stop)
    began = time.monotonic()
    threading.Timer(0.5, stop.request, ["enough"]).start()
    state = train(stream, 2, saved=True, stop=stop)  # 3 of 4 have come
    assert time.monotonic() - began < 20
    assert (int(state.targets), left(redis)) == (6, [2])


def test_a_wait_that_is_too_long_says_who_waits_for_what():
    stream = RolloutStream(RedisSource(filled(1)), batch_size=2, timeout_s=0.1)
    says = r"rank 0, reader 0 of 1, .* for sample 0 of .* 'rank0'.*, and 1 of 2 messages came"
    with pytest.raises(TimeoutError, match=says):
        next(stream)


@pytest.mark.parametrize("stops", [False, True])
def test_a_wait_for_messages_that_are_all_set_aside_ends(monkeypatch, stops):
    monkeypatch.setattr(stream_file, "LOOK_S", 0.05)
    ends, stop = time.monotonic() + 5, fk.StopSignal(signals=())

    def malformed() -> Any:
        while time.monotonic() < ends:
            time.sleep(0.01)
            yield {"prompts": []}
        yield message(1)

    stream = RolloutStream(malformed(), timeout_s=3600 if stops else 0.3, stop=stop)
    if stops:
        stop.request("enough")
        assert list(stream) == []
    else:
        with pytest.raises(TimeoutError, match=r"0 of 1 message came; .*message 0 has no answer"):
            next(stream)
    assert time.monotonic() < ends


def test_the_time_to_wait_is_that_of_one_message(monkeypatch):
    monkeypatch.setattr(stream_file, "LOOK_S", 0.05)
    queue: Any = Queue()
    for number in range(4):
        threading.Timer(0.25 * number, queue.put, [message(number)]).start()
    assert numbers(next(RolloutStream(queue, batch_size=4, timeout_s=0.5))) == [0, 1, 2, 3]


def test_what_would_lose_rollouts_silently_is_refused():
    stream = RolloutStream(map(message, itertools.count()))
    state, step = build_state(stream), fk.make_step(loss_fn, schedule=fk.constant(0.1), end=stream)
    groups = fk.groups(stream, 1, end=stream)
    state, _ = step(state, next(groups))
    with pytest.raises(RuntimeError, match="samples 0 to 1 were handed out but not committed"):
        stream.state_dict()
    state, _ = step(state, next(groups))
    with pytest.raises(RuntimeError, match="2 steps were taken since the last commit"):
        stream.commit(state)
    groups = fk.groups(stream, 1, end=stream)
    fk.accumulate(state, next(groups), loss_fn)
    with pytest.raises(RuntimeError, match="to groups but not to make_step"):
        next(groups)
    with pytest.raises(ValueError, match=r"belongs to reader \[1, 2\], but this is \[0, 1\]"):
        stream.load_state_dict({**RolloutStream(iter(())).state_dict(), "reader": [1, 2]})
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        RolloutStream(3)
