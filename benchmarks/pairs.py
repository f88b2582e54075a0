"""Times of several pieces of code taken in turns, and what may be concluded from them.

A machine that is busy slows down whatever runs at that moment. Entries that take turns are slowed
down alike, so the ratio of two times of one round stays what it is while both wander, and the
median over the rounds forgets those in which something happened between the two. How far such a
ratio can be trusted is measured too: the baseline is built twice and compared with itself.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

Times = dict[str, list[float]]


def take_turns(
    entries: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    between: Callable[[], object] = lambda: None,
) -> Times:
    """Time every entry once per round, each round beginning with another one.

    Args:
        entries: What to time, by name.
        rounds: How often.
        warmup: Rounds before that are not kept.
        between: Called before each entry, outside its time.

    Returns:
        Seconds of each round, by name.
    """
    names = list(entries)
    times: Times = {name: [] for name in names}
    for number in range(warmup + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            between()
            began = time.perf_counter()
            entries[name]()
            times[name].append(time.perf_counter() - began)
    return {name: seconds[warmup:] for name, seconds in times.items()}


def ratio(times: Times, name: str, baseline: str) -> float:
    """Median over the rounds of one entry's time over the baseline's."""
    return statistics.median(_ratios(times, name, baseline))


def band(times: Times, again: str, baseline: str) -> float:
    """How far the ratio of two equal entries may lie from 1 here and now.

    The farther end of the 95% confidence interval of the median, by order statistics: the median
    itself may hit 1 by luck.
    """
    ratios = sorted(_ratios(times, again, baseline))
    reach = 0.98 * math.sqrt(len(ratios))
    lower = ratios[max(0, math.floor(len(ratios) / 2 - reach))]
    upper = ratios[min(len(ratios) - 1, math.ceil(len(ratios) / 2 + reach))]
    return max(abs(lower - 1), abs(upper - 1))


def turn(run: Callable[[], object], device: str, times: int = 1) -> Callable[[], None]:
    """Call several times and wait once, so that the host may run ahead as it does in training."""

    def take() -> None:
        for _ in range(times):
            run()
        if device != "cpu":
            torch.get_device_module(device).synchronize()

    return take


def peak(run: Callable[[], object], device: str, *, growth: bool = True) -> float | None:
    """GiB at the highest during a call, or the growth; None if the device does not count."""
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    gc.collect()
    before = module.memory_allocated() if growth else 0
    module.reset_peak_memory_stats()
    run()
    return (module.max_memory_allocated() - before) / 2**30


def machine() -> dict[str, object]:
    """Say what the numbers were measured on; part of every entry's ``extra_info``."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads()}


def _ratios(times: Times, name: str, baseline: str) -> list[float]:
    return [a / b for a, b in zip(times[name], times[baseline], strict=True)]
