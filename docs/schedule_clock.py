"""Pipeline schedules on a simulated clock: what their pictures show.

The order of work is that of torch's schedule classes, read without any process, so that what is
drawn is what runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import attrs

from forgekit.parallel.pipeline.schedule import (
    PipelineSchedule,
    check_micro_batches,
    schedule_class,
    stages_per_rank,
)

Kind = Literal["F", "B", "I", "W"]
"""Forward, whole backward, backward to the inputs only, backward to the weights only."""

COSTS: Mapping[Kind, float] = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})


@attrs.frozen
class Work:
    """One pass of a micro-batch through a stage, of a ``Kind``."""

    kind: Kind
    stage: int
    micro_batch: int


@attrs.frozen
class Interval:
    """A piece of work with ``start`` and ``end``, in units of the costs."""

    rank: int
    start: float
    end: float
    work: Work


@attrs.frozen
class Timeline:
    """A schedule on a simulated clock.

    Attributes:
        intervals: All work, by rank and start.
        span: Time from the first start to the last end.
        bubble: Share of the ranks' time in which they wait.
    """

    intervals: list[Interval]
    span: float
    bubble: float


def work_order(
    schedule: PipelineSchedule, ranks: int, micro_batches: int
) -> list[list[tuple[Work, ...]]]:
    """Return each rank's work, in order.

    Work that is grouped in one tuple starts when the inputs of all of it are there, and sends its
    outputs when all of it is done (DualPipeV pairs a forward with a backward).

    Args:
        schedule: The schedule.
        ranks: Ranks of the pipeline.
        micro_batches: Micro-batches of a step.

    Returns:
        By rank, the groups of work in order.

    Raises:
        ValueError: If the schedule cannot run so many micro-batches.
    """
    check_micro_batches(schedule, ranks, micro_batches)
    if schedule == "gpipe":
        return [_warm_up(rank, micro_batches, micro_batches) for rank in range(ranks)]
    if schedule == "1f1b":
        # Torch's listing of this order is off by one for the last rank; this is the executed order.
        return [_warm_up(rank, ranks - rank, micro_batches) for rank in range(ranks)]
    per_rank = stages_per_rank(schedule)
    stage = SimpleNamespace(num_stages=per_rank * ranks, group_size=ranks, group_rank=0)
    stage.submod = None
    built = schedule_class(schedule)([stage] * per_rank, micro_batches)
    order = built.pipeline_order
    return [[_group(action) for action in order[rank] if action] for rank in range(ranks)]


def timeline(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> Timeline:
    """Simulate a schedule in which all stages cost the same.

    Args:
        schedule: The schedule.
        ranks: Ranks of the pipeline.
        micro_batches: Micro-batches of a step.

    Returns:
        The timeline; communication costs nothing.

    Raises:
        ValueError: If the schedule cannot run so many micro-batches.
    """
    orders = [iter(order) for order in work_order(schedule, ranks, micro_batches)]
    waiting = [next(order, None) for order in orders]
    last = ranks * stages_per_rank(schedule) - 1
    done: dict[Work, float] = {}  # a whole backward counts as that to the inputs
    free = [0.0] * ranks
    intervals: list[Interval] = []
    while any(waiting):
        for rank, group in enumerate(waiting):
            results = {attrs.evolve(w, kind="I") if w.kind == "B" else w for w in group or ()}
            needed = {need for work in group or () for need in _needs(work, last)} - results
            if group is None or not needed <= done.keys():
                continue
            clock = max([free[rank], *(done[work] for work in needed)])
            for work in group:
                intervals.append(Interval(rank, clock, clock + COSTS[work.kind], work))
                clock += COSTS[work.kind]
            done.update(dict.fromkeys(results, clock))
            free[rank], waiting[rank] = clock, next(orders[rank], None)
    intervals.sort(key=lambda interval: (interval.rank, interval.start))
    span = max(free)
    busy = sum(interval.end - interval.start for interval in intervals)
    return Timeline(intervals, span, (ranks * span - busy) / (ranks * span))


def _warm_up(rank: int, forwards: int, micro_batches: int) -> list[tuple[Work, ...]]:
    """Yield warm-up forwards, then alternate backwards and forwards."""
    ahead: Iterator[int] = iter(range(micro_batches))
    order = [(Work("F", rank, next(ahead)),) for _ in range(min(forwards, micro_batches))]
    for micro_batch in range(micro_batches):
        order.append((Work("B", rank, micro_batch),))
        order += [(Work("F", rank, m),) for m in [next(ahead, None)] if m is not None]
    return order


def _group(action: Any) -> tuple[Work, ...]:
    parts = action.sub_actions or (action,)
    return tuple(Work(a.computation_type.value, a.stage_index, a.microbatch_index) for a in parts)


def _needs(work: Work, last: int) -> list[Work]:
    """Return the results of other stages that work depends on; those of its own come in order."""
    if work.kind == "F" and work.stage:
        return [attrs.evolve(work, stage=work.stage - 1)]
    if work.kind in ("B", "I") and work.stage < last:
        return [Work("I", work.stage + 1, work.micro_batch)]
    return []
