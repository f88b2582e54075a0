"""Charts as HTML: lines are SVG that fills its box, words are text that keeps its size."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from forgekit.run.reporting.curves import Axis, Chart, Curve, Mark, short, thin, value_axis
from forgekit.terminal import printable

SIZE = 1000
"""Units of a chart's box in both directions; coordinates have one digit below them."""


def words(text: object) -> str:
    """Text that no browser takes for anything else."""
    return escape(printable(text))


def chart_html(chart: Chart, steps: Axis) -> str:
    """Draw a chart.

    Args:
        chart: What to draw.
        steps: The axis of the steps, which the charts of a page share.

    Returns:
        A ``<figure>``; empty if there is no finite value to draw.
    """
    values = value_axis(chart)
    if values is None:
        return ""
    caption = f"{chart.caption}{' Logarithmic scale.' * values.is_log}"
    if values.beyond:
        caption += f" {_beyond(chart, values)}"
    data = f'data-x="{steps.low} {steps.high}" data-y="{values.low} {values.high}"'
    log = ' data-log="1"' if values.is_log else ""
    return "".join(
        [
            f'<figure class="chart{" wide" if chart.is_wide else ""}" id="{words(chart.key)}" ',
            f"{data}{log}><figcaption><b>{words(chart.title)}</b> ",
            f'<span class="unit y-label">{words(chart.unit)}</span>{_legend(chart)}</figcaption>',
            f'<div class="plot">{_ticks(steps, values)}',
            f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" ',
            f'aria-label="{words(chart.title)}">{_grid(steps, values)}',
            *(_mark(mark, steps) for mark in chart.marks),
            *(_curve(curve, steps, values) for curve in chart.curves),
            f"</svg>{_mark_labels(chart, steps)}<output></output></div>",
            '<div class="x-label">optimizer step</div>',
            f"<p>{words(caption)}</p>" if caption else "",
            "</figure>\n",
        ]
    )


def path_data(x: np.ndarray, y: np.ndarray) -> str:
    """Write points as the data of an SVG path; NaN is a gap, a point between gaps a dot.

    Examples:
        >>> path_data(np.array([0.0, 1, 2, 3]), np.array([5.0, 6, np.nan, 7]))
        'M0 5L1 6M3 7h0'
    """
    finite = np.isfinite(y)
    parts: list[str] = []
    for index in np.flatnonzero(finite).tolist():
        starts = index == 0 or not finite[index - 1]
        alone = starts and (index + 1 == len(y) or not finite[index + 1])
        parts.append(f"{'M' if starts else 'L'}{_n(x[index])} {_n(y[index])}{'h0' * alone}")
    return "".join(parts)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _curve(curve: Curve, steps: Axis, values: Axis) -> str:
    at, numbers = thin(curve.steps, curve.values)
    x, y = SIZE * steps.share(at), SIZE * (1 - values.share(numbers))
    name = curve.label or ("median" if curve.kind == "trend" else "each row")
    label = f' data-label="{words(name)}"'
    look = f"c{curve.color % 8}{' dashed' if curve.color >= 8 else ''}"
    path = f'<path class="{curve.kind} {look}"{label} d="{path_data(x, y)}"/>'
    if curve.kind == "points":
        dots = "".join(f"M{_n(a)} {_n(b)}h0" for a, b in zip(x, y, strict=True) if np.isfinite(b))
        path += f'<path class="dots {look}" d="{dots}"/>'
    return path


def _ticks(steps: Axis, values: Axis) -> str:
    y = (
        f'<span class="tick y" style="bottom:{100 * float(values.share(v)):.2f}%">{short(v)}</span>'
        for v in values.ticks
    )
    x = (
        f'<span class="tick x" style="left:{100 * float(steps.share(v)):.2f}%">{_step(v)}</span>'
        for v in steps.ticks
    )
    return "".join([*y, *x])


def _step(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:,.0f}"


def _grid(steps: Axis, values: Axis) -> str:
    across = (f"M0 {_n(SIZE * (1 - float(values.share(v))))}H{SIZE}" for v in values.ticks)
    up = (f"M{_n(SIZE * float(steps.share(v)))} 0V{SIZE}" for v in steps.ticks)
    return f'<path class="grid" d="{"".join([*across, *up])}"/>'


def _mark(mark: Mark, steps: Axis) -> str:
    if not steps.low <= mark.step <= steps.high:
        return ""
    x = _n(SIZE * float(steps.share(mark.step)))
    line = f"M{x} {SIZE}v-60" if mark.kind == "bad" else f"M{x} 0V{SIZE}"
    return f'<path class="mark {mark.kind}" d="{line}"/>'


def _mark_labels(chart: Chart, steps: Axis) -> str:
    """Names of phases and starts, where there is room for words."""
    if not chart.is_wide:
        return ""
    named = [m for m in chart.marks if m.label and steps.low <= m.step <= steps.high]
    return "".join(
        f'<span class="mark-label" style="left:{100 * float(steps.share(m.step)):.2f}%">'
        f"{words(m.label)}</span>"
        for m in named[:12]
    )


def _legend(chart: Chart) -> str:
    labelled = [curve for curve in chart.curves if curve.label]
    items = (
        f'<span class="key c{c.color % 8}{" dashed" if c.color >= 8 else ""}">{words(c.label)}'
        f"{_newest(c)}</span>"
        for c in labelled
    )
    return f'<span class="legend">{"".join(items)}</span>' if labelled else ""


def _newest(curve: Curve) -> str:
    finite = curve.values[np.isfinite(curve.values)]
    return f" <i>{short(float(finite[-1]))}</i>" if len(finite) else ""


def _beyond(chart: Chart, values: Axis) -> str:
    steps, largest = max(_highest(chart.curves), key=lambda found: found[1])
    many = "1 value is" if values.beyond == 1 else f"{values.beyond:,} values are"
    above = f"{many} drawn at the upper edge, being above {short(values.high)}"
    return f"{above}; the largest, {short(largest)}, at step {steps:,}."


def _highest(curves: object) -> Iterator[tuple[int, float]]:
    for curve in curves if isinstance(curves, list | tuple) else ():
        if np.isfinite(curve.values).any():
            index = int(np.nanargmax(curve.values))
            yield int(curve.steps[index]), float(curve.values[index])
