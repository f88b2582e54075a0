"""Learning rates against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

import forgekit as fk

HALF = math.sqrt(0.5)
SECOND = fk.optim.warmup(fk.constant(1.0), 2)
THIRD = fk.wsd(8.0, warmup=0, decay=2, total=4, shape="linear")
PHASES = [fk.Phase(40, lr_scale=0.5), fk.Phase(49, lr_scale=0.25), fk.Phase(79, {"a": 1})]
PHASES += [fk.Phase(101, lr_scale=9), fk.Phase(109, lr_scale=0.125)]

TABLE = {
    "constant": (fk.constant(0.3), {0: 0.3, 5: 0.3, 10**9: 0.3}),
    "wsd, sqrt": (
        fk.wsd(1.0, warmup=4, decay=4, total=16),
        {0: 0.25, 3: 1.0, 4: 1.0, 12: 1.0, 13: 0.5, 14: 1 - HALF, 16: 0.0, 20: 0.0},
    ),
    "wsd, linear": (
        fk.wsd(2.0, warmup=2, decay=4, total=10, shape="linear", final=1.0),
        {0: 1.0, 1: 2.0, 6: 2.0, 7: 1.75, 9: 1.25, 10: 1.0, 11: 1.0},
    ),
    "warmup of a decay, which starts after it": (
        fk.optim.warmup(fk.optim.linear(1.0, 4), 2),
        {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.75, 6: 0.0, 7: 0.0},
    ),
    "warmup_cosine": (
        fk.warmup_cosine(peak=2.0, warmup=4, total=12),
        {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0, 6: 1 + HALF, 8: 1.0, 12: 0.0, 13: 0.0},
    ),
    "warmup_cosine, longer than the run": (
        fk.warmup_cosine(peak=1.0, warmup=10, total=4),
        {0: 0.1, 3: 0.4, 9: 1.0, 10: 1.0, 11: 0.0},
    ),
    "rex, whose decay is (1 - p) / (1/2 + (1 - p) / 2)": (
        fk.rex(peak=2.0, warmup=2, total=10, final=1.0),
        {0: 1.0, 1: 2.0, 2: 2.0, 4: 1 + 6 / 7, 6: 1 + 2 / 3, 8: 1.4, 10: 1.0, 11: 1.0},
    ),
    "three schedules, each from its own step 0": (
        fk.join_schedules(fk.optim.linear(4.0, 8), SECOND, THIRD, at=(3, 6)),
        {0: 4.0, 2: 3.0, 3: 0.5, 4: 1.0, 5: 1.0, 6: 8.0, 8: 8.0, 9: 4.0, 10: 0.0, 99: 0.0},
    ),
    "phases at, after and inside a step, two in one step": (
        fk.with_phases(fk.constant(8.0), PHASES, global_batch_size=10),
        {0: 8.0, 3: 8.0, 4: 2.0, 5: 2.0, 6: 2.0, 7: 8.0, 9: 8.0, 10: 1.0, 11: 1.0, 10**9: 1.0},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_rates_equal_those_worked_out_by_hand(name):
    schedule, expected = TABLE[name]
    assert schedule(0) > 0  # the first step changes something
    for step, rate in reversed(expected.items()):  # a rate depends on the step alone
        assert schedule(step) == pytest.approx(rate, abs=1e-12), step


FLAT = fk.constant(1.0)
REFUSED = {
    "^peak is -1.0; it must be finite and not": lambda: fk.constant(-1.0),
    r"^warmup is 0\.1, a float; pass an integer": lambda: fk.optim.warmup(FLAT, 0.1),
    "^warmup 5 .* must fit into": lambda: fk.wsd(1.0, warmup=5, decay=6, total=10),
    r"^2 schedules are joined at the steps \(\)": lambda: fk.join_schedules(FLAT, FLAT, at=()),
    "^a phase at sample 5 fol": lambda: fk.with_phases(FLAT, [fk.Phase(9), fk.Phase(5)], 8),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_a_wrong_schedule_in_silence_is_refused(message):
    with pytest.raises((ValueError, TypeError), match=message):
        REFUSED[message]()
