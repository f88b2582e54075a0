"""What runs left behind as one HTML page that loads nothing; matplotlib draws, HTML lists.

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
    ("Loss", "nats per target", "train/loss|eval/.+/loss", ""),
    ("Learning rate", "", "train/lr", "zero"),
    ("Gradient norm before clipping", "L2", "train/grad_norm", "log"),
    ("Gradient norm by layer", "L2", "grad_norm/.+", "log"),
    ("Evaluation: bits per byte", "", "eval/.+/bits_per_byte", ""),
    ("Evaluation: the rest", "", "eval/.+", ""),
    ("Targets per second", "", "perf/tokens_per_second.*", "zero"),
    ("Seconds per step", "s", "perf/.*seconds.*", "log"),
    ("Model FLOP utilisation", "share of the peak", "perf/mfu.*", ""),
    ("Memory", "GiB", "memory/.+", "zero"),
    ("Loss by source", "nats per target", "source/.+/loss", ""),
    ("Targets by source", "per step", "source/.+/targets", "zero"),
    ("Routers of experts", "", "moe/[^/]+", "log"),
    ("Reward", "mean of the answers", "rollout/reward", ""),
    ("Length of answers", "tokens", "rollout/length", "zero"),
    ("Staleness of tokens", "versions", "rollout/staleness", "zero"),
    ("Mismatch of trainer and sampler", "KL (k3), nats", "rollout/mismatch_kl", ""),
    ("Share of clipped tokens", "", "rollout/clipped", "zero"),
    ("", "", ".+", ""),
)
"""Title, unit, pattern and axis; a metric is in the first chart whose pattern its name matches."""
NOT_DRAWN = re.compile(
    "step|samples|train/(loss_mean|targets|skipped|skipped_in_a_row|spikes)|moe/load/.+"
    "|eval/.+/(perplexity|targets)"
)
NOT_TEXT = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
LOSSES = re.compile("train/loss|eval/.+/loss")
LOAD = "moe/load/"
MOST_CURVES = 8
LARGEST = 1e100
"""Numbers beyond are not drawn: an axis around them shows nothing else, or overflows."""
FEW = 20
"""Rows from which on a trend is drawn over them."""
COLUMNS = 500
"""Points of a trend."""
EVENTS = 50
MOST_WORK = 512
"""Micro-batches of all stages that are drawn of a pipeline."""
STYLE = (
    "body{font:15px/1.4 system-ui,sans-serif;max-width:70rem;margin:1rem auto;padding:0 1rem;"
    "color:#1f2328}svg{width:100%;height:auto}svg.half{width:49.5%}"
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
    """A run as far as its files tell; what a file does not hold is empty.

    Attributes:
        folder: The run directory.
        rows: The rows of ``metrics.jsonl``.
        config: The resolved configuration.
        status: How it ended.
        history: Its starts and ends.
        changes: What changed in its configuration.
        bad: Its bad steps.
        notes: What could not be read.
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
        """The JSON objects of a file, one per line, or the one of a ``.json``; notes of others."""
        records, broken = [], []
        try:
            with open_regular(path) as file:
                lines = [file.read()] if path.suffix == ".json" else file
                for number, line in enumerate(lines, start=1):
                    try:  # one text for each key: of a million rows half the memory
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
        """The metrics whose names match, numbers in them in the order of numbers."""
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
        """Return the finite values of a metric."""
        values = self.column(metric)[1]
        return values[np.isfinite(values)]

    def losses(self) -> list[str]:
        """Losses with a finite value, that of training first."""
        names = [name for name in self.names(LOSSES) if len(self.finite(name))]
        return sorted(names, key="train/loss".__ne__)

    def setting(self, dotted: str, default: Any) -> Any:
        """Return a value of the configuration, such as ``mesh.pp``, if it is of the right type."""
        value: Any = self.config
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value if isinstance(value, type(default)) else default

    def starts(self) -> list[dict[str, Any]]:
        """Return the events of its starts."""
        return [event for event in self.history if event.get("event") == "started"]

    def bad_steps(self) -> list[int]:
        """Steps in ``bad_steps.jsonl``; without it rows that count some."""
        steps, skipped = self.column("train/skipped")
        listed = {bad["step"] for bad in self.bad if isinstance(bad.get("step"), int)}
        return sorted(listed or {int(step) for step in steps[skipped > 0]})


