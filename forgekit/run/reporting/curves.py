"""Curves of a run as data: thinned to what a picture can show, without losing a spike."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

import attrs
import numpy as np

COLUMNS = 500
"""Columns of a picture; of each the lowest and the highest value are drawn."""

FEW = 20
"""Curves of fewer rows are drawn as they are, without a trend."""


@attrs.frozen(eq=False)
class Curve:
    """One line of a chart.

    Attributes:
        label: In the legend; empty for none.
        color: Number of its colour.
        kind: "raw" (thin and pale), "trend" (thick), "line" or "points".
        steps: ``[n]`` increasing.
        values: ``[n]``, NaN for a gap.
    """

    label: str
    color: int
    kind: str
    steps: np.ndarray
    values: np.ndarray


@attrs.frozen
class Mark:
    """A step that something happened at: a "phase", a "start" or a "bad" step."""

    step: float
    kind: str
    label: str = ""


@attrs.frozen(eq=False)
class Chart:
    """Curves over steps.

    Attributes:
        key: Its name among all charts, also that of its PNG file.
        title: What is drawn.
        unit: Of the values.
        curves: The lines.
        marks: Vertical lines, and ticks for bad steps.
        caption: What one sees; a sentence or none.
        is_log: Whether the axis of the values is logarithmic.
        from_zero: Whether it begins at 0.
        is_wide: Whether the chart has a row of the page for itself.
    """

    key: str
    title: str
    unit: str
    curves: Sequence[Curve]
    marks: Sequence[Mark] = ()
    caption: str = ""
    is_log: bool = False
    from_zero: bool = False
    is_wide: bool = False


def by_number(name: str) -> list[str | int]:
    """Order names as people do: the key of a name, whose numbers count as numbers.

    Examples:
        >>> sorted(["layers.10", "layers.2", "norm"], key=by_number)
        ['layers.2', 'layers.10', 'norm']
    """
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def evenly(names: Sequence[str], most: int) -> list[str]:
    """Choose so many of the names, the first and the last one among them.

    Examples:
        >>> evenly("abcde", 3)
        ['a', 'c', 'e']
    """
    chosen = np.linspace(0, len(names) - 1, min(most, len(names))).astype(int)
    return [names[int(index)] for index in chosen]


def smoothed(values: np.ndarray, half: int) -> np.ndarray:
    """Centred moving mean over ``2 * half + 1`` values that passes over NaN.

    Centred, because an exponential mean lags behind a falling loss by far more than the noise that
    it removes. Towards the start, where the loss falls fastest, the window narrows to stay centred.

    Examples:
        >>> smoothed(np.array([4.0, 2.0, float("nan"), 2.0]), half=1).tolist()
        [4.0, 3.0, nan, 2.0]
    """
    array = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(array)
    position = np.arange(len(array))
    here = np.minimum(position, half)
    first, end = position - here, np.minimum(position + here + 1, len(array))
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    means = (sums[end] - sums[first]) / np.maximum(counts[end] - counts[first], 1)
    return np.where(finite, means, np.nan)


def half_window(rows: int) -> int:
    """Half the window of a trend, which takes in a tenth of the rows, 501 at most."""
    return max(1, min(rows // 20, 250))


def trend(steps: np.ndarray, values: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Centred moving median over ``2 * half + 1`` values that passes over NaN, thinned.

    A median, because a single spike would lift a mean over the whole window. Its windows are those
    of ``smoothed``.

    Args:
        steps: ``[n]`` increasing.
        values: ``[n]``, NaN for a gap.
        half: Values to each side.

    Returns:
        Steps and medians, those of the last step among them.

    Examples:
        >>> trend(np.arange(5), np.array([5.0, 4, 900, 2, 1]), half=1)[1].tolist()
        [5.0, 5.0, 4.0, 2.0, 1.5]
    """
    count = min(len(values), COLUMNS)
    chosen = np.unique(np.linspace(0, len(values) - 1, count).round().astype(int))
    medians = np.full(len(chosen), np.nan)
    for at, index in enumerate(chosen.tolist()):
        here = min(index, half)
        window = values[index - here : index + here + 1]
        finite = window[np.isfinite(window)]
        if len(finite) and np.isfinite(values[index]):
            medians[at] = np.median(finite)
    return steps[chosen], medians


