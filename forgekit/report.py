"""A run's report: one self-contained HTML page; matplotlib draws the charts.

The page needs only the files of a run directory, and a run that was killed, is still running or has
broken files has a page too: what cannot be read is noted. Without matplotlib it has its tables.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forgekit.checks import flat, parse_json
from forgekit.environment import require
from forgekit.files import is_locked, open_regular, read_regular, write_atomic
from forgekit.remote.urls import Location, is_url

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from forgekit.state import TrainState

CHARTS = (
    ("Loss", "nats per target", "train/loss|eval/.+/loss", False),
    ("Learning rate", "", "train/lr", True),
    ("Gradient norm before clipping", "L2", "train/grad_norm", False),
    ("Gradient norm by layer", "L2", "grad_norm/.+", False),
    ("Targets per second", "", "perf/tokens_per_second.*", True),
    ("Seconds per step", "s", "perf/.*seconds.*", False),
    ("Model FLOP utilisation", "share of the peak", "perf/mfu.*", True),
    ("Memory", "GiB", "memory/.+", True),
    ("Loss by source", "nats per target", "source/.+/loss", False),
    ("Targets by source", "per step", "source/.+/targets", True),
    ("Routers of experts", "", "moe/[^/]+", False),
)
"""Title, unit, pattern of metrics, and whether the axis begins at 0; others get own charts."""
NOT_DRAWN = re.compile(
    "step|samples|train/(loss_mean|targets|skipped|skipped_in_a_row|spikes)|moe/load/.+"
    "|eval/.+/(perplexity|targets)"
)
NOT_TEXT = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
LOSSES = re.compile("train/loss|eval/.+/loss")
LOAD = "moe/load/"
MOST_CURVES = 8
LARGEST = 1e100
"""Larger numbers are not drawn: they would flatten the chart, or overflow."""
FEW = 20
"""Minimum number of rows for which a trend is drawn."""
COLUMNS = 500
"""Number of points of a trend."""
EVENTS = 50
STYLE = (
    "body{font:15px/1.4 system-ui,sans-serif;max-width:70rem;margin:1rem auto;padding:0 1rem;"
    "color:#1f2328}svg{width:100%;height:auto}"
    "table{border-collapse:collapse;margin:.5rem 0}"
    "td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top;"
    "border-bottom:1px solid #e4e6ea;overflow-wrap:anywhere}.note{background:#fff4e5;"
    "padding:.4rem .6rem}pre{background:#f5f6f8;padding:.6rem;white-space:pre-wrap}"
)
PAGE = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta '
    'http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
    '\'unsafe-inline\'; img-src data:"><meta name="viewport" content="width=device-width">'
    "<title>{title}</title><style>{style}</style></head>\n<body><h1>{title}</h1>\n{body}</body>"
    "</html>\n"
)


@attrs.define
class Run:
    """A run as read from its files; what they lack is empty.

    ``rows`` are those of ``metrics.jsonl``, ``history`` its starts and ends, ``changes`` those of
    its configuration, ``bad`` its bad steps, ``notes`` what could not be read.
    """

    folder: Path
    rows: list[dict[str, Any]] = attrs.field(factory=list)
    config: dict[str, Any] = attrs.field(factory=dict)
    status: dict[str, Any] = attrs.field(factory=dict)
    history: list[dict[str, Any]] = attrs.field(factory=list)
    changes: list[dict[str, Any]] = attrs.field(factory=list)
    bad: list[dict[str, Any]] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run directory, or a file of metrics alone.

        Raises:
            ValueError: If there is neither a row nor a status.
        """
        folder, metrics = (path, path / "metrics.jsonl") if path.is_dir() else (path.parent, path)
        run = cls(folder)
        run.rows = [row for row in run._objects(metrics) if isinstance(row.get("step"), int)]
        run.config = dict(*run._objects(folder / "config.json"))
        run.status = dict(*run._objects(folder / "status.json"))
        run.history = run._objects(folder / "history.jsonl")
        run.changes = run._objects(folder / "config_changes.jsonl")
        run.bad = run._objects(folder / "bad_steps.jsonl")
        if not run.rows and not run.status:
            raise ValueError(
                f"{path} has no row of metrics and no status.json. {' '.join(run.notes)} Name a "
                "run directory, what a recipe's out= was, or a metrics.jsonl."
            )
        return run

    def _objects(self, path: Path) -> list[dict[str, Any]]:
        """Read a file's JSON objects, one per line, or one in a ``.json``; note all others."""
        records, broken = [], []
        try:
            with open_regular(path) as file:
                lines = [file.read()] if path.suffix == ".json" else file
                for number, line in enumerate(lines, start=1):
                    try:  # one string per key halves the memory of a million rows
                        records.append({sys.intern(k): v for k, v in {**parse_json(line)}.items()})
                    except (ValueError, TypeError):  # a TypeError: no object
                        start = line.rstrip()[:60].decode(errors="replace")
                        broken.append(f"line {number} is {start!r}")
        except FileNotFoundError:
            return []
        except OSError as error:
            self.notes.append(f"{path} cannot be read: {error}")
        if broken:
            self.notes.append(f"{len(broken)} lines of {path} are left out; {broken[0]}.")
        return records

    def names(self, pattern: str | re.Pattern[str] = ".+") -> list[str]:
        """List the metrics whose names match, in natural order."""
        names = {name for row in self.rows for name in row if re.fullmatch(pattern, name)}
        return sorted(names, key=_by_number)

    def column(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a metric, NaN where a row says null or a huge number."""
        pairs = [(row["step"], _number(row[metric])) for row in self.rows if metric in row]
        steps, values = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(steps, int), np.array(values, float)

    def recent(self, metric: str) -> float | None:
        """Return the median of the last twentieth of a metric."""
        values = self.finite(metric)
        return float(np.median(values[-1 - len(values) // 20 :])) if len(values) else None

    def finite(self, metric: str) -> np.ndarray:
        """Return a metric's finite values."""
        values = self.column(metric)[1]
        return values[np.isfinite(values)]

    def losses(self) -> list[str]:
        """List the losses with a finite value, the training loss first."""
        names = [name for name in self.names(LOSSES) if len(self.finite(name))]
        return sorted(names, key="train/loss".__ne__)

    def starts(self) -> list[dict[str, Any]]:
        """Return the start events of its history."""
        return [event for event in self.history if event.get("event") == "started"]

    def bad_steps(self) -> list[int]:
        """Return the steps in ``bad_steps.jsonl``; without it, of the rows that count bad steps."""
        steps, skipped = self.column("train/skipped")
        listed = {bad["step"] for bad in self.bad if isinstance(bad.get("step"), int)}
        return sorted(listed or {int(step) for step in steps[skipped > 0]})


def write_report(run: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write a run's report, one page that opens without a network.

    Args:
        run: The run directory, or a ``metrics.jsonl`` alone.
        out: The page, replaced in one go; None is ``report.html`` in the run directory.

    Returns:
        The page.

    Raises:
        ValueError: If it is no run.
        OSError: If the page cannot be written.
    """
    read = Run.read(Path(run))
    page = read.folder / "report.html" if out is None else Path(out)
    content = PAGE.format(title=_text(read.folder), style=STYLE, body=_body(read))
    write_atomic(page, content.encode())
    return page


def plot_losses(
    metrics_path: str | os.PathLike[str],
    png_path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw training and evaluation losses and the learning rate into a PNG file.

    Args:
        metrics_path: The run's ``metrics.jsonl``.
        png_path: The picture; replaced in one go, its folder is made.
        title: Heading; None names the run directory.

    Returns:
        The path of the picture.

    Raises:
        ValueError: If no row has a finite loss.
        ImportError: If matplotlib is missing.
    """
    run = Run.read(Path(metrics_path))
    if not (losses := run.losses()):
        raise ValueError(f"{metrics_path} has {len(run.rows)} rows and no finite loss in them.")
    figure = _figure(title or f"Loss of {run.folder}", 8, 5.5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _draw_curves(above, run, losses, "nats per target")
    above.set_xlabel("")
    below.plot(*run.column("train/lr"), color="gray")
    below.set(ylabel="learning rate", xlabel="optimizer step", ylim=(0, None))
    return _write_png(figure, Path(png_path))


def plot_expert_loads(
    metrics_path: str | os.PathLike[str],
    png_path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw how busy each expert was over a run, a panel for each layer, into a PNG file.

    Args:
        metrics_path: The run's ``metrics.jsonl``.
        png_path: The picture; replaced in one go, its folder is made.
        title: Heading; None names the run directory.

    Returns:
        The path of the picture.

    Raises:
        ValueError: If no row has loads.
        ImportError: If matplotlib is missing.
    """
    run = Run.read(Path(metrics_path))
    if not run.names(f"{LOAD}.+"):
        raise ValueError(
            f"{metrics_path} has no {LOAD}... in it. Log them: "
            "log.event(state, forgekit.metrics.expert_loads(state), show=False)."
        )
    figure = _loads_figure(run, title or f"Load of the experts of {run.folder}")
    return _write_png(figure, Path(png_path))


def wrap_up(
    state: TrainState, out: str | os.PathLike[str], tokens: Location, *, prompt: str
) -> str:
    """Summarise a finished run: last losses, a sample, pictures, and the report page.

    What cannot be made, because a package is not installed, the disk is full or there is no loss to
    draw, is left out with its reason: a run that has ended well must not fail because of a picture.
    Every rank calls it; the first one writes.

    Args:
        state: The last state.
        out: The run directory; ``samples/``, ``loss.png``, ``report.html`` and, where loads were
            logged, ``expert_loads.png`` are written.
        tokens: The token file, with its ``tokenizer.json`` if there is to be a sample.
        prompt: The text that the sample continues.

    Returns:
        What to show, some lines of text.
    """
    from forgekit.data.tokenizer import load_tokenizer
    from forgekit.evaluation.generate import write_sample
    from forgekit.mesh import process_rank

    out = Path(out)
    metrics = out / "metrics.jsonl"

    def losses() -> str:
        run = Run.read(out)
        return f"{metrics}: " + "  ".join(f"{n} {run.finite(n)[-1]:.4f}" for n in run.losses())

    def sample() -> str:
        tokenizer = load_tokenizer(tokens)
        text = write_sample(state, out, tokenizer, prompt, temperature=0.8, top_k=50)
        return f"sample ({out / 'samples'}):\n{text}"

    parts = {"losses": losses}
    if is_url(tokens) or (Path(tokens) / "tokenizer.json").exists():
        parts["sample"] = sample
    if process_rank() == 0:
        parts["loss curve"] = lambda: f"loss curve: {plot_losses(metrics, out / 'loss.png')}"
        if Run.read(out).names(f"{LOAD}.+"):
            png = out / "expert_loads.png"
            parts["loads"] = lambda: f"loads of experts: {plot_expert_loads(metrics, png)}"
        parts["report"] = lambda: f"report: {write_report(out)}"
    lines = []
    for name, make in parts.items():
        try:
            lines.append(make())
        except Exception as error:  # tokenizers, drawing libraries and disks raise anything
            lines.append(f"no {name}: {error}")
    return "\n".join(lines)


# The page


def _body(run: Run) -> str:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    settings = _table((key, _short(value)) for key, value in flat(run.config))
    sections = {
        "Headline": _table(_headline(run).items()),
        "Curves": _curves(run),
        "Bad steps": _listed(run.bad),
        "Load of each expert": _loads(run),
        "Configuration": f"<details><summary>all keys</summary>{settings}</details>",
        "Changes of the configuration": _listed(run.changes),
        "Samples": "".join(_samples(run)),
    }
    made = f"<p>Made {now} by forgekit {version_of('forgekit')}.</p>"
    notes = "".join(map(_note, run.notes))
    shown = (f"<h2>{title}</h2>{content}\n" for title, content in sections.items() if content)
    return made + notes + "".join(shown)


def _samples(run: Run) -> Iterator[str]:
    """Return the last samples."""
    for path in sorted((run.folder / "samples").glob("*.txt"))[-6:]:
        try:
            text = read_regular(path)[:2000].decode(errors="replace")
        except OSError as error:
            text = f"{path} cannot be read: {error}"
        yield f"<h3>{_text(path.stem)}</h3><pre>{_text(text)}</pre>"


def _headline(run: Run) -> dict[str, object]:
    """Return the key figures by name."""
    started = (run.starts() or [{}])[-1]
    step = max((row["step"] for row in run.rows), default=run.status.get("step", 0))
    status = run.status.get("status", "-")
    if status == "running" and not is_locked(run.folder / ".lock"):
        status = "killed: no process holds the run"
    at = f"step {step} of {run.config.get('steps') or '?'}"
    more = (str(run.status[name]) for name in ("reason", "time") if run.status.get(name))
    seconds = _over_steps(run, "perf/step_seconds")
    waiting = _over_steps(run, "perf/data_wait_seconds") / max(seconds, 1e-9)
    mfu = run.recent("perf/mfu")
    return {
        "status": f"{status}; {', '.join([at, *more])}",
        "parameters": _short(started.get("parameters")),
        "devices": f"{started.get('ranks', '?')} x {started.get('device', '?')}",
        **{name: f"{run.finite(name)[-1]:.4f} at last" for name in run.losses()},
        "targets seen": _short(_over_steps(run, "train/targets") or None),
        "targets per second": _short(run.recent("perf/tokens_per_second")),
        "MFU": "-" if mfu is None else f"{mfu:.1%}",
        "time in steps": f"{timedelta(seconds=round(seconds))}, {waiting:.1%} waiting for data",
        "starts": len(run.starts()),
        "bad steps": len(run.bad_steps()),
    }


def _over_steps(run: Run, metric: str) -> float:
    """Sum a per-step metric over all steps up to the last row."""
    steps, values = run.column(metric)
    return float(np.nansum(values * np.diff(steps, prepend=min([0, *steps[:1]]))))


def _loads(run: Run) -> str:
    has_loads = find_spec("matplotlib") is not None and run.names(f"{LOAD}.+")
    return _svg(_loads_figure(run, "")) if has_loads else ""


def _panels(run: Run) -> Iterator[tuple[str, str, bool, list[str]]]:
    """Title, unit, whether the axis begins at 0, and metrics that have two finite values."""
    names = [name for name in run.names() if not NOT_DRAWN.fullmatch(name)]
    left = [name for name in names if len(run.finite(name)) > 1]
    for title, unit, pattern, from_zero in CHARTS:
        if chosen := [name for name in left if re.fullmatch(pattern, name)]:
            yield title, unit, from_zero, chosen[:MOST_CURVES]
            left = [name for name in left if name not in chosen]
    yield from ((name, "", False, [name]) for name in left)


def _curves(run: Run) -> str:
    """Draw all charts in a grid of two columns; the first spans both."""
    if find_spec("matplotlib") is None:
        return _note('There are no charts: matplotlib is missing. pip install "forgekit[plot]"')
    if not (panels := [*_panels(run)]):
        return ""
    rows = 1 + len(panels) // 2
    figure = _figure("", 11, 3 * rows)
    grid = figure.add_gridspec(rows, 2)
    for number, (title, unit, from_zero, names) in enumerate(panels):
        row, column = divmod(number + 1, 2)
        axes = figure.add_subplot(grid[row, column] if number else grid[0, :])
        axes.set_title(_clean(title), fontsize=10, parse_math=False)
        _draw_curves(axes, run, names, unit, from_zero=from_zero)
        if "train/loss" in names:
            _draw_marks(axes, run)
    return _svg(figure)


# Drawing


def _figure(title: str, width: float, height: float) -> Figure:
    # Not pyplot: it keeps figures, and a window system, in global state.
    figure = require("matplotlib.figure", extra="plot").Figure(
        figsize=(width, height), layout="constrained"
    )
    if title:
        figure.suptitle(_clean(title), fontsize=11, parse_math=False)
    return figure


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    picture = io.StringIO()
    # Points less than a pixel beside a line are left out: of 300,000 rows 60 kB stay, all spikes.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "forgekit"}
    with rc_context(settings | {"path.simplify_threshold": 1.0}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return "<svg" + picture.getvalue().partition("<svg")[2]


def _write_png(figure: Figure, path: Path) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, picture.getvalue())
    return path


def _draw_curves(
    axes: Axes, run: Run, names: Sequence[str], unit: str, *, from_zero: bool = False
) -> None:
    """Each row, pale where there are many, and the median over a window.

    The axis is logarithmic where the largest number is above ten times the least one.
    """
    for name in names:
        steps, values = run.column(name)
        at, trend = _trend(values)
        style = {"marker": "o", "ms": 3} if len(steps) < FEW else {}
        (line,) = axes.plot(steps, values, lw=0.7, alpha=0.3, **style)
        axes.plot(steps[at], trend, color=line.get_color(), label=_clean(name))
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.locator_params(axis="x", integer=True)
    axes.grid(color="#e4e6ea")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    finite = np.concatenate([run.finite(name) for name in names])
    if from_zero:
        axes.set_ylim(min(0.0, finite.min()), None)
    elif 0 < 10 * finite.min() < finite.max():
        axes.set_yscale("log")


def _draw_marks(axes: Axes, run: Run) -> None:
    """Mark events by vertical lines and bad steps at the lower edge."""
    steps, samples = run.column("samples")
    marks = [("started again", "gray", event.get("step")) for event in run.starts()[1:]]
    rolled_back = (event for event in run.history if event.get("event") == "rolled_back")
    marks += [("rolled back", "purple", event.get("step")) for event in rolled_back]
    for phase in run.config.get("phases") or ():
        at = np.interp(phase.get("start", 0), [0, *samples], [0, *steps])
        marks.append(("phase", "black", phase.get("step", at)))
    for label, color, step in marks:
        is_new = label not in axes.get_legend_handles_labels()[1]
        if step:
            axes.axvline(step, color=color, ls="--", lw=0.8, label=label if is_new else "")
    if bad := run.bad_steps():
        style = {"color": "crimson", "ms": 14, "mew": 2, "clip_on": False, "label": "bad step"}
        axes.plot(bad, [0] * len(bad), "|", transform=axes.get_xaxis_transform(), **style)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _loads_figure(run: Run, title: str) -> Figure:
    """Draw a panel per layer: experts over steps, load relative to the mean as color."""
    layers = run.names(f"{LOAD}.+")
    figure = _figure(title, 11, 1.5 + len(layers))
    panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    for axes, layer in zip(panels, layers, strict=True):
        rows = [row for row in run.rows if isinstance(row.get(layer), list)]
        rows = [row for row in rows if len(row[layer]) == len(rows[-1][layer])]
        loads = np.array([[_number(load) for load in row[layer]] for row in rows]).T
        area = (rows[0]["step"], rows[-1]["step"] + 1, len(loads) - 0.5, -0.5)  # a row is a column
        # A log2 scale from a quarter of the mean to four times it; zeros are clipped.
        style = {"cmap": "RdBu_r", "vmin": -2, "vmax": 2, "interpolation": "nearest"}
        axes.imshow(np.log2(np.maximum(loads, 0.01)), extent=area, aspect="auto", **style)
        axes.set_ylabel(_clean(layer.removeprefix(LOAD).removesuffix(".feed_forward")), fontsize=8)
        axes.locator_params(integer=True)
    panels[-1].set_xlabel("optimizer step")
    scale = figure.colorbar(panels[0].images[0], ax=panels, extend="both")
    scale.set_ticks([-2, 0, 2], labels=["idle: 1/4", "even", "4 times the mean"])
    return figure


def _trend(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute a centred median over a twentieth to each side; unlike a mean it ignores one spike.

    Towards the start, where a loss falls fastest, the window narrows to stay centred.
    """
    half = min(len(values) // FEW, 250)
    at = np.unique(np.linspace(0, len(values) - 1, COLUMNS).round().astype(int))
    trend = np.full(len(at), np.nan)
    for column, i in enumerate(at):
        if np.isfinite(values[i]):
            around = values[i - min(i, half) : i + min(i, half) + 1]
            trend[column] = np.median(around[np.isfinite(around)])
    return at, trend


# Numbers and text


def _number(value: Any) -> float:
    """Return a number that can be drawn, else NaN."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else math.nan


def _by_number(name: str) -> list[str | int]:
    """Sort key of natural order: digits compare as numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _short(value: Any) -> str:
    """Format a value for display.

    Examples:
        >>> _short(0.00031), _short(25000.0), _short(1.5e7), _short(None), _short([1])
        ('0.00031', '25,000', '15 M', '-', '[1]')
    """
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return (value if isinstance(value, str) else json.dumps(value))[:200]
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if size <= abs(value) < 1000 * size:
            return f"{value / size:.4g} {unit}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


def _table(rows: Iterable[Iterable[object]], heads: Iterable[object] = ()) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>\n"


def _listed(records: Sequence[Mapping[str, Any]]) -> str:
    """Format the last records as a table of all their keys; "" without records."""
    last = records[-EVENTS:]
    keys = list(dict.fromkeys(key for record in last for key in record))
    return _table(([_short(one.get(key)) for key in keys] for one in last), keys) if last else ""


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _text(value: object) -> str:
    return escape(_clean(value))


def _clean(value: object) -> str:
    """Remove characters that HTML or fonts lack."""
    return NOT_TEXT.sub("\ufffd", str(value))