def write_report(
    runs: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None = None
) -> Path:
    """Write what runs left behind as one page that opens without a network.

    Args:
        runs: Run directories, or ``metrics.jsonl`` files alone; several are drawn over each other.
        out: The page, replaced in one go; None is ``report.html`` in the run directory, of several
            runs in the current one.

    Returns:
        The page.

    Raises:
        ValueError: If a path is no run.
        OSError: If the page cannot be written.
    """
    read = [Run.read(Path(run)) for run in runs]
    folder = read[0].folder if len(read) == 1 else Path()
    page = folder / "report.html" if out is None else Path(out)
    title = _text(" | ".join(str(run.folder) for run in read))
    content = PAGE.format(title=title, style=STYLE, body="".join(_body(read)))
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
    _draw_curves(above, [(run, name) for name in losses], "nats per target")
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
            "log.event(state, forgekit.run.expert_loads(state), show=False)."
        )
    figure = _loads_figure(run, title or f"Load of the experts of {run.folder}")
    return _write_png(figure, Path(png_path))


def wrap_up(
    state: TrainState, out: str | os.PathLike[str], tokens: Location, *, prompt: str
) -> str:
    """Look at a finished run: its last losses, a sample, pictures, and the page with all of it.

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
        parts["report"] = lambda: f"report: {write_report([out])}"
    lines = []
    for name, make in parts.items():
        try:
            lines.append(make())
        except Exception as error:  # a tokenizer, a drawing library and a disk fail in their ways
            lines.append(f"no {name}: {error}")
    return "\n".join(lines)


# The page


def _body(runs: Sequence[Run]) -> Iterator[str]:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield f"<p>Made {now} by forgekit {version_of('forgekit')}.</p>"
    yield from (_note(note) for run in runs for note in run.notes)
    yield _table(["run", *_headline(runs[0])], ([r.folder, *_headline(r).values()] for r in runs))
    if find_spec("matplotlib") is None:
        yield _note('There are no charts: matplotlib is missing. pip install "forgekit[plot]"')
    else:
        yield from _charts(runs)
        yield from (part for run in runs for part in _diagrams(run))
    for run in runs:
        name = _text(run.folder)
        for path in sorted((run.folder / "samples").glob("*.txt"))[-6:]:
            try:
                text = read_regular(path)[:2000].decode(errors="replace")
            except OSError as error:
                text = f"{path} cannot be read: {error}"
            yield f"<h3>{name}: {_text(path.stem)}</h3><pre>{_text(text)}</pre>"
        heads = ["metric", "last", "least", "not finite or too large to draw"]
        metrics = [_summary(run, metric) for metric in run.names(f"(?!{LOAD}).+")]
        yield f"<h2>{name}: metrics</h2>{_table(heads, metrics)}"
        events = sorted([*run.history, *run.changes], key=lambda event: str(event.get("time")))
        yield f"<h2>{name}: what happened</h2>{_listed(events)}"
        if run.bad:
            yield f"<h3>Bad steps: {len(run.bad)}</h3>{_listed(run.bad)}"
            yield "<p><code>forgekit replay RUN --script FILE</code> looks at one again.</p>"
    configs = [{key: _short(value) for key, value in flat(run.config)} for run in runs]
    settings = {key: [one.get(key, "") for one in configs] for one in configs for key in one}
    alike = {key: values for key, values in settings.items() if len({*values}) == 1}
    heads = ["key", *(run.folder for run in runs)]
    if len(runs) > 1:
        other = ([key, *settings[key]] for key in settings if key not in alike)
        yield f"<h2>Configuration: keys that differ</h2>{_table(heads, other)}"
    table = _table(heads, ([key, *values] for key, values in alike.items()))
    yield f"<details><summary>{len(alike)} keys of the configuration</summary>{table}</details>"


def _headline(run: Run) -> dict[str, object]:
    """What one looks for first."""
    started = (run.starts() or [{}])[-1]
    step = max((row["step"] for row in run.rows), default=run.status.get("step", 0))
    status = run.status.get("status", "-")
    if status == "running" and not is_locked(run.folder / ".lock"):
        status = "killed: no process holds the run"
    at = f"step {step} of {run.setting('steps', 0) or '?'}"
    more = (str(run.status[name]) for name in ("reason", "time") if run.status.get(name))
    seconds = _over_steps(run, "perf/step_seconds")
    waiting = _over_steps(run, "perf/data_wait_seconds") / max(seconds, 1e-9)
    mfu = run.recent("perf/mfu")
    return {
        "status": f"{status}; {', '.join([at, *more])}",
        "parameters": _short(started.get("parameters")),
        "devices": f"{started.get('ranks', '?')} x {started.get('device', '?')}",
        "targets seen": _short(_over_steps(run, "train/targets") or None),
        "targets per second": _short(run.recent("perf/tokens_per_second")),
        "MFU": "-" if mfu is None else f"{mfu:.1%}",
        "time in steps": f"{timedelta(seconds=round(seconds))}, {waiting:.1%} waiting for data",
        "starts": len(run.starts()),
        "bad steps": len(run.bad_steps()),
    }


def _over_steps(run: Run, metric: str) -> float:
    """A number of each step, summed over all steps up to the last row."""
    steps, values = run.column(metric)
    return float(np.nansum(values * np.diff(steps, prepend=min([0, *steps[:1]]))))


def _summary(run: Run, metric: str) -> tuple[str, ...]:
    """A metric's name, its last and its least value, and where it has none."""
    steps, values = run.column(metric)
    at, gaps = np.flatnonzero(np.isfinite(values)), steps[np.isnan(values)]
    chosen = (at[-1], at[values[at].argmin()]) if len(at) else ()
    shown = [f"{_short(float(values[i]))} at step {steps[i]}" for i in chosen] or ["-", "-"]
    where = f"{len(gaps)} of {len(steps)} rows, step {gaps[0]} first" if len(gaps) else ""
    return metric, *shown, where


