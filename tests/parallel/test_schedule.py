"""Orders of work against the textbooks' bubbles, and numbers of micro-batches that fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest

from forgekit.parallel.pipeline.schedule import (
    PipelineSchedule,
    check_micro_batches,
    schedule_class,
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
