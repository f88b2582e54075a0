"""Pipeline schedules by name: each rank's stages, and the order of its work.

A step's order is that of torch's schedule class. ``timeline`` runs it on a simulated clock, for
pictures and for the textbooks' bubbles: it is read without any process, so that what is drawn is
what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

import attrs

PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"
]


@attrs.frozen
class _Rule:
    """Properties of a schedule: torch's class, stages per rank, allowed numbers of micro-batches.

    ``fits(ranks, micro_batches)`` says whether torch accepts a number, ``needs`` why it would not.
    """

    torch_name: str
    per_rank: int
    is_v: bool
    fits: Callable[[int, int], bool]
    needs: str = ""


def _fits_rounds(ranks: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


_ROUNDS = "a number that its rounds, micro-batches // ranks = {rounds}, divide"
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "gpipe": _Rule("GPipe", 1, False, lambda _, m: m > 0),
        "1f1b": _Rule("1F1B", 1, False, lambda p, m: m >= p, "at least one per stage, {stages}"),
        "interleaved_1f1b": _Rule("Interleaved1F1B", 2, False, _fits_rounds, _ROUNDS),
        "interleaved_zero_bubble": _Rule("InterleavedZeroBubble", 2, False, _fits_rounds, _ROUNDS),
        "zbv": _Rule("ZBVZeroBubble", 2, True, lambda _, m: m > 0),
        "dualpipev": _Rule(
            "DualPipeV", 2, True, lambda p, m: m >= 2 * p, "at least one per stage, {stages}"
        ),
    }
)


def stages_per_rank(schedule: PipelineSchedule) -> int:
    """Return the number of stages per rank."""
    return _RULES[schedule].per_rank


def stages_of(schedule: PipelineSchedule, ranks: int, rank: int) -> list[int]:
    """Return the stages of a rank.

    Examples:
        >>> stages_of("interleaved_1f1b", ranks=4, rank=1), stages_of("zbv", ranks=4, rank=1)
        ([1, 5], [1, 6])
    """
    rule = _RULES[schedule]
    if rule.is_v:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * rule.per_rank, ranks))


def schedule_class(schedule: PipelineSchedule) -> type[Any]:
    """Return torch's class of a schedule."""
    # Imported here: most runs have no pipeline, and the import is as slow as forgekit's.
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(_RULES[schedule].torch_name)


def check_micro_batches(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> None:
    """Raise unless a schedule supports a number of micro-batches.

    Raises:
        ValueError: With the rule and the nearest numbers that fit.

    Examples:
        >>> check_micro_batches("interleaved_1f1b", ranks=4, micro_batches=9)
        Traceback (most recent call last):
        ValueError: 9 micro-batches do not fit the pipeline schedule 'interleaved_1f1b' on 4 ranks;
        it needs a number that its rounds, micro-batches // ranks = 2, divide. Use 8 or 10.
    """
    rule = _RULES[schedule]
    if micro_batches > 0 and rule.fits(ranks, micro_batches):
        return
    fitting = [m for m in range(1, micro_batches + 2 * ranks + 1) if rule.fits(ranks, m)]
    nearest = [m for m in fitting if m < micro_batches][-1:]
    nearest += [m for m in fitting if m > micro_batches][:1]
    needs = rule.needs or "at least one"
    needs = needs.format(rounds=micro_batches // ranks, stages=ranks * rule.per_rank)
    raise ValueError(
        f"{micro_batches} micro-batches do not fit the pipeline schedule {schedule!r} on {ranks} "
        f"ranks; it needs {needs}. Use {' or '.join(map(str, nearest))}."
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

    With equal costs (forward 1, each half of a backward 1) the bubble, as a share, is
    ``w / (work + w)`` with, for ``p`` ranks, ``m`` micro-batches and ``v`` stages per rank, ``work
    = 3 * v * m`` and a wait ``w`` of ``3 * (p - 1)`` for ``gpipe``, ``1f1b`` and
    ``interleaved_1f1b``, ``p - 1`` for ``interleaved_zero_bubble`` and ``zbv`` (whose ranks only
    wait for the first input and after their last work), and ``2 * (p - 1)`` for ``dualpipev``. The
    interleaved ones reach it from ``p`` micro-batches on, ``zbv`` from ``2 * p - 1``.

    Args:
        schedule: The schedule.
        ranks: Ranks of the pipeline.
        micro_batches: Micro-batches of a step.

    Returns:
        The timeline; communication costs nothing.

    Raises:
        ValueError: If the schedule cannot run so many micro-batches.

    References:
        GPipe, https://arxiv.org/abs/1811.06965; interleaved 1F1B,
        https://arxiv.org/abs/2104.04473; zero bubble and ZB-V, https://arxiv.org/abs/2401.10241
        and https://arxiv.org/abs/2405.15362; DualPipe, https://arxiv.org/abs/2412.19437, and its
        V form, https://github.com/deepseek-ai/DualPipe: ``(p - 1) * (F&B + B - 3 W)``.
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
