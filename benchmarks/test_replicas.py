"""What the seam for replica groups costs in a step in which nothing fails.

One process each, with torchft's own lighthouse and manager: its quorum before the step, the
exchange among the groups and its vote. Two groups take as long as their collective over the
network on top, which follows from the size of the model.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from bare import Size
from pairs import Times, band, ratio, take_turns
from pool import run_ranks

import forgekit as fk

SIZES = {
    "large": Size(dim=256, layers=4, seq_len=64, vocab_size=4096, micro_batches=4),
    "tiny": Size(dim=32, layers=1, seq_len=32, vocab_size=64),
}
WITHOUT, AGAIN, SEAM, TORCHFT = "without", "without again", "seam, one group", "seam, torchft"
ROUNDS = 20
MOST = 1.02
LOST_S = 60


def _loss(model: Any, batch: Any) -> fk.Loss:
    return fk.cross_entropy(model(batch["input_ids"]), batch["labels"])


def _step(size: Size, replicas: Any = None, shares: Any = None) -> Callable[[], object]:
    """A step of the parts, with replicas where there are any; each entry has its own state.

    To ``shares`` it adds what the seam's two calls cost of each step: seconds, and relative to the
    rest of the same step.
    """
    model = size.model()
    state = [fk.TrainState.create(model, fk.adamw(model))]
    batches = size.batches()

    def step() -> None:
        now, times = state[0], [time.perf_counter()]
        if replicas is not None:
            now, _ = replicas.begin(now)
        times.append(time.perf_counter())
        totals = fk.accumulate(now, batches, _loss)
        times.append(time.perf_counter())
        if replicas is not None:
            totals = fk.sum_replicas(totals, now, replicas)
            assert totals is not None
        times.append(time.perf_counter())
        totals = fk.reduce_totals(totals, now)
        correction = fk.clip(totals, max_norm=1.0)
        state[0] = fk.update(now, correction, lr=1e-3, totals=totals)
        if shares is not None:
            whole = time.perf_counter() - times[0]
            seam = times[1] - times[0] + times[3] - times[2]
            shares.append((seam, seam / (whole - seam)))

    return step


def time_steps(_rank: int, _world: int, size: Size) -> tuple[Times, list[tuple[float, float]]]:
    """Time steps in turns, in a process of their own: torchft leaves a socket open."""
    from torchft.coordination import LighthouseServer

    warnings.simplefilter("ignore")  # torchft logs with `warn`, which Python deprecates
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    model = size.model()
    state = fk.TrainState.create(model, fk.adamw(model))
    joined = fk.join_replicas(state, "a", lighthouse=lighthouse.address(), timeout_s=LOST_S)
    shares: list[tuple[float, float]] = []
    with joined as replicas:
        entries = {
            WITHOUT: _step(size),
            AGAIN: _step(size),
            SEAM: _step(size, fk.OneGroup()),
            TORCHFT: _step(size, replicas, shares),
        }
        times = take_turns(entries, ROUNDS)
    lighthouse.shutdown()
    return times, shares[2:]


@pytest.fixture(scope="module", params=SIZES)
def measured(request) -> tuple[Any, ...]:
    size = SIZES[request.param]
    return request.param, *run_ranks(time_steps, 1, size, group=False, timeout_s=600)[0]


@pytest.mark.parametrize("name", [WITHOUT, AGAIN, SEAM, TORCHFT])
def test_a_step_with_the_seam(show, measured, name):
    size, times, _ = measured
    here, noise = ratio(times, name, WITHOUT), band(times, AGAIN, WITHOUT)
    show(f"a step in which no group fails, {size} model", times, name, ratio=here, band=noise)
    if size == "large" and name in (SEAM, TORCHFT):
        assert here <= MOST + noise, f"{here:.3f} of a step without, A/A {noise:.3f}"


def test_the_calls_of_the_seam_beside_the_rest_of_their_step(record_property, measured):
    """Without the noise of whole steps: both sides of the ratio are of one step."""
    size, _, shares = measured
    seconds, share = map(statistics.median, zip(*shares, strict=True))
    record_property("seam", f"{size}: {1e3 * seconds:.2f} ms, {1 + share:.4f} of the rest")
    print(f"seam, {size} model: {1e3 * seconds:.2f} ms, {1 + share:.4f} of the rest")  # noqa: T201
    if size == "large":
        assert 1 + share <= MOST
