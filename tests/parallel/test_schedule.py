"""Orders of work against the textbooks' bubbles, and numbers of micro-batches that fit."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

from forgekit.parallel.pipeline.schedule import (
    PipelineSchedule,
    check_micro_batches,
    schedule_class,
    stages_of,
    stages_per_rank,
    timeline,
    work_order,
)

SCHEDULES = get_args(PipelineSchedule)

# Time that each rank waits, in units of a forward, for p ranks; from how many micro-batches on.
WAITS = {
    "gpipe": (lambda p: 3 * (p - 1), lambda p: 1),
    "1f1b": (lambda p: 3 * (p - 1), lambda p: p),
    "interleaved_1f1b": (lambda p: 3 * (p - 1), lambda p: p),
    "interleaved_zero_bubble": (lambda p: p - 1, lambda p: p),
    "zbv": (lambda p: p - 1, lambda p: 2 * p - 1),
    "dualpipev": (lambda p: 2 * (p - 1), lambda p: 2 * p),
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bubble_is_the_textbooks(schedule, ranks):
    wait, fewest = WAITS[schedule]
    for micro_batches in (fewest(ranks), 4 * ranks):
        work = 3 * micro_batches * stages_per_rank(schedule)
        expected = wait(ranks) / (work + wait(ranks))
        found = timeline(schedule, ranks, micro_batches)
        assert abs(found.bubble - expected) <= 0.05 * expected
        assert found.span == pytest.approx(work + wait(ranks))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_stage_takes_each_micro_batch_once_each_way(schedule):
    ranks, micro_batches = 3, 6
    for rank, order in enumerate(work_order(schedule, ranks, micro_batches)):
        for stage in stages_of(schedule, ranks, rank):
            works = [w for group in order for w in group if w.stage == stage]
            for kinds in ("F", "BI", "BW"):
                seen = sorted(w.micro_batch for w in works if w.kind in kinds)
                assert seen == list(range(micro_batches))
        assert {w.stage for group in order for w in group} == set(stages_of(schedule, ranks, rank))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_the_clock_nothing_starts_before_its_inputs_are_there(schedule):
    ranks = 4
    found = timeline(schedule, ranks, 8)
    end = {(i.work.kind, i.work.stage, i.work.micro_batch): i.end for i in found.intervals}
    last = ranks * stages_per_rank(schedule) - 1
    for interval in found.intervals:
        kind, stage, micro_batch = (
            interval.work.kind,
            interval.work.stage,
            interval.work.micro_batch,
        )
        if kind == "F" and stage:
            assert end["F", stage - 1, micro_batch] <= interval.start
        if kind in "BI" and stage < last:
            after = min(end.get((k, stage + 1, micro_batch), 1e9) for k in "BI")
            assert after <= interval.start
    by_rank = [[i for i in found.intervals if i.rank == rank] for rank in range(ranks)]
    for mine in by_rank:
        for before, after in itertools.pairwise(mine):
            assert before.end <= after.start


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_that_fit_are_those_that_torch_takes(schedule):
    """Torch refuses with an error on each rank, in the middle of a step."""
    for micro_batches in range(1, 20):
        try:
            check_micro_batches(schedule, 3, micro_batches)
        except ValueError:
            fits = False
        else:
            fits = True
        assert fits == _torch_takes(schedule, 3, micro_batches)


def _torch_takes(schedule, ranks, micro_batches):
    class Stage:
        num_stages = ranks * stages_per_rank(schedule)
        group_size, group_rank, stage_index, submod = ranks, 0, 0, None

    stages = [Stage() for _ in range(stages_per_rank(schedule))]
    try:
        schedule_class(schedule)(stages[0] if len(stages) == 1 else stages, micro_batches)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "message"),
    [
        ("gpipe", 0, r"0 micro-batches do not fit .* 'gpipe' on 4 ranks; it needs .* Use 1\."),
        ("1f1b", 3, r"it needs at least one per stage, 4\. Use 4\."),
        ("interleaved_1f1b", 9, r"micro-batches // ranks = 2, divide\. Use 8 or 10\."),
        ("interleaved_zero_bubble", 13, r"micro-batches // ranks = 3, divide\. Use 12 or 15\."),
        ("dualpipev", 7, r"it needs at least one per stage, 8\. Use 8\."),
    ],
)
def test_a_number_that_does_not_fit_gets_the_nearest(schedule, micro_batches, message):
    with pytest.raises(ValueError, match=message):
        check_micro_batches(schedule, 4, micro_batches)
