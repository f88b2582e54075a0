"""Pipeline schedules by name: each rank's stages, and the order of its work.

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
    """Properties of a schedule: torch's class, stages per rank, allowed numbers of micro-batches.

    ``fits(ranks, micro_batches)`` says whether torch accepts a number, ``needs`` why it would not;
    ``wait(ranks, micro_batches)`` how long a rank waits in a step, in forward passes of a stage.
    """

    torch_name: str
    per_rank: int
    is_v: bool
    fits: Callable[[int, int], bool]
    wait: Callable[[int, int], int]
    needs: str = ""


def _fits_rounds(ranks: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // ranks) == 0


def _fill(ranks: int, _: int) -> int:
    return 3 * (ranks - 1)


_ROUNDS = "a number that its rounds, micro-batches // ranks = {rounds}, divide"
_EACH = "at least one per stage, {stages}"
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "gpipe": _Rule("GPipe", 1, False, lambda _, m: m > 0, _fill),
        "1f1b": _Rule("1F1B", 1, False, lambda p, m: m >= p, _fill, _EACH),
        "interleaved_1f1b": _Rule(
            *("Interleaved1F1B", 2, False, _fits_rounds),
            *(lambda p, m: _fill(p, m) + 3 * max(0, p - m), _ROUNDS),
        ),
        "interleaved_zero_bubble": _Rule(
            *("InterleavedZeroBubble", 2, False, _fits_rounds),
            *(lambda p, m: p - 1 + 2 * max(0, p - m) + max(0, p - 2 * m), _ROUNDS),
        ),
        "zbv": _Rule(
            *("ZBVZeroBubble", 2, True, lambda _, m: m > 0),
            lambda p, m: max(p - 1, 4 * p - 2 - 2 * m),
        ),
        "dualpipev": _Rule(
            *("DualPipeV", 2, True, lambda p, m: m >= 2 * p),
            *(lambda p, _: 2 * (p - 1), _EACH),
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


def bubble(schedule: PipelineSchedule, ranks: int, micro_batches: int) -> float:
    """Return the share of a step in which ranks wait, if all stages cost the same.

    It is ``w / (work + w)`` with, for ``p`` ranks, ``m`` micro-batches and ``v`` stages per rank,
    ``work = 3 * v * m`` (forward 1, each half of a backward 1) and a wait ``w`` of ``3 * (p - 1)``
    for ``gpipe``, ``1f1b`` and ``interleaved_1f1b``, ``p - 1`` for ``interleaved_zero_bubble`` and
    ``zbv``, and ``2 * (p - 1)`` for ``dualpipev``. The interleaved ones wait longer with fewer than
    ``p`` micro-batches, ``zbv`` with fewer than ``1.5 * p``.

    References:
        GPipe, https://arxiv.org/abs/1811.06965; interleaved 1F1B,
        https://arxiv.org/abs/2104.04473; zero bubble and ZB-V, https://arxiv.org/abs/2401.10241
        and https://arxiv.org/abs/2405.15362; DualPipe, https://arxiv.org/abs/2412.19437, and its
        V form, https://github.com/deepseek-ai/DualPipe: ``(p - 1) * (F&B + B - 3 W)``.

    Examples:
        >>> bubble("1f1b", ranks=2, micro_batches=2)
        0.3333333333333333
    """
    check_micro_batches(schedule, ranks, micro_batches)
    wait = _RULES[schedule].wait(ranks, micro_batches)
    return wait / (3 * stages_per_rank(schedule) * micro_batches + wait)
