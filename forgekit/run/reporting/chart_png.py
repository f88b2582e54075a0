"""Charts as PNG files, for slides and terminals that show pictures; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forgekit.metrics.pictures import new_figure, write_picture
from forgekit.run.reporting.curves import Axis, Chart, thin, value_axis

COLORS = (
    *("#1f5fa8", "#d1495b", "#23897c", "#c77700"),
    *("#7b4fa3", "#8a5a44", "#4f8a10", "#c2408f"),
)


def write_png(chart: Chart, steps: Axis, folder: Path) -> Path | None:
    """Draw a chart as ``KEY.png``, with the axes and colours of the page.

    Returns:
        The path; None if the chart has no finite value.

    Raises:
        ImportError: If matplotlib is missing.
    """
    values = value_axis(chart)
    if values is None:
        return None
    figure = new_figure(8, 4)
    axes = figure.subplots()
    for mark in chart.marks:
        if steps.low <= mark.step <= steps.high:
            axes.axvline(mark.step, **_mark_look(mark.kind))
    for curve in chart.curves:
        at, numbers = thin(curve.steps, curve.values)
        look = {"color": COLORS[curve.color % 8], **_look(curve.kind)}
        look["linestyle"] = "-" if curve.color < 8 else "--"
        shown = np.clip(numbers, values.low, values.high)
        axes.plot(at, shown, label=curve.label or None, **look)
    if values.is_log:
        axes.set_yscale("log")
    axes.set_xlim(steps.low, steps.high)
    axes.set_ylim(values.low, values.high)
    axes.set_title(chart.title, loc="left", fontweight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(chart.unit)
    axes.grid(color="#e4e6ea", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if any(curve.label for curve in chart.curves):
        axes.legend(frameon=False, fontsize=9)
    return write_picture(figure, folder / f"{chart.key}.png")


def _look(kind: str) -> dict[str, Any]:
    return {
        "raw": {"linewidth": 0.7, "alpha": 0.35},
        "trend": {"linewidth": 2.0},
        "line": {"linewidth": 1.3},
        "points": {"linewidth": 1.0, "marker": "o", "markersize": 4},
    }[kind]


def _mark_look(kind: str) -> dict[str, Any]:
    return {
        "phase": {"color": "#5f6670", "linestyle": "--", "linewidth": 1},
        "start": {"color": "#5f6670", "linestyle": ":", "linewidth": 1},
        "bad": {"color": "#c0263b", "linewidth": 1.5, "ymax": 0.06},
    }[kind]
