"""Replica groups of one rank each in threads of one process, with torchft's own lighthouse.

What happens between two lines of a group can be chosen here, which a kill leaves to chance.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event

import attrs
import pytest
import replica_rank
from pool import run_ranks
from saved import assert_same

import forgekit as fk

PATIENCE_S = 60


@contextmanager
def lighthouse(join_timeout_ms=10_000):
    from torchft.coordination import LighthouseServer

    warnings.simplefilter("ignore")  # torchft logs with `warn`, which Python deprecates
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=join_timeout_ms, quorum_tick_ms=20
    )
    try:
        yield server.address()
    finally:
        server.shutdown()


@attrs.define
class VotesNo:
    """A group that does not commit one step, after it has added everything up."""

    group: object
    step: int | None
    now: int = 0

    def begin(self, state):
        self.now = state.step
        return self.group.begin(state)

    def sum(self, tensors):
        return self.group.sum(tensors)

    def commit(self, good):
        is_now = self.now == self.step
        self.step = None if is_now else self.step
        return self.group.commit(good and not is_now)


def _two_histories(_rank, _world):
    """The first commits step 1 and is slow; the others do it again, without the first."""
    states, is_over = [replica_rank.build() for _ in range(3)], Event()
    all_joined = Barrier(3)  # or a group that is first takes steps alone

    def train(number, address):
        state = states[number]
        loader = replica_rank.load(state)
        parts = []

        def wait(event, step, part, **_):
            parts.append(part)
            if event == "updates" and step == 1:
                is_over.set() if number else is_over.wait(PATIENCE_S)

        with fk.join_replicas(state, f"group {number}", lighthouse=address) as replicas:
            all_joined.wait(PATIENCE_S)
            member = VotesNo(replicas, step=1) if number else replicas
            state = replica_rank.train(state, loader, member, steps=4, watch=wait)
        return replica_rank.whole(state), parts

    # Of groups that are alive the lighthouse waits for more than half, and then so long for all.
    with lighthouse(join_timeout_ms=2000) as address, ThreadPoolExecutor(3) as pool:
        (first, its_parts), *others = pool.map(train, range(3), [address] * 3)
    assert {part.participants for part in its_parts[3:]} == {3}
    for other, parts in others:
        assert 2 in {part.participants for part in parts}
        assert_same(other, first)


def test_groups_that_did_a_step_apart_have_the_same_bits_after_it():
    run_ranks(_two_histories, 1, group=False, timeout_s=PATIENCE_S)


def _forgets(_rank, _world):
    state = replica_rank.build()
    loader = replica_rank.load(state)
    with lighthouse() as address, fk.join_replicas(state, "a", lighthouse=address) as replicas:
        state = replica_rank.train(state, loader, replicas, steps=2)
        state, _ = replicas.begin(state)
        state = replica_rank.train(state, loader, fk.OneGroup(), steps=3)
        with pytest.raises(ValueError, match=r"step 3 begins, but the groups are at step 2: this"):
            replicas.begin(state)


def test_a_step_without_the_sum_over_groups_is_refused():
    run_ranks(_forgets, 1, group=False, timeout_s=PATIENCE_S)
