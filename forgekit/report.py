"""What runs left behind as one HTML page that loads nothing; matplotlib draws, HTML lists.

The page needs only the files of a run directory, and a run that was killed, is still running or has
broken files has a page too: what cannot be read is said. Without matplotlib it has its tables.
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

from forgekit.checks import parse_json
from forgekit.environment import require
from forgekit.files import is_locked, open_regular, read_regular, write_atomic
from forgekit.remote.urls import Location, is_url

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from forgekit.state import TrainState

TOPICS = (
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
"""Title, unit, pattern and axis of charts; a metric is in the first that its name matches."""

NOT_DRAWN = re.compile(
    "step|samples|train/(loss_mean|targets|skipped|skipped_in_a_row|spikes)|moe/load/.+"
    "|eval/.+/(perplexity|targets)"
)
NOT_TEXT = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
LOAD = "moe/load/"
MOST_CURVES = 8
LARGEST = 1e100
"""Numbers beyond are not drawn: an axis around them shows nothing else, or overflows."""
FEW = 20
"""Rows from which on a trend is drawn over them."""
COLUMNS = 500
"""Points of a trend."""
EVENTS = 50
MOST_LOAD = 4.0
"""Colours of loads end at this many times the mean, and at the mean divided by it."""
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
    """A run as far as its files tell.

    Attributes:
        name: Its name, unique on a page.
        folder: The run directory.
        rows: The rows of ``metrics.jsonl``.
        files: What the other files hold, by name; empty where there is none.
        notes: What could not be read.
    """

    name: str
    folder: Path
    rows: list[dict[str, Any]] = attrs.field(factory=list)
    files: dict[str, Any] = attrs.field(factory=dict)
    notes: list[str] = attrs.field(factory=list)

    @classmethod
    def read(cls, path: Path, name: str | None = None) -> Run:
        """Read a run directory, or a file of metrics alone.

        Raises:
            ValueError: If there is neither a row nor a status.
        """
        folder, file = (path, path / "metrics.jsonl") if path.is_dir() else (path.parent, path)
        run = cls(name or folder.absolute().name, folder)
        run.rows = [row for row in run._objects(file) if isinstance(row.get("step"), int)]
        for jsonl in ("history", "bad_steps", "config_changes"):
            run.files[jsonl] = run._objects(folder / f"{jsonl}.jsonl")
        for one in ("config", "status"):
            run.files[one] = dict(*run._objects(folder / f"{one}.json", is_one=True))
        if not run.rows and not run.files["status"]:
            raise ValueError(
                f"{path} has no row of metrics and no status.json. {' '.join(run.notes)} Name a "
                "run directory, what a recipe's out= was, or a metrics.jsonl."
            )
        return run

    def _objects(self, path: Path, *, is_one: bool = False) -> list[dict[str, Any]]:
        """The JSON objects of a file, or the one that it is; of what is broken, a note."""
        records, broken = [], []
        try:
            with open_regular(path) as file:
                for number, line in enumerate([file.read()] if is_one else file, start=1):
                    try:  # one text for each key: of a million rows half the memory
                        records.append({sys.intern(k): v for k, v in {**parse_json(line)}.items()})
                    except (ValueError, TypeError):  # a TypeError: no object
                        start = line.rstrip()[:60].decode(errors="replace")
                        broken.append(f"line {number} is {start!r}")
        except FileNotFoundError:
            return []
        except OSError as error:
            self.notes.append(f"{path} is left out, it cannot be read: {error}")
            return []
        if broken:
            self.notes.append(f"{len(broken)} lines of {path} are left out; {broken[0]}.")
        return records

    def names(self) -> list[str]:
        """All metrics, in the order in which people sort names."""
        return sorted({name for row in self.rows for name in row}, key=_by_number)

    def column(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a metric, NaN where a row says null or a huge number."""
        pairs = [(row["step"], row[metric]) for row in self.rows if metric in row]
        values = np.array([_number(value) for _, value in pairs])
        return np.array([step for step, _ in pairs]), values

    def finite(self, metric: str) -> np.ndarray:
        """Return the finite values of a metric."""
        values = self.column(metric)[1]
        return values[np.isfinite(values)]

    def setting(self, dotted: str, default: int | None = None) -> Any:
        """Return a value of the configuration, such as ``mesh.pp``.

        With a default, it is returned for whatever is no positive integer.
        """
        value = self.files["config"]
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        is_size = isinstance(value, int) and value > 0
        return value if default is None or is_size else default

    def recent(self, metric: str) -> float | None:
        """Return the median of the last twentieth of a metric."""
        values = self.finite(metric)
        return float(np.median(values[-1 - len(values) // 20 :])) if len(values) else None

    def summary(self, metric: str) -> tuple[str, ...]:
        """Return a metric's name, its last and its least value, and where it has none."""
        steps, values = self.column(metric)
        at, gaps = np.flatnonzero(np.isfinite(values)), steps[np.isnan(values)]
        chosen = (at[-1], at[values[at].argmin()]) if len(at) else ()
        shown = [f"{_short(float(values[i]))} at step {steps[i]}" for i in chosen] or ["-", "-"]
        where = f"{len(gaps)} of {len(steps)} rows, step {gaps[0]} first" if len(gaps) else ""
        return metric, *shown, where

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind."""
        return [event for event in self.files["history"] if event.get("event") == kind]


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
    if len({run.name for run in read}) < len(read):
        for run, path in zip(read, runs, strict=True):
            run.name = str(path)
    page = Path("report.html") if out is None else Path(out)
    if out is None and len(read) == 1:
        page = read[0].folder / page
    if page.suffix not in (".html", ".htm"):
        raise ValueError(f"{page} would not open in a browser; name a file, such as report.html.")
    title = _text(" | ".join(run.name for run in read))
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
    require("matplotlib.figure", extra="plot")
    run = Run.read(Path(metrics_path))
    if not (losses := _losses(run)):
        raise ValueError(f"{metrics_path} has {len(run.rows)} rows and no finite loss in them.")
    figure = _figure(title or f"Loss of {run.name}", 8, 5.5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _draw_curves(above, [run], losses, "nats per target")
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
    require("matplotlib.figure", extra="plot")
    run = Run.read(Path(metrics_path))
    if not _layers(run):
        raise ValueError(
            f"{metrics_path} has no {LOAD}... in it. Log them: "
            "log.event(state, forgekit.run.expert_loads(state), show=False)."
        )
    figure = _loads_figure(run, title or f"Load of the experts of {run.name}")
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
        return f"{metrics}: " + "  ".join(f"{n} {run.finite(n)[-1]:.4f}" for n in _losses(run))

    def sample() -> str:
        tokenizer = load_tokenizer(tokens)
        text = write_sample(state, out, tokenizer, prompt, temperature=0.8, top_k=50)
        return f"sample ({out / 'samples'}):\n{text}"

    parts = {"losses": losses}
    if is_url(tokens) or (Path(tokens) / "tokenizer.json").exists():
        parts["sample"] = sample
    if process_rank() == 0:
        parts["loss curve"] = lambda: f"loss curve: {plot_losses(metrics, out / 'loss.png')}"
        if _layers(Run.read(out)):
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


def _body(runs: Sequence[Run]) -> Iterator[str]:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield f"<p>Made {now} by forgekit {version_of('forgekit')}.</p>"
    yield from (_note(note) for run in runs for note in run.notes)
    columns = [_headline(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    yield _table(["", *(run.name for run in runs)], rows)
    if find_spec("matplotlib") is None:
        yield _note('There are no charts: matplotlib is missing. pip install "forgekit[plot]"')
    else:
        yield from _charts(runs)
        yield from (part for run in runs for part in _diagrams(run))
    for run in runs:
        name = _text(run.name)
        for path in sorted((run.folder / "samples").glob("*.txt"))[-6:]:
            try:
                text = read_regular(path)[:2000].decode(errors="replace")
            except OSError as error:
                text = f"{path} cannot be read: {error}"
            yield f"<h3>{name}: {_text(path.stem)}</h3><pre>{_text(text)}</pre>"
        heads = ["metric", "last", "least", "not finite or too large to draw"]
        metrics = [metric for metric in run.names() if not metric.startswith(LOAD)]
        yield f"<h2>{name}: metrics</h2>{_table(heads, map(run.summary, metrics))}"
        events = [*run.files["history"], *run.files["config_changes"]]
        events.sort(key=lambda event: str(event.get("time")))
        yield f"<h2>{name}: what happened</h2>{_listed(events)}"
        if bad := run.files["bad_steps"]:
            yield f"<h3>Bad steps: {len(bad)}</h3>{_listed(bad)}"
            yield "<p><code>forgekit replay RUN --script FILE</code> looks at one again.</p>"
    yield from _configuration(runs)


def _headline(run: Run) -> dict[str, str]:
    """The numbers that one looks for first, by name; "-" where a run does not have one."""
    status, starts = run.files["status"], run.events("started")
    last = starts[-1] if starts else {}
    step = max((row["step"] for row in run.rows), default=status.get("step", 0))
    state = status.get("status", "-")
    if state == "running" and not is_locked(run.folder / ".lock"):
        state = "killed: no process holds the run"
    at = f"step {step} of {run.setting('steps') or '?'}", status.get("reason"), status.get("time")
    best = [(run.finite(name).min(), name) for name in _losses(run) if name != "train/loss"]
    seconds = _over_steps(run, "perf/step_seconds")
    waiting = _over_steps(run, "perf/data_wait_seconds") / max(seconds, 1e-9)
    in_steps = timedelta(seconds=round(seconds))
    peak = run.finite("memory/peak_gib")
    mfu = run.recent("perf/mfu")
    return {
        "status": f"{state}; {', '.join(str(one) for one in at if one)}",
        "parameters": _short(last.get("parameters")),
        "devices": f"{last.get('ranks', '?')} x {last.get('device', '?')}",
        "loss": f"{_short(run.recent('train/loss'))}, median of the last twentieth",
        "best evaluation": "{:.4g} ({})".format(*min(best)) if best else "-",
        "targets seen": _short(_over_steps(run, "train/targets") or None),
        "targets per second": _short(run.recent("perf/tokens_per_second")),
        "MFU": "-" if mfu is None else f"{mfu:.1%}",
        "time in steps": f"{in_steps}, {waiting:.1%} waiting for data",
        "starts": str(len(starts)),
        "peak memory": f"{peak.max():.3g} GiB" if len(peak) else "-",
        "bad steps": str(len(_bad_steps(run))),
    }


def _charts(runs: Sequence[Run]) -> Iterator[str]:
    """Charts of what has two finite values; of several runs one for each metric."""
    names = sorted({name for run in runs for name in run.names()}, key=_by_number)
    names = [n for n in names if not NOT_DRAWN.fullmatch(n)]
    left = [n for n in names if max(len(run.finite(n)) for run in runs) > 1]
    for title, unit, pattern, axis in TOPICS:
        matching = [n for n in left if re.fullmatch(pattern, n)]
        left = [n for n in left if n not in matching]
        is_one, is_wide = title and len(runs) == 1, title == "Loss"
        for some in [matching[:MOST_CURVES]] if is_one and matching else [[n] for n in matching]:
            figure = _figure(title if is_one else some[0], *((11, 3.4) if is_wide else (6, 3)))
            axes = figure.subplots()
            _draw_curves(axes, runs, some, unit, axis)
            if is_wide and is_one:
                _draw_marks(axes, runs[0])
            yield _svg(figure, "" if is_wide else "half")
        if is_one and (rest := matching[MOST_CURVES:]):
            yield f"<p>Not drawn: {_text(', '.join(rest))}.</p>"


def _configuration(runs: Sequence[Run]) -> Iterator[str]:
    """Of one run first the keys that its command set, of several those that differ."""
    flat = [dict(_flat(run.files["config"])) for run in runs]
    rows = {key: [one.get(key, "") for one in flat] for one in flat for key in one}
    first = [key for key, values in rows.items() if len({*values}) > 1]
    if len(runs) == 1:
        arguments = [a for e in runs[0].events("started")[-1:] for a in e.get("arguments", ())]
        given = tuple(str(a).lstrip("-").partition("=")[0] + "." for a in arguments)
        first = [key for key in rows if f"{key}.".startswith(given)]
    rest = [key for key in rows if key not in first]
    here, folded = (
        _table(["key", *(run.name for run in runs)], ([key, *rows[key]] for key in keys))
        for keys in (first, rest)
    )
    others = "others, as by default" if len(runs) == 1 else "equal keys"
    yield f"<h2>Configuration</h2>{here}"
    yield f"<details><summary>{len(rest)} {others}</summary>{folded}</details>"


# Drawing


def _figure(title: str, width: float, height: float) -> Figure:
    # Not pyplot: it keeps figures, and a window system, in global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
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


def _draw_curves(
    axes: Axes, runs: Sequence[Run], names: Sequence[str], unit: str, axis: str = ""
) -> None:
    """Each row, pale where there are many, and the median over a window."""
    trends = []
    for run, name in ((run, name) for name in names for run in runs if len(run.finite(name))):
        steps, values = run.column(name)
        at, trend = _trend(values)
        style = {"marker": "o", "ms": 3} if len(steps) < FEW else {}
        (line,) = axes.plot(steps, values, lw=0.7, alpha=0.3, **style)
        label = _clean(name if len(runs) == 1 else run.name)
        axes.plot(steps[at], trend, color=line.get_color(), label=label)
        trends.append(trend)
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.locator_params(axis="x", integer=True)
    axes.grid(color="#e4e6ea")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    values = np.concatenate([run.finite(name) for run in runs for name in names])
    least, most = values.min(), values.max()
    if axis == "log" and 0 < 10 * least < most:
        axes.set_yscale("log")
        return
    if axis == "zero":
        axes.set_ylim(min(0.0, least), None)
    # A few rows far above all others would flatten everything else.
    middle, high = np.percentile(values, [50, 98])
    limit = max(np.nanmax(np.concatenate(trends)), middle + 6 * (high - middle))
    if most > limit > least:
        axes.set_ylim(least - 0.04 * (limit - least), limit)
        count = (values > limit).sum()
        axes.set_title(f"{count} rows above, the largest {_short(float(most))}", fontsize=8)


def _draw_marks(axes: Axes, run: Run) -> None:
    """Steps at which something happened: lines, and bad steps at the lower edge."""
    for steps, color, label in (
        ([event.get("step") for event in run.events("started")[1:]], "gray", "started again"),
        ([event.get("step") for event in run.events("rolled_back")], "purple", "rolled back"),
        (_phases(run), "black", "phase"),
    ):
        for number, step in enumerate(filter(None, steps)):
            axes.axvline(step, color=color, ls="--", lw=0.8, label="" if number else label)
    if bad := sorted(_bad_steps(run)):
        style = {"color": "crimson", "ms": 14, "mew": 2, "clip_on": False, "label": "bad step"}
        axes.plot(bad, [0] * len(bad), "|", transform=axes.get_xaxis_transform(), **style)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _diagrams(run: Run) -> Iterator[str]:
    """Loads of experts, the pipeline's clock, and a mask that is more than causal."""
    if _layers(run):
        yield _svg(_loads_figure(run, f"{run.name}: load of each expert"))
    if run.setting("mesh.pp", 1) > 1:
        yield _pipeline(run)
    if run.setting("data.doc_ids") is True:
        ends = np.searchsorted([10, 18], np.arange(24), side="right")
        mask = np.tril(ends[:, None] == ends)
        figure = _figure("Who attends to whom, of three documents in a row", 6, 4.5)
        axes = figure.subplots()
        axes.imshow(mask, cmap="Blues")
        axes.set(xlabel="key position", ylabel="query position")
        yield _svg(figure, "half")


def _layers(run: Run) -> list[str]:
    return [name for name in run.names() if name.startswith(LOAD)]


def _loads_figure(run: Run, title: str) -> Figure:
    """A panel for each layer: experts over steps, tokens over their mean as a color."""
    layers = _layers(run)
    figure = _figure(title, 11, 1.5 + len(layers))
    from matplotlib.colors import LogNorm

    panels = figure.subplots(len(layers), 1, sharex=True, squeeze=False)[:, 0]
    style = {"cmap": "RdBu_r", "norm": LogNorm(1 / MOST_LOAD, MOST_LOAD)}
    for axes, layer in zip(panels, layers, strict=True):
        rows = [row for row in run.rows if isinstance(row.get(layer), list)]
        rows = [row for row in rows if len(row[layer]) == len(rows[-1][layer])]
        loads = np.array([[_number(load) for load in row[layer]] for row in rows]).T
        loads = np.maximum(loads, 1e-6)  # a logarithm has no 0
        area = (rows[0]["step"], rows[-1]["step"] + 1, len(loads) - 0.5, -0.5)  # a row is a column
        axes.imshow(loads, extent=area, aspect="auto", interpolation="nearest", **style)
        axes.set_ylabel(_clean(layer.removeprefix(LOAD).removesuffix(".feed_forward")), fontsize=8)
        axes.locator_params(integer=True)
    panels[-1].set_xlabel("optimizer step")
    scale = figure.colorbar(panels[0].images[0], ax=panels, extend="both")
    scale.set_ticks([1 / MOST_LOAD, 1, MOST_LOAD], labels=["idle: 1/4", "even", "4 times the mean"])
    scale.minorticks_off()
    return figure


def _pipeline(run: Run) -> str:
    """Who works on what in a step, on a simulated clock: stages cost the same, messages nothing."""
    from forgekit.parallel.pipeline.schedule import timeline

    stages, schedule = run.setting("mesh.pp"), run.setting("pipeline_schedule") or "1f1b"
    ranks = [event["ranks"] for event in run.events("started") if "ranks" in event] or [stages]
    sharing = math.prod(run.setting(f"mesh.{name}", 1) for name in ("pp", "cp", "tp"))
    rows = run.setting("batch_size", 1) * max(ranks[-1] // sharing, 1)
    count = max(run.setting("global_batch_size", 2 * stages * rows) // rows, 1)
    if count * stages > 512:
        return _note(f"{count} micro-batches on {stages} stages are too many to draw.")
    clock = timeline(schedule, stages, count)
    title = f"Pipeline {schedule}, {count} micro-batches, simulated: bubble {clock.bubble:.1%}"
    figure = _figure(f"{run.name}: {title}", 11, 1.4 + stages / 4)
    axes = figure.subplots()
    kinds = {"F": "forward", "B": "backward", "I": "to inputs", "W": "to weights"}
    for kind, color in zip(
        kinds, ("tab:blue", "tab:green", "tab:olive", "tab:orange"), strict=True
    ):
        for number, i in enumerate(i for i in clock.intervals if i.work.kind == kind):
            span, label = (i.start, i.end - i.start), "" if number else kinds[kind]
            place = (i.rank - 0.45, 0.9)
            axes.broken_barh([span], place, color=color, edgecolor="white", label=label)
    axes.invert_yaxis()
    axes.set(xlabel="time, in forward passes of one stage", ylabel="rank")
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    return _svg(figure)


# Numbers


def _number(value: Any) -> float:
    """A number that can be drawn, else NaN."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < LARGEST else math.nan


def _losses(run: Run) -> list[str]:
    """Losses with a finite value, that of training first."""
    names = [n for n in run.names() if re.fullmatch("train/loss|eval/.+/loss", n)]
    return [n for n in sorted(names, key="train/loss".__ne__) if len(run.finite(n))]


def _bad_steps(run: Run) -> set[int]:
    """Steps in ``bad_steps.jsonl``; without it rows that count some."""
    steps, skipped = run.column("train/skipped")
    listed = {bad["step"] for bad in run.files["bad_steps"] if isinstance(bad.get("step"), int)}
    return listed or {int(step) for step in steps[skipped > 0]}


def _phases(run: Run) -> Iterator[float]:
    """Steps at which the phases of the configuration begin."""
    steps, samples = run.column("samples")
    for phase in run.setting("phases") or ():
        at = np.interp(phase.get("start", 0), [0, *samples], [0, *steps])
        yield float(phase.get("step", at))


def _over_steps(run: Run, metric: str) -> float:
    """A number of each step, summed over all steps up to the last row."""
    steps, values = run.column(metric)
    return float(np.nansum(values * np.diff(steps, prepend=min([0, *steps[:1]]))))


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


# Text


def _table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>\n"


def _listed(records: Sequence[Mapping[str, Any]]) -> str:
    """The last records as a table of all their keys."""
    keys = list(dict.fromkeys(key for record in records[-EVENTS:] for key in record))
    rows = ([_short(record.get(key)) for key in keys] for record in records[-EVENTS:])
    return _table(keys, rows)


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _text(value: object) -> str:
    return escape(_clean(value))


def _clean(value: object) -> str:
    """Text without characters that HTML and fonts do not have."""
    return NOT_TEXT.sub("\ufffd", str(value))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _short(value)
