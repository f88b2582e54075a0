"""Orders of work against the textbooks' bubbles, and numbers of micro-batches that fit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import get_args

import attrs
import pytest

from forgekit.parallel.pipeline.schedule import (
    PipelineSchedule,
    check_micro_batches,
    schedule_class,
    stages_of,
    stages_per_rank,
    timeline,
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
        clock = timeline(schedule, ranks, micro_batches)
        assert clock.bubble == pytest.approx(wait(ranks) / (work + wait(ranks)), rel=0.05)
        assert clock.span == pytest.approx(work + wait(ranks))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_the_clock_all_work_is_done_once_and_never_before_its_inputs_are_there(schedule):
    ranks, count = 4, 8
    intervals = timeline(schedule, ranks, count).intervals
    last = ranks * stages_per_rank(schedule) - 1
    done = {(i.work.kind, i.work.stage, i.work.micro_batch): i.end for i in intervals}
    assert len(done) == len(intervals)
    for stage, micro_batch in itertools.product(range(last + 1), range(count)):
        kinds = {kind for kind in "FBIW" if (kind, stage, micro_batch) in done}
        assert kinds in ({"F", "B"}, {"F", "I", "W"})
    for interval in intervals:
        kind, stage, micro_batch = attrs.astuple(interval.work)
        assert stage in stages_of(schedule, ranks, interval.rank)
        if kind == "F" and stage:
            assert done["F", stage - 1, micro_batch] <= interval.start
        if kind in "BI" and stage < last:
            after = (done.get((k, stage + 1, micro_batch), 1e9) for k in "BI")
            assert min(after) <= interval.start
    for before, after in itertools.pairwise(intervals):
        assert before.end <= after.start or before.rank < after.rank


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_that_fit_are_those_that_torch_takes(schedule):
    """Torch refuses with an error on each rank, in the middle of a step."""
    with pytest.raises(ValueError, match=r"0 micro-batches do not fit .* Use \d"):
        check_micro_batches(schedule, 3, 0)
    for micro_batches in range(1, 20):
        try:
            check_micro_batches(schedule, 3, micro_batches)
        except ValueError:
            assert not _torch_takes(schedule, 3, micro_batches)
        else:
            assert _torch_takes(schedule, 3, micro_batches)


def _torch_takes(schedule, ranks, micro_batches):
    per_rank = stages_per_rank(schedule)
    stage = SimpleNamespace(num_stages=ranks * per_rank, group_size=ranks, group_rank=0)
    stage.stage_index, stage.submod = 0, None
    given = stage if per_rank == 1 else [stage] * per_rank
    try:
        schedule_class(schedule)(given, micro_batches)
    except ValueError:
        return False
    return True
