"""``forgekit report``: the page of some runs, once or as long as they go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs

from forgekit.files import write_atomic
from forgekit.run.reporting.chart_png import write_png
from forgekit.run.reporting.curves import Chart, step_axis
from forgekit.run.reporting.page import build_page
from forgekit.run.reporting.run_data import RunData, check_content, open_runs
from forgekit.run.reporting.topics import build_charts


@attrs.frozen
class Written:
    """What ``write_report`` made.

    Attributes:
        page: The HTML page.
        pictures: PNG files of its charts.
        note: Why there are none, and what to do about it; empty if there are.
    """

    page: Path
    pictures: tuple[Path, ...] = ()
    note: str = ""


def write_report(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    pictures: bool = True,
) -> Written:
    """Write what runs left behind as one page that opens without a network, and as PNG files.

    Args:
        runs: Run directories, or ``metrics.jsonl`` files alone; several are drawn over each other.
        out: The page, replaced in one go; None is ``report.html`` in the run directory, of several
            runs in the current one.
        pictures: Whether each chart is written as a PNG file too, into the folder of the page's
            name, ``report/``.

    Returns:
        The paths of all that was written.

    Raises:
        ValueError: If a path is no run, one stands twice, or there is nothing to show.
        OSError: If the page cannot be written.
    """
    found = open_runs([Path(run) for run in runs])
    for run in found:
        check_content(run)
    page = page_path(found, out)
    charts = _write_page(found, page)
    if not pictures:
        return Written(page)
    folder = page.with_suffix("")
    steps = step_axis([chart for _, chart in charts])
    try:
        drawn = [write_png(chart, steps, folder) for _, chart in charts]
    except ImportError as error:
        return Written(page, note=f"no PNG files: {error}")
    return Written(page, tuple(path for path in drawn if path is not None))


def watch(
    runs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None,
    *,
    every_s: float,
    told: Callable[[Path], None] = lambda _: None,
    sleep: Callable[[float], None] = time.sleep,
) -> Path:
    """Write the page again whenever the runs have something new, until all of them have ended.

    The page loads itself again in a browser. Of a file that grows only what is new is read.

    Args:
        runs: As for ``write_report``; they may have nothing to show yet.
        out: As for ``write_report``.
        every_s: Seconds between two looks.
        told: Called with the page when it is there for the first time.
        sleep: Waits that many seconds.

    Returns:
        The page.

    Raises:
        ValueError: If a path is no run, or one stands twice.
        OSError: If the page cannot be written.
    """
    found = open_runs([Path(run) for run in runs])
    page, is_new, is_first = page_path(found, out), True, True
    while True:
        is_over = not any(run.is_running for run in found)
        if is_new or is_over:
            _write_page(found, page, refresh_s=None if is_over else every_s)
        if is_first:
            told(page)
        if is_over:
            return page
        is_first = False
        sleep(every_s)
        news = [run.refresh() for run in found]
        is_new = any(news)


def page_path(runs: Sequence[RunData], out: str | os.PathLike[str] | None) -> Path:
    """Where the page goes.

    Raises:
        ValueError: If that is a folder.
    """
    if out is None:
        out = runs[0].folder / "report.html" if len(runs) == 1 else "report.html"
    page = Path(out)
    if page.is_dir():
        raise ValueError(f"{page} is a folder; name the page, such as {page / 'report.html'}.")
    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"{page} would not open in a browser; name it {page.name}.html.")
    return page


def _write_page(
    runs: Sequence[RunData], page: Path, *, refresh_s: float | None = None
) -> list[tuple[str, Chart]]:
    charts = build_charts(runs)
    text = build_page(runs, charts, refresh_s=refresh_s)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(page, text.encode())
    return charts