def thin(
    steps: np.ndarray, values: np.ndarray, columns: int = COLUMNS
) -> tuple[np.ndarray, np.ndarray]:
    """Keep of each column of a picture its lowest and its highest value, in their order.

    Args:
        steps: ``[n]`` increasing.
        values: ``[n]``, NaN for a gap; a column of nothing else stays one.
        columns: Columns over the whole width.

    Examples:
        >>> steps = np.arange(6)
        >>> thin(steps, np.array([1.0, 9.0, 2.0, 3.0, 0.0, 4.0]), columns=1)
        (array([1, 4]), array([9., 0.]))
    """
    if len(steps) <= 2 * columns:
        return steps, values
    column = (steps - steps[0]) * columns // (steps[-1] - steps[0] + 1)
    bounds = [0, *(np.flatnonzero(np.diff(column)) + 1).tolist(), len(steps)]
    kept: list[int] = []
    for first, end in pairwise(bounds):
        part = values[first:end]
        finite = np.flatnonzero(np.isfinite(part))
        chosen = (
            {0}
            if not len(finite)
            else {int(finite[part[finite].argmin()]), int(finite[part[finite].argmax()])}
        )
        kept += sorted(first + index for index in chosen)
    return steps[kept], values[kept]


@attrs.frozen
class Axis:
    """The range of an axis and where its ticks are.

    Attributes:
        low: Its lower end.
        high: Its upper end.
        ticks: Values with a label.
        is_log: Whether equal distances are equal ratios.
        beyond: How many values lie above the upper end; they are drawn at it.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    beyond: int = 0

    def share(self, values: np.ndarray | float) -> np.ndarray:
        """Where values lie, from 0 at the lower end to 1 at the upper one."""
        low, high = self.low, self.high
        array = np.clip(np.asarray(values, np.float64), low, high)
        if self.is_log:
            low, high, array = math.log(low), math.log(high), np.log(array)
        return (array - low) / (high - low)


def value_axis(chart: Chart) -> Axis | None:
    """Choose the axis of a chart's values; None if none of them is finite.

    Where there is a trend, rows that are far above it and all others would flatten everything else,
    so they are drawn at the upper end.
    """
    found = _finite(chart.curves)
    if not len(found):
        return None
    low, high = float(found.min()), float(found.max())
    is_log = chart.is_log and low > 0 and high > 10 * low
    beyond = 0
    if not is_log and any(curve.kind == "trend" for curve in chart.curves):
        middle, most = (float(x) for x in np.percentile(found, [50, 98]))
        steady = float(_finite([c for c in chart.curves if c.kind != "raw"]).max())
        limit = max(steady, middle + 6 * (most - middle))
        if high > limit > low:
            high, beyond = limit, int((found > limit).sum())
    if is_log:
        low, high = low / 1.1, high * 1.1
        return Axis(low, high, _log_ticks(low, high), is_log=True)
    low = min(low, 0.0) if chart.from_zero else low
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        margin = abs(high) / 10 or 1.0
        low, high = low - margin * (low != 0.0 or not chart.from_zero), high + margin
    room = 0.04 * (high - low)
    low, high = low - room * (low != 0.0), high + room * (beyond == 0)
    return Axis(low, high, linear_ticks(low, high), beyond=beyond)


def _finite(curves: Sequence[Curve]) -> np.ndarray:
    found = np.concatenate([curve.values for curve in curves] or [np.empty(0)])
    return found[np.isfinite(found)]


def step_axis(charts: Sequence[Chart]) -> Axis:
    """The axis that all charts of a page share."""
    ends = [curve.steps[[0, -1]] for chart in charts for curve in chart.curves if len(curve.steps)]
    low, high = (float(np.min(ends)), float(np.max(ends))) if ends else (0.0, 1.0)
    if low == high:
        low, high = low - 1, high + 1
    return Axis(low, high, linear_ticks(low, high, most=6, least=1.0))


def linear_ticks(
    low: float, high: float, *, most: int = 5, least: float = 0.0
) -> tuple[float, ...]:
    """Round numbers between two ends, ``most`` or fewer.

    Examples:
        >>> linear_ticks(1.9, 11.2)
        (2.0, 4.0, 6.0, 8.0, 10.0)
    """
    rough = max((high - low) / most, least)
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.9999)
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return tuple(float(f"{n * width:.12g}") for n in range(first, last + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    parts = (1,) if len(powers) > 4 else (1, 2, 5)
    found = [m * 10.0**p for p in powers[:: 1 + len(powers) // 8] for m in parts]
    return tuple(float(f"{x:.12g}") for x in found if low <= x <= high)


def short(value: float) -> str:
    """A number for people.

    Examples:
        >>> short(0.00031), short(3.14159), short(25000.0), short(1.5e7), short(0.0)
        ('0.00031', '3.142', '25,000', '15.0M', '0')
    """
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:.4g}B" if size < 1e12 else f"{value:.3g}"
    if size >= 1e6:
        return f"{value / 1e6:.1f}M"
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1e-4 else f"{value:.3g}"