def _charts(runs: Sequence[Run]) -> Iterator[str]:
    """Charts of what has two finite values; of several runs one for each metric."""
    names = dict.fromkeys(name for run in runs for name in run.names())
    names = [name for name in names if not NOT_DRAWN.fullmatch(name)]
    left = [name for name in names if max(len(run.finite(name)) for run in runs) > 1]
    for title, unit, pattern, axis in CHARTS:
        matching = [name for name in left if re.fullmatch(pattern, name)]
        left = [name for name in left if name not in matching]
        is_wide, is_one = title == "Loss", bool(title) and len(runs) == 1
        charts = [[name] for name in matching]
        if is_one and matching:
            charts = [matching[:MOST_CURVES]]
        for chosen in charts:
            figure = _figure(title if is_one else chosen[0], *((11, 3.4) if is_wide else (6, 3)))
            axes = figure.subplots()
            curves = [(run, name) for name in chosen for run in runs if len(run.finite(name))]
            _draw_curves(axes, curves, unit, axis)
            if is_wide and is_one:
                _draw_marks(axes, runs[0])
            yield _svg(figure, "" if is_wide else "half")


def _diagrams(run: Run) -> Iterator[str]:
    """Loads of experts, the pipeline's clock, and a mask that is more than causal."""
    if run.names(f"{LOAD}.+"):
        yield _svg(_loads_figure(run, f"{run.folder}: load of each expert"))
    if run.setting("mesh.pp", 1) > 1:
        yield _pipeline(run)
    if run.setting("data.doc_ids", False):
        ends = np.searchsorted([10, 18], np.arange(24), side="right")
        figure = _figure("Who attends to whom, of three documents in a row", 6, 4.5)
        axes = figure.subplots()
        axes.imshow(np.tril(ends[:, None] == ends), cmap="Blues")
        axes.set(xlabel="key position", ylabel="query position")
        yield _svg(figure, "half")


# Drawing


def _figure(title: str, width: float, height: float) -> Figure:
    # Not pyplot: it keeps figures, and a window system, in global state.
    figure = require("matplotlib.figure", extra="plot").Figure(
        figsize=(width, height), layout="constrained"
    )
    figure.suptitle(_clean(title), fontsize=11, parse_math=False)
    return figure


def _svg(figure: Figure, css_class: str = "") -> str:
    from matplotlib import rc_context

    picture = io.StringIO()
    # Points less than a pixel beside a line are left out: of 300,000 rows 60 kB stay, all spikes.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "forgekit"}
    with rc_context(settings | {"path.simplify_threshold": 1.0}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return f'<svg class="{css_class}"' + picture.getvalue().partition("<svg")[2]


def _write_png(figure: Figure, path: Path) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, picture.getvalue())
    return path


def _draw_curves(axes: Axes, curves: Sequence[tuple[Run, str]], unit: str, axis: str = "") -> None:
    """Each row, pale where there are many, and the median over a window.

    Args:
        axes: Where to draw.
        curves: A run and its metric, of each.
        unit: Of the numbers.
        axis: ``"log"``, or ``"zero"`` for one that begins at 0.
    """
    trends, finite = [], np.concatenate([run.finite(name) for run, name in curves])
    are_runs = len({id(run) for run, _ in curves}) > 1
    for run, name in curves:
        steps, values = run.column(name)
        at, trend = _trend(values)
        style = {"marker": "o", "ms": 3} if len(steps) < FEW else {}
        (line,) = axes.plot(steps, values, lw=0.7, alpha=0.3, **style)
        label = _clean(run.folder if are_runs else name)
        axes.plot(steps[at], trend, color=line.get_color(), label=label)
        trends.append(trend)
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.locator_params(axis="x", integer=True)
    axes.grid(color="#e4e6ea")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    least, most = finite.min(), finite.max()
    if axis == "log" and 0 < 10 * least < most:
        axes.set_yscale("log")
        return
    if axis == "zero":
        axes.set_ylim(min(0.0, least), None)
    # A few rows far above all others would flatten everything else.
    middle, high = np.percentile(finite, [50, 98])
    limit = max(np.nanmax(np.concatenate(trends)), middle + 6 * (high - middle))
    if most > limit > least:
        axes.set_ylim(least - 0.04 * (limit - least), limit)
        count = (finite > limit).sum()
        axes.set_title(f"{count} rows above, the largest {_short(float(most))}", fontsize=8)


