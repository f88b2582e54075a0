"""Orders of work against the textbooks' bubbles, and numbers of micro-batches that fit."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import get_args

import pytest
from schedule_clock import timeline

from forgekit.parallel.pipeline.schedule import (
    PipelineSchedule,
    bubble,
    check_micro_batches,
    schedule_class,
    stages_per_rank,
)

SCHEDULES = get_args(PipelineSchedule)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bubble_is_that_of_torchs_order_of_work(schedule, ranks):
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    for micro_batches in (*range(least, 2 * ranks), 2 * ranks, 4 * ranks):
        with suppress(ValueError):  # numbers that the schedule does not take
            clock = timeline(schedule, ranks, micro_batches)
            assert clock.bubble == pytest.approx(bubble(schedule, ranks, micro_batches))


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
