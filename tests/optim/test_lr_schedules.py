"""Learning rates against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

import forgekit as fk

HALF = math.sqrt(0.5)

TABLE = [
    ("constant", fk.constant(0.3), {0: 0.3, 5: 0.3, 10**9: 0.3}),
    ("linear", fk.optim.linear(2.0, 8), {0: 2.0, 2: 1.5, 6: 0.5, 8: 0.0, 9: 0.0, 10**9: 0.0}),
    ("linear, final", fk.optim.linear(2.0, 8, final=1.0), {0: 2.0, 4: 1.5, 8: 1.0, 99: 1.0}),
    ("linear, rising", fk.optim.linear(1.0, 4, final=3.0), {0: 1.0, 1: 1.5, 4: 3.0, 5: 3.0}),
    ("cosine", fk.optim.cosine(2.0, 8), {0: 2.0, 2: 1 + HALF, 4: 1.0, 6: 1 - HALF, 8: 0.0, 9: 0.0}),
    ("cosine, final", fk.optim.cosine(2.0, 8, final=0.5), {0: 2.0, 4: 1.25, 8: 0.5, 100: 0.5}),
    (
        "wsd, sqrt",
        fk.wsd(1.0, warmup=4, decay=4, total=16),
        {0: 0.25, 3: 1.0, 4: 1.0, 12: 1.0, 13: 0.5, 14: 1 - HALF, 16: 0.0, 20: 0.0},
    ),
    (
        "wsd, linear",
        fk.wsd(2.0, warmup=2, decay=4, total=10, shape="linear", final=1.0),
        {0: 1.0, 1: 2.0, 6: 2.0, 7: 1.75, 9: 1.25, 10: 1.0, 11: 1.0},
    ),
    (
        "wsd, cosine",
        fk.wsd(2.0, warmup=0, decay=4, total=8, shape="cosine"),
        {0: 2.0, 4: 2.0, 5: 1 + HALF, 6: 1.0, 8: 0.0},
    ),
    (
        "wsd, no plateau",
        fk.wsd(1.0, warmup=4, decay=4, total=8, shape="linear"),
        {3: 1.0, 4: 1.0, 5: 0.75},
    ),
    (
        "warmup of a constant",
        fk.optim.warmup(fk.constant(4.0), 4),
        {0: 1.0, 1: 2.0, 3: 4.0, 4: 4.0, 9: 4.0},
    ),
    (
        "warmup of a decay, which starts after it",
        fk.optim.warmup(fk.optim.linear(1.0, 4), 2),
        {0: 0.5, 1: 1.0, 2: 1.0, 3: 0.75, 6: 0.0, 7: 0.0},
    ),
    ("warmup of nothing", fk.optim.warmup(fk.optim.linear(1.0, 4), 0), {0: 1.0, 1: 0.75, 4: 0.0}),
    (
        "warmup_linear",
        fk.optim.warmup_linear(peak=1.0, warmup=2, total=6, final=0.2),
        {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.6, 6: 0.2, 7: 0.2},
    ),
    (
        "warmup_cosine",
        fk.warmup_cosine(peak=2.0, warmup=4, total=12),
        {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0, 6: 1 + HALF, 8: 1.0, 12: 0.0, 13: 0.0},
    ),
    (
        "warmup_cosine, no warmup",
        fk.warmup_cosine(peak=2.0, warmup=0, total=8),
        {0: 2.0, 4: 1.0, 8: 0.0},
    ),
    (
        "warmup_cosine, longer than the run",
        fk.warmup_cosine(peak=1.0, warmup=10, total=4),
        {0: 0.1, 3: 0.4, 9: 1.0, 10: 1.0, 11: 0.0},
    ),
    (
        "rex, whose decay is (1 - p) / (1/2 + (1 - p) / 2)",
        fk.rex(peak=2.0, warmup=2, total=10, final=1.0),
        {0: 1.0, 1: 2.0, 2: 2.0, 4: 1 + 6 / 7, 6: 1 + 2 / 3, 8: 1.4, 10: 1.0, 11: 1.0},
    ),
    (
        "three schedules, each from its own step 0",
        fk.join_schedules(
            fk.optim.linear(4.0, 8),
            fk.optim.warmup(fk.constant(1.0), 2),
            fk.wsd(8.0, warmup=0, decay=2, total=4, shape="linear"),
            at=(3, 6),
        ),
        {0: 4.0, 2: 3.0, 3: 0.5, 4: 1.0, 5: 1.0, 6: 8.0, 8: 8.0, 9: 4.0, 10: 0.0, 99: 0.0},
    ),
    (
        "phases at, after and inside a step, two in one step",
        fk.with_phases(
            fk.constant(8.0),
            [
                fk.Phase(40, lr_scale=0.5),
                fk.Phase(49, lr_scale=0.25),
                fk.Phase(79, {"a": 1}),
                fk.Phase(101, lr_scale=9),
                fk.Phase(109, lr_scale=0.125),
            ],
            global_batch_size=10,
        ),
        {0: 8.0, 3: 8.0, 4: 2.0, 5: 2.0, 6: 2.0, 7: 8.0, 9: 8.0, 10: 1.0, 11: 1.0, 10**9: 1.0},
    ),
    (
        "a phase from the start, one at the last sample of a step, one at the first",
        fk.with_phases(
            fk.optim.linear(1.0, 8),
            [fk.Phase(0, lr_scale=4), fk.Phase(15, lr_scale=2), fk.Phase(16, lr_scale=1)],
            global_batch_size=8,
        ),
        {0: 4.0, 1: 1.75, 2: 0.75, 4: 0.5},
    ),
    ("no phases", fk.with_phases(fk.optim.linear(1.0, 4), (), 7), {0: 1.0, 1: 0.75}),
    (
        "warmup_linear, as long as the run",
        fk.optim.warmup_linear(peak=1.0, warmup=4, total=4),
        {0: 0.25, 3: 1.0, 4: 1.0, 5: 0.0},
    ),
]


@pytest.mark.parametrize(
    ("schedule", "expected"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_rates_equal_those_worked_out_by_hand(schedule, expected):
    for step, rate in expected.items():
        assert schedule(step) == pytest.approx(rate, abs=1e-12), step


@pytest.mark.parametrize("schedule", [row[1] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_first_step_changes_something(schedule):
    assert schedule(0) > 0


@pytest.mark.parametrize("schedule", [row[1] for row in TABLE], ids=[row[0] for row in TABLE])
def test_a_rate_depends_on_the_step_alone(schedule):
    forward = [schedule(step) for step in range(20)]
    assert [schedule(step) for step in reversed(range(20))] == forward[::-1]
    assert all(isinstance(rate, float) for rate in forward)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: fk.optim.linear(1.0, 0),
            r"^total 0 must be above 0, the step at which decay starts\.$",
        ),
        (lambda: fk.optim.cosine(1.0, -3), r"^total -3 must be above 0"),
        (
            lambda: fk.optim.warmup(fk.constant(1.0), -1),
            r"^warmup is -1 steps; it must not be negative",
        ),
        (
            lambda: fk.wsd(1.0, warmup=5, decay=6, total=10),
            r"^warmup 5 \+ decay 6 = 11 must fit into total 10, with a decay of at least 1 step\.$",
        ),
        (lambda: fk.wsd(1.0, warmup=5, decay=0, total=10), r"decay 0 = 5 must fit .* at least 1"),
        (
            lambda: fk.wsd(1.0, warmup=0, decay=2, total=4, shape="exp"),
            r"^shape is 'exp'; it is one of linear, cosine, sqrt, rex\.$",
        ),
        (
            lambda: fk.wsd(1.0, warmup=-1, decay=2, total=4),
            r"^warmup is -1 steps; it must not be negative",
        ),
        (
            lambda: fk.warmup_cosine(1.0, warmup=-1, total=4),
            r"^warmup is -1 steps; it must not be negative",
        ),
        (
            lambda: fk.join_schedules(fk.constant(1.0), fk.constant(2.0), at=()),
            r"^2 schedules are joined at the steps \(\); give one step for each schedule but the",
        ),
        (
            lambda: fk.join_schedules(*[fk.constant(1.0)] * 3, at=(5, 5)),
            r"^3 schedules are joined at the steps \(5, 5\); .* increasing and above 0\.$",
        ),
        (
            lambda: fk.with_phases(fk.constant(1.0), (), 0),
            r"^global_batch_size 0 must be at least 1\.$",
        ),
        (
            lambda: fk.with_phases(fk.constant(1.0), [fk.Phase(9), fk.Phase(5)], 8),
            r"^a phase at sample 5 follows one at sample 9; put phases in increasing order\.$",
        ),
    ],
)
def test_what_cannot_be_a_schedule_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_the_scale_changes_where_the_data_do_whatever_the_batch_size_was_before():
    schedule = fk.with_phases(fk.constant(1.0), [fk.Phase(21, lr_scale=0.5)], 4)
    assert [schedule(3, end=end) for end in (20, 21, 22, 23)] == [1.0, 1.0, 0.5, 0.5]
    assert [schedule(step) for step in (4, 5)] == [1.0, 0.5]
