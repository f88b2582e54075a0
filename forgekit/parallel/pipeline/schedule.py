"""Pipeline schedules by name: which stages a rank has, and in which order it works on them.

A step's order is that of torch's schedule class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import attrs

PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"
]


@attrs.frozen
class _Rule:
    """What sets a schedule apart: its class in torch, its stages and its numbers of micro-batches.

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
    """How many stages each rank holds."""
    return _RULES[schedule].per_rank


def stages_of(schedule: PipelineSchedule, ranks: int, rank: int) -> list[int]:
    """The stages that a rank holds.

    Examples:
        >>> stages_of("interleaved_1f1b", ranks=4, rank=1), stages_of("zbv", ranks=4, rank=1)
        ([1, 5], [1, 6])
    """
    rule = _RULES[schedule]
    if rule.is_v:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * rule.per_rank, ranks))


def schedule_class(schedule: PipelineSchedule) -> type[Any]:
    """Torch's class for a schedule."""
    # Imported here: most runs have no pipeline, and it takes as long as the whole library.
    from torch.distributed.pipelining.schedules import get_schedule_class

    return get_schedule_class(_RULES[schedule].torch_name)


def check_micro_batches(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> None:
    """Raise unless a schedule can run a number of micro-batches.

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
