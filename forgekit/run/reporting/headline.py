"""The numbers that one looks for first, as (name, value, detail)."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from forgekit.run.reporting.curves import half_window, short
from forgekit.run.reporting.run_data import RunData
from forgekit.run.reporting.topics import bad_steps


class Number(NamedTuple):
    """One headline number.

    Attributes:
        name: What it is.
        value: The number, as text.
        detail: Where it is from.
        is_alarming: Whether it should catch the eye.
    """

    name: str
    value: str
    detail: str = ""
    is_alarming: bool = False


def headline(run: RunData) -> list[Number]:
    """The headline numbers of a run; each has a name, whether or not the run has the number."""
    parts = (_status, _loss, _evaluation, _speed, _time, _memory, _bad_steps)
    return [part(run) for part in parts]


def _status(run: RunData) -> Number:
    steps = run.metrics.numbers.get("step")
    last = max(steps.steps, default=0) if steps else 0
    total = run.setting("steps")
    of = f" of {total:,}" if isinstance(total, int) else ""
    word = str(run.status.get("status", "unknown"))
    parts = [f"step {last:,}{of}", str(run.status.get("reason") or "")]
    if not run.status:
        parts.append("no status.json")
    parts.append(str(run.status.get("time", "")).replace("T", " ").replace("+00:00", " UTC"))
    return Number("status", word, "; ".join(filter(None, parts)), word == "failed")


def _loss(run: RunData) -> Number:
    values = run.metrics.column("train/loss")[1]
    finite = np.flatnonzero(np.isfinite(values))
    if not len(values):
        return Number("loss", "-", "no train/loss")
    if (lost := len(values) - 1 - (finite[-1] if len(finite) else -1)) > 0:
        return Number("loss", "not finite", f"in the last {lost:,} of {len(values):,} rows", True)
    half = half_window(len(values))
    middle = np.median(values[finite[-half - 1 :]])
    detail = f"median of {min(half + 1, len(finite))} rows; last {short(float(values[finite[-1]]))}"
    return Number("loss", short(float(middle)), detail)


def _evaluation(run: RunData) -> Number:
    best: tuple[float, str, int] | None = None
    for name in run.metrics.numbers:
        if found := re.fullmatch("eval/(.+)/loss", name):
            steps, values = run.metrics.column(name)
            if np.isfinite(values).any():
                index = int(np.nanargmin(values))
                candidate = (float(values[index]), found[1], int(steps[index]))
                best = min(best or candidate, candidate)
    if best is None:
        return Number("best evaluation", "-", "no eval/.../loss")
    loss, name, step = best
    steps, values = run.metrics.column(f"eval/{name}/perplexity")
    there = [f"; perplexity {short(value)}" for value in values[steps == step].tolist()]
    return Number("best evaluation", short(loss), f"{name}, at step {step:,}{''.join(there)}")


def _speed(run: RunData) -> Number:
    _, values = run.metrics.column("perf/tokens_per_second")
    values = values[np.isfinite(values)]
    if not len(values):
        return Number("tokens/s", "-", "no perf/tokens_per_second")
    last = values[-max(1, len(values) // 10) :]
    _, used = run.metrics.column("perf/mfu")
    used = used[np.isfinite(used)]
    mfu = f"; MFU {used[-1]:.1%}" if len(used) else ""
    return Number("tokens/s", short(float(np.median(last))), f"median of {len(last):,} rows{mfu}")


def _time(run: RunData) -> Number:
    steps, seconds = run.metrics.column("perf/step_seconds")
    starts = sum(event.get("event") == "started" for event in run.history)
    times = f"; {starts} starts" if starts > 1 else ""
    if not np.isfinite(seconds).any():
        return Number("time in steps", "-", f"no perf/step_seconds{times}")
    total = float(np.nansum(seconds * np.diff(steps, prepend=min(0, steps[0]))))
    waited = run.metrics.column("perf/data_wait_seconds")[1]
    share = f"{np.nansum(waited) / np.nansum(seconds):.1%} of it waiting for data"
    return Number("time in steps", _duration(total), (share if len(waited) else "") + times)


def _memory(run: RunData) -> Number:
    values = run.metrics.column("memory/peak_gib")[1]
    if not np.isfinite(values).any():
        return Number("peak memory", "-", "no memory/peak_gib")
    return Number("peak memory", f"{np.nanmax(values):.4g} GiB", "of the writing process")


def _bad_steps(run: RunData) -> Number:
    steps = bad_steps(run)
    detail = f"the last at step {max(steps):,}" if steps else "none left out"
    return Number("bad steps", f"{len(steps):,}", detail, bool(steps))


def _duration(seconds: float) -> str:
    """Seconds as people say them.

    Examples:
        >>> _duration(42.3), _duration(3723), _duration(200_000)
        ('42 s', '1 h 02 min', '2 d 7 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
