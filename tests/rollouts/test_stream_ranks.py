"""Streams on two ranks: one reader for those that share data, one end, one error for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import run_again
from rollouts.answers import VOCABULARY, build_state, loss_fn, message, numbers, spoiling, train

import forgekit as fk
from forgekit.rollouts.batch import join_rollouts
from forgekit.rollouts.sources import RedisSource
from forgekit.rollouts.stream import RolloutStream

ROWS = partial(join_rollouts, pad_to=8)
SPEC = fk.TransformerSpec(
    vocab_size=VOCABULARY, dim=8, layers=1, heads=2, kv_heads=2, ffn_dim=8, max_seq_len=8
)
DATA, SHARED = {"dp_shard": 2}, {"tp": 2}
SEEN = [[0], [1], [2], [], [], []]


class Silent:
    """A source from which nothing comes, and another that must not be asked."""

    has_ended = False

    def __init__(self, is_asked: bool = True) -> None:
        self.is_asked = is_asked

    def __repr__(self) -> str:
        return "a silent source"

    def read(self, timeout_s: float) -> None:
        assert self.is_asked
        time.sleep(0.01)

    def acknowledge(self, ids: Any) -> None: ...

    def set_aside(self, message: Any, problem: str) -> None: ...


def failing(messages: Iterator[Any]) -> Iterator[Any]:
    yield from messages
    raise OSError("the generator died")


def source_of(kind: str, rank: int) -> Any:
    if kind == "stopped" or (rank and kind in ("shared", "late")):
        return Silent(is_asked=rank == 0 or kind == "late")
    counts = {"ragged": (5, 2), "failed": (5, 2), "late": (5,)}.get(kind, (3, 3))
    start = 0 if kind == "each" else 100 * rank
    messages = map(message, range(start, start + counts[rank]))
    return failing(messages) if rank and kind == "failed" else messages


def train_job(rank: int, world: int, kind: str, layout: dict[str, int]) -> Any:
    mesh = fk.build_mesh(fk.MeshSpec(**layout), device="cpu")
    stop = fk.StopSignal(signals=())
    if rank and kind == "stopped":  # on the rank that reads nothing
        threading.Timer(0.2, stop.request, ["enough"]).start()
    stream = RolloutStream(
        source_of(kind, rank),
        shared=kind != "each",
        to_batch=ROWS,
        mesh=mesh,
        stop=stop,
        timeout_s=0.05 if kind == "late" else 60,
    )
    state = build_state(stream, mesh, fk.Transformer(SPEC) if layout == SHARED else None)
    seen: list[list[int]] = []
    loss = spoiling(lambda given: kind == "bad" and seen.count([101]) == 1 and given == [101], seen)
    try:
        state = train(stream, 2, loss, state=state, audit=False)  # which calls the loss, too
    except RuntimeError as error:
        return seen, str(error)
    return seen, (state.step, state.samples, int(state.targets))


RAGGED = [[0], [1], [2], [3], [4], [], [], []], [[100], [101], [], [], [], [], [], []]
BAD = [[[n], [n + 1], [n], [n + 1], [n + 2], [], [], []] for n in (0, 100)]
ENDS: dict[str, Any] = {  # layout, messages of both ranks, and step, samples, targets
    "ragged": (DATA, *RAGGED, (4, 16, 3 * 7)),
    "bad": (DATA, *BAD, (4, 16, 6 * 3)),  # tried again by both
    "shared": (SHARED, SEEN, SEEN, (3, 6, 9)),
    "each": (SHARED, SEEN, SEEN, (3, 6, 9)),
    "stopped": (SHARED, [[], []], [[], []], (1, 2, 0)),
}


@pytest.mark.parametrize("kind", ENDS)
def test_ranks_train_what_their_sources_have_and_end_together(kind):
    layout, first, second, totals = ENDS[kind]
    assert run_again(train_job, 2, kind, layout) == [(first, totals), (second, totals)]


BROKEN = {
    "failed": "rank 1: OSError: the generator died",
    "late": "rank 1: TimeoutError: rank 1, reader 1 of 2, has waited 0 s for sample 0 of a silent "
    "source, and 0 of 1 message came. Are the generators alive?",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_source_that_fails_on_one_rank_raises_on_all_after_the_step(kind):
    results = run_again(train_job, 2, kind, DATA)
    assert {error for _, error in results} == {BROKEN[kind]}
    assert (results[0][0][:2], len(results[0][0])) == ([[0], [1]], len(results[1][0]))


def failed_step_job(rank: int, world: int, loads: bool) -> list[list[int]]:
    """The first rank has pulled more than the second when a step fails, or a state is loaded."""
    mesh = fk.build_mesh(fk.MeshSpec(**SHARED), device="cpu")
    stream = RolloutStream(source_of("shared", rank), to_batch=ROWS, mesh=mesh)
    stream.watch(lambda: True)
    begun = stream.state_dict()
    for _ in range(2 - rank):
        next(stream)
    stream.load_state_dict(begun) if loads else stream.give_back()
    return [numbers(next(stream)) for _ in range(3)]


@pytest.mark.parametrize("loads", [False, True])
def test_what_was_sent_for_a_step_that_failed_is_void(loads):
    assert run_again(failed_step_job, 2, loads) == [SEEN[:3]] * 2


def ahead_job(rank: int, world: int) -> tuple[list[int], float]:
    """The first rank pulls both micro-batches before a collective, the second one after it."""
    mesh = fk.build_mesh(fk.MeshSpec(**SHARED), device="cpu")
    stream = RolloutStream(source_of("shared", rank), to_batch=ROWS, mesh=mesh)
    total = torch.tensor(1.0 + rank)
    seen = [numbers(next(stream)) for _ in range(2 - 2 * rank)]
    dist.all_reduce(total)
    seen += [numbers(next(stream)) for _ in range(2 * rank)]
    return [number for one in seen for number in one], float(total)


def test_what_is_sent_ahead_does_not_meet_a_steps_collectives():
    assert run_again(ahead_job, 2) == [([0, 1], 3.0)] * 2


def lives_job(rank: int, world: int, url: str, folder: str, is_killed: bool) -> list[int]:
    """Messages of a life; one that is killed is not there to acknowledge what it has saved."""
    mesh = fk.build_mesh(fk.MeshSpec(**DATA), device="cpu")
    stream = RolloutStream(RedisSource(url), to_batch=ROWS, mesh=mesh)
    state, seen = build_state(stream, mesh), list[int]()
    if fk.latest_checkpoint(folder) is not None:
        state = fk.checkpoint_load(state, folder)

    def loss(model: Any, batch: Any) -> fk.Loss:
        seen.extend(numbers(batch))
        return loss_fn(model, batch)

    step = fk.make_step(loss, schedule=fk.constant(0.1), end=stream, audit=False)
    for group in fk.groups(stream, 1, end=stream):
        state, _ = step(state, group)
        stream.commit(state, saved=False)
        fk.checkpoint_save(state, folder, blocking=True)
        if is_killed and state.step == 2:
            next(stream)  # read, and never trained by this life
            return seen
        stream.commit(state)
    return seen


def test_every_data_rank_goes_on_after_what_its_checkpoint_has_trained(redis_url, redis, tmp_path):
    source = RedisSource(redis)
    for number in range(9):
        source.put(message(number))
    source.end()
    lives = [run_again(lives_job, 2, redis_url, str(tmp_path), k) for k in (True, False)]
    assert all(seen for life in lives for seen in life)
    assert sorted(number for life in lives for seen in life for number in seen) == [*range(9)]
    assert redis.xlen("rollouts") == 0


def unwatched_job(rank: int, world: int) -> None:
    mesh = fk.build_mesh(device="cpu")
    stream = RolloutStream(map(message, range(3)), mesh=mesh)
    with pytest.raises(RuntimeError, match="this stream is one of 2 and ends on its own"):
        next(stream)


def test_a_stream_of_several_ranks_needs_its_end():
    run_again(unwatched_job, 2)