def _draw_marks(axes: Axes, run: Run) -> None:
    """Steps at which something happened: lines, and bad steps at the lower edge."""
    steps, samples = run.column("samples")
    marks = [("started again", "gray", event.get("step")) for event in run.starts()[1:]]
    rolled_back = (event for event in run.history if event.get("event") == "rolled_back")
    marks += [("rolled back", "purple", event.get("step")) for event in rolled_back]
    for phase in run.setting("phases", []):
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
    """A panel for each layer: experts over steps, tokens over their mean as a color."""
    layers = run.names(f"{LOAD}.+")
    figure = _figure(title, 11, 1.5 + len(layers))
    panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    for axes, layer in zip(panels, layers, strict=True):
        rows = [row for row in run.rows if isinstance(row.get(layer), list)]
        rows = [row for row in rows if len(row[layer]) == len(rows[-1][layer])]
        loads = np.array([[_number(load) for load in row[layer]] for row in rows]).T
        area = (rows[0]["step"], rows[-1]["step"] + 1, len(loads) - 0.5, -0.5)  # a row is a column
        # In doublings, from a quarter of the mean to four times it; a logarithm has no 0.
        style = {"cmap": "RdBu_r", "vmin": -2, "vmax": 2, "interpolation": "nearest"}
        axes.imshow(np.log2(np.maximum(loads, 0.01)), extent=area, aspect="auto", **style)
        axes.set_ylabel(_clean(layer.removeprefix(LOAD).removesuffix(".feed_forward")), fontsize=8)
        axes.locator_params(integer=True)
    panels[-1].set_xlabel("optimizer step")
    scale = figure.colorbar(panels[0].images[0], ax=panels, extend="both")
    scale.set_ticks([-2, 0, 2], labels=["idle: 1/4", "even", "4 times the mean"])
    return figure


def _pipeline(run: Run) -> str:
    """Who works on what in a step, on a simulated clock: stages cost the same, messages nothing."""
    from forgekit.parallel.pipeline.schedule import timeline

    stages, schedule = run.setting("mesh.pp", 1), run.setting("pipeline_schedule", "1f1b")
    sharing = math.prod(run.setting(f"mesh.{name}", 1) for name in ("pp", "cp", "tp"))
    ranks = (run.starts() or [{}])[-1].get("ranks", stages)
    rows = run.setting("batch_size", 1) * max(ranks // sharing, 1)
    count = max(run.setting("global_batch_size", 2 * stages * rows) // rows, 1)
    count = min(count, max(MOST_WORK // stages, 2 * stages))
    clock = timeline(schedule, stages, count)
    title = f"Pipeline {schedule}, {count} micro-batches, simulated: bubble {clock.bubble:.1%}"
    figure = _figure(f"{run.folder}: {title}", 11, 1.4 + stages / 4)
    axes = figure.subplots()
    for kind, label, color in (
        ("F", "forward", "tab:blue"),
        ("B", "backward", "tab:green"),
        ("I", "to inputs", "tab:olive"),
        ("W", "to weights", "tab:orange"),
    ):
        for work in (one for one in clock.intervals if one.work.kind == kind):
            spans, box = [(work.start, work.end - work.start)], (work.rank - 0.45, 0.9)
            axes.broken_barh(spans, box, color=color, edgecolor="white", label=label)
            label = ""
    axes.invert_yaxis()
    axes.set(xlabel="time, in forward passes of one stage", ylabel="rank")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    return _svg(figure)


def _trend(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centred median over a twentieth to each side: one spike does not lift it, as it lifts a mean.

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
    """A number that can be drawn, else NaN."""
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else math.nan


def _by_number(name: str) -> list[str | int]:
    """Order names as people do: numbers in them count as numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _short(value: Any) -> str:
    """Write a value for people.

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


def _table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>\n"


def _listed(records: Sequence[Mapping[str, Any]]) -> str:
    """The last records as a table of all their keys."""
    keys = list(dict.fromkeys(key for record in records[-EVENTS:] for key in record))
    return _table(keys, ([_short(one.get(key)) for key in keys] for one in records[-EVENTS:]))


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _text(value: object) -> str:
    return escape(_clean(value))


def _clean(value: object) -> str:
    """Text without characters that HTML and fonts do not have."""
    return NOT_TEXT.sub("\ufffd", str(value))
