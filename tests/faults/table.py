"""The table of faults: one row each, in the rooms' files; what runs them is here.

A *check* measures something on real ranks and judges it: the errors of a training in units of what
is allowed, or a sentence about what was refused, lost or never came. A *fault* is planted in what
the check runs, and the check has to see it. Without a fault each check finds nothing: the control.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import attrs
from faults.planting import Plant, nothing
from pool import RankError, run_ranks

FAR = 1000
"""How many times over its bound a numerical error has to be."""
ROOMS = (
    *("steps", "parallel", "pipeline", "experts", "data", "checkpoints", "huggingface", "lora"),
    *("optim", "generation", "rollouts", "metrics", "run", "plan", "verify"),
)
Seen = dict[str, float] | str


def saying(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Let a measurement return what it raises, as a sentence."""

    @wraps(measure)
    def measured(*args: Any) -> Any:
        try:
            return measure(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return measured


def judge_sentences(by_rank: Sequence[str]) -> str:
    """What ranks raised: one sentence if all did; the ranks that raised if only some did."""
    silent = [rank for rank, sentence in enumerate(by_rank) if not sentence]
    said = "\n".join(dict.fromkeys(sentence for sentence in by_rank if sentence))
    return f"ranks {silent} went on. {said}" if said and silent else said


def judge_numbers(by_rank: Sequence[Seen]) -> Seen:
    """The largest error of any rank by name, or what ranks raised."""
    if any(isinstance(found, str) for found in by_rank):
        return judge_sentences([found if isinstance(found, str) else "" for found in by_rank])
    return {name: max(found[name] for found in by_rank) for name in by_rank[0]}


@attrs.frozen
class Check:
    """What is measured and how it is judged.

    Attributes:
        measure: ``measure(rank, world)`` on each rank; a fault is planted around it. With
            ``breaks`` it gets an empty folder too.
        world: Number of ranks.
        judge: Takes what the ranks returned; errors in units of what is allowed, or a sentence,
            which is empty if there is nothing to say.
        control: As ``judge``, where more is asked of a run without a fault.
        timeout_s: Until a job is given up, for each measurement.
        alone: Whether a measurement gets a job of its own: after an error ranks may not be where
            the next one expects them.
        breaks: Whether it makes its own process group, which may break.
    """

    measure: Callable[..., Any]
    world: int = 2
    judge: Callable[[Sequence[Any]], Seen] = judge_sentences
    control: Callable[[Sequence[Any]], Seen] | None = None
    timeout_s: float = 40
    alone: bool = False
    breaks: bool = False


@attrs.frozen
class Fault:
    """A row of the table.

    Attributes:
        name: What is wrong, as its author would say it.
        check: Name of the check that has to see it.
        plant: How it is planted.
        seen: The error that tells, by its name; or what the sentence has to match.
        least: Of an error: how many times over its bound it has to be.
    """

    name: str
    check: str
    plant: Plant
    seen: str
    least: float = FAR


@cache
def all_checks() -> dict[str, Check]:
    """Checks of all rooms by name."""
    checks: dict[str, Check] = {}
    for room in ROOMS:
        new = importlib.import_module(f"faults.{room}").CHECKS
        assert checks.keys().isdisjoint(new), room
        checks |= new
    return checks


@cache
def all_faults() -> dict[str, Fault]:
    """Rows of all rooms by room, check and name."""
    return {
        f"{room}: {fault.name} [{fault.check}]": fault
        for room in ROOMS
        for fault in importlib.import_module(f"faults.{room}").FAULTS
    }


@cache
def default_faults() -> frozenset[str]:
    """The rows of the default run: the first of each room."""
    return frozenset({name.partition(":")[0]: name for name in reversed(all_faults())}.values())


def _measure(
    rank: int, world: int, check: str, faults: Sequence[str | None], *folder: Path
) -> list[tuple[Any, int]]:
    """One rank's part: what was measured with each fault, and how often the fault was called."""
    measured = []
    for fault in faults:
        with (all_faults()[fault].plant if fault else nothing)() as count:
            result = all_checks()[check].measure(rank, world, *folder)
        measured.append((result, count.calls))
    return measured


@cache
def _job(check: str, names: tuple[str | None, ...]) -> dict[str | None, Any]:
    """What the ranks measured with each fault in turn; what stopped the job in place of it."""
    how = all_checks()[check]
    options = {"timeout_s": how.timeout_s + 10 * len(names), "group": not how.breaks}
    with tempfile.TemporaryDirectory() as folder:
        given = [Path(folder)] if how.breaks else []
        try:
            by_rank = run_ranks(_measure, how.world, check, names, *given, **options)
        except RankError as error:
            return dict.fromkeys(names, str(error))
    return dict(zip(names, zip(*by_rank, strict=True), strict=True))


def run(check: str, name: str | None = None, *, by_default: bool = False) -> Seen:
    """What a check sees of a fault, or without one.

    Args:
        check: Name of the check.
        name: Name of the fault; None: without one.
        by_default: Whether the job is that of the default run, which has fewer faults.

    Raises:
        AssertionError: If what was planted was not called on any rank.
    """
    how, names = all_checks()[check], (name,)
    if not how.alone:
        rows = {n for n, fault in all_faults().items() if fault.check == check}
        rows = rows & default_faults() if by_default else rows
        names = (None, *(n for n in all_faults() if n in rows))
    measured = _job(check, names)[name]
    if isinstance(measured, str) and len(names) > 1:  # one of them stopped the job
        measured = _job(check, (name,))[name]
    if isinstance(measured, str):
        return measured
    results, calls = zip(*measured, strict=True)
    assert sum(calls) > 0, f"what {name!r} plants is not called any more"
    judge = how.control if name is None and how.control else how.judge
    return judge(results)
