"""Spikes: steps that stand out change nothing, and are judged by numpy's mean and deviation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lab import alone, lay_out
from pool import on_ranks
from tensordict import TensorDict
from torch import nn

import forgekit as fk

LIMIT = fk.SpikeLimit(sigmas=4.0, window=6, least=3)


def batch(scale):
    generator = torch.Generator().manual_seed(int(scale * 100))
    x = torch.randn(4, 3, generator=generator)
    return TensorDict({"x": x * scale}, batch_size=[4])


def square_loss(model, batch):
    out = model(batch["x"])
    return fk.Loss(out.square().sum(), out.numel())


def build(**options):
    torch.manual_seed(0)
    return lay_out(nn.Linear(3, 2), **options) if options else alone(nn.Linear(3, 2))


def window_of(state):
    assert state.recent is not None
    return state.recent


def judge(history, now):
    """Whether a step is a spike, by numpy."""
    known = np.array(history[-LIMIT.window :])
    if len(known) < LIMIT.least:
        return False
    return bool((now > known.mean(0) + LIMIT.sigmas * known.std(0)).any())


SCALES = [1.0, 1.1, 0.9, 30.0, 1.2, 1.0, 40.0, 50.0, 0.8, 1.3, 0.7, 1.4, 3.0, 1.0]


def test_spikes_are_those_that_numpy_finds_and_change_nothing(tmp_path):
    """In a run that is resumed, too."""
    state, history, spikes = build(), [], []
    step = fk.make_step(square_loss, schedule=fk.constant(1e-3), spikes=LIMIT)
    for index, scale in enumerate(SCALES):
        if index == 5:
            fk.checkpoint_save(state, tmp_path, blocking=True)
            state = fk.checkpoint_load(build(), tmp_path)
        before = [p.detach().clone() for p in state.model.parameters()]
        skipped, targets = int(state.skipped), int(state.targets)
        state, metrics = step(state, [batch(scale)])
        now = np.array([metrics["loss"].item(), metrics["grad_norm"].item()])
        is_spike = judge(history, now)
        assert metrics["spikes"].item() == metrics["skipped"].item() == is_spike
        if is_spike:
            assert all(map(torch.equal, before, state.model.parameters()))
            assert (int(state.skipped), int(state.targets)) == (skipped + 1, targets)
        else:
            assert not any(map(torch.equal, before, state.model.parameters()))
            history.append(now)
        spikes.append(is_spike)
    assert spikes[3]
    assert spikes[6:8] == [True, True]
    assert sum(spikes) < 6


def test_a_window_may_change_between_runs():
    state = build()
    for window in (8, 4, 16):
        limit = fk.SpikeLimit(window=window, least=2)
        step = fk.make_step(square_loss, schedule=fk.constant(1e-3), spikes=limit)
        before = window_of(state) if state.step else torch.empty(0)
        for scale in (1.0, 1.1, 0.9):
            state, metrics = step(state, [batch(scale)])
        assert window_of(state).shape == (window, 2)
        assert window_of(state)[-1, 0] == metrics["loss"]
    assert torch.equal(window_of(state)[-7:-3], before)


@on_ranks(2)
def test_a_spike_is_no_overflow_of_float16(rank, world):
    state = build(precision="fp16")
    step = fk.make_step(square_loss, schedule=fk.constant(1e-3), spikes=LIMIT)
    scales = []
    for scale in (1.0, 1.1, 0.9, 30.0):
        state, metrics = step(state, [batch(scale)])
        scales.append(float(state.loss_scale))
    assert (scales, state.good_steps, metrics["spikes"]) == ([1.0] * 4, 3, 1)


def test_a_limit_that_would_never_judge_a_step_is_refused():
    with pytest.raises(ValueError, match=r"least \(32\) must be at most the window \(10\)"):
        fk.SpikeLimit(window=10)
