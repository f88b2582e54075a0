"""What looking at a run costs: rows, a progress line, a tracker, health and a gradient hook."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bare import MAX_NORM, SCHEDULE, Size, loss_fn

import forgekit as fk
from forgekit.metrics import layer_norms
from forgekit.metrics.flops import Flops, Utilization

SIZE = Size(dim=256, layers=4, seq_len=256, vocab_size=4096)
STEPS, EVERY, MOST = 40, 10, 0.01
STEP, SEEING = "a step", "rows, progress, tracker, health, layer norms"


class Clock:
    """Adds up the time inside of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose calls count."""

        def call(*args: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **keywords)
            finally:
                self.seconds += time.perf_counter() - began

        return call


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> dict[str, list[float]]:
    """Seconds of each step, and those of them that went into looking."""
    out, clock = tmp_path_factory.mktemp("run"), Clock()
    model, batches = SIZE.model(), SIZE.batches()
    state = fk.TrainState.create(model, fk.adamw(model))
    due = lambda state: (state.step + 1) % EVERY == 0  # noqa: E731
    hook = clock.timed(lambda state, totals: layer_norms(state, totals) if due(state) else {})
    step = fk.make_step(loss_fn, schedule=SCHEDULE, max_norm=MAX_NORM, gradient_hook=hook)
    flops = Flops.of(model)
    documents = [np.arange(1, 65)] * 4096
    rows = fk.packed_dataset(documents, fk.pack([64] * 4096, SIZE.seq_len))
    use = Utilization.of(flops, state, fk.make_loader(rows, 1), peak=1e12)
    times: dict[str, list[float]] = {STEP: [], SEEING: []}
    trackers = (fk.TensorBoard(out),)
    log = fk.MetricsLog(out, every=EVERY, utilization=use, trackers=trackers)
    with log, fk.Health(out, None) as health:
        see, watch, note = clock.timed(log), clock.timed(health), clock.timed(log.event)
        for _ in range(STEPS):
            before, began = clock.seconds, time.perf_counter()
            state, metrics = step(state, batches)
            see(state, metrics)
            note(state, watch(state), show=False)
            times[STEP].append(time.perf_counter() - began)
            times[SEEING].append(clock.seconds - before)
    assert len(fk.metrics.read_metrics(out / "metrics.jsonl")) == STEPS // EVERY
    return times


@pytest.mark.parametrize("name", [STEP, SEEING])
def test_looking_at_a_run_takes_a_hundredth_of_it(show, measured, name):
    share = sum(measured[SEEING]) / sum(measured[STEP])
    show(f"seeing, {SIZE.tokens} targets, dim {SIZE.dim}", measured, name, share=share)
    assert share <= MOST, f"{share:.4f} of the time of a step"
