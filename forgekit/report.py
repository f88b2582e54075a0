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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from forgekit.data.tokenizer import load_tokenizer
from forgekit.environment import require
from forgekit.evaluation.generate import write_sample
from forgekit.files import is_locked, open_regular, write_atomic
from forgekit.mesh import process_rank
from forgekit.metrics.hooks import LOAD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from forgekit.state import TrainState

TOPICS: tuple[tuple[str, str, str, str, frozenset[str]], ...] = (
    ("Training", "Learning rate", "", "train/lr", frozenset({"zero"})),
    ("Training", "Gradient norm before clipping", "L2", "train/grad_norm", frozenset({"log"})),
    ("Training", "Gradient norm by layer", "L2", "grad_norm/.+", frozenset({"log"})),
    ("Training", "Evaluation", "nats per target", "eval/.+/loss", frozenset()),
    ("Training", "Evaluation: bits per byte", "", "eval/.+/bits_per_byte", frozenset()),
    ("Training", "Evaluation: the rest", "", "eval/.+", frozenset()),
    ("Speed", "Targets per second", "", "perf/tokens_per_second.*", frozenset({"zero"})),
    ("Speed", "Seconds per step", "s", "perf/.*seconds.*", frozenset({"log"})),
    ("Speed", "Model FLOP utilisation", "share of the peak", "perf/mfu.*", frozenset()),
    ("Speed", "Memory", "GiB", "memory/.+", frozenset({"zero"})),
    ("Sources", "Loss by source", "nats per target", "source/.+/loss", frozenset()),
    ("Sources", "Targets by source", "per step", "source/.+/targets", frozenset({"zero"})),
    ("Experts", "Routers", "", "moe/[^/]+", frozenset({"log"})),
    ("Other metrics", "", "", ".+", frozenset()),
)
"""Section, title, unit and pattern of charts; a metric is in the first that its name matches."""

NOT_DRAWN = re.compile(
    "step|samples|train/(loss|loss_mean|targets|skipped|skipped_in_a_row|spikes)|moe/load/.+"
    "|eval/.+/(perplexity|targets)"
)
NOT_TEXT = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MOST_CURVES = 8
LARGEST = 1e100
"""Numbers beyond are not drawn: an axis around them shows nothing else, or overflows."""
FEW = 20
"""Rows from which on a trend is drawn over them."""
COLUMNS = 500
"""Points of a curve; of each column of a longer one the lowest and the highest value."""
EVENTS = 50
MOST_LAYERS = 24
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
    def read(cls, path: Path, name: str) -> Run:
        """Read a run directory, or a file of metrics alone.

        Raises:
            ValueError: If there is neither a row nor a status.
        """
        folder, file = (path, path / "metrics.jsonl") if path.is_dir() else (path.parent, path)
        run = cls(name, folder)
        run.rows = [row for row in run._lines(file) if isinstance(row.get("step"), int)]
        for jsonl in ("history", "bad_steps", "config_changes"):
            run.files[jsonl] = run._lines(folder / f"{jsonl}.jsonl")
        for one in ("config", "status"):
            content = run._lines(folder / f"{one}.json", whole=True)
            run.files[one] = content[0] if content else {}
        if not run.rows and not run.files["status"]:
            raise ValueError(
                f"{path} has no row of metrics and no status.json. {' '.join(run.notes)} Name a "
                "run directory, what a recipe's out= was, or a metrics.jsonl."
            )
        return run

    def column(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return steps and values of a metric, NaN where a row says null or a huge number."""
        pairs = [(row["step"], row[metric]) for row in self.rows if metric in row]
        values = np.array([_number(value) for _, value in pairs])
        return np.array([step for step, _ in pairs]), values

    def finite(self, metric: str) -> np.ndarray:
        """Return the finite values of a metric."""
        values = self.column(metric)[1]
        return values[np.isfinite(values)]

    def setting(self, dotted: str) -> Any:
        """Return a value of the configuration, such as ``mesh.pp``; None without it."""
        value = self.files["config"]
        for part in dotted.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def is_killed(self) -> bool:
        """Whether ``status.json`` says "running" and no process holds the run."""
        is_running = self.files["status"].get("status") == "running"
        return is_running and not is_locked(self.folder / ".lock")

    def _lines(self, path: Path, *, whole: bool = False) -> list[dict[str, Any]]:
        """The JSON objects of a file, or the one that it is; of what is broken, a note."""
        try:
            with open_regular(path) as file:
                content = file.read()
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            self.notes.append(f"{path} is left out, it cannot be read: {error}")
            return []
        records, broken = [], []
        for number, line in enumerate([content] if whole else content.splitlines(), start=1):
            try:
                records.append(json.loads(line))
                if not isinstance(records[-1], dict):
                    raise ValueError(f"a {type(records.pop()).__name__} where an object belongs")
            except (ValueError, RecursionError):
                broken.append(f"line {number} is {line[:60].decode(errors='replace')!r}")
        if broken:
            self.notes.append(f"{len(broken)} lines of {path} are left out; {broken[0]}.")
        return records


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
        ValueError: If a path is no run, or one stands twice.
        OSError: If the page cannot be written.
    """
    paths = [Path(run) for run in runs]
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path} is not there. Name a run directory: what out= was.")
    full = [(p if p.is_dir() else p.parent).resolve() for p in paths]
    if len({*full}) < len(full):
        raise ValueError(f"{', '.join(map(str, runs))}: a run stands twice; name each once.")
    depth = next(d for d in range(1, 99) if len({f.parts[-d:] for f in full}) == len(full))
    read = [Run.read(path, "/".join(f.parts[-depth:])) for path, f in zip(paths, full, strict=True)]
    page = Path(out) if out is not None else Path("report.html")
    page = read[0].folder / "report.html" if out is None and len(read) == 1 else page
    if page.is_dir() or page.suffix not in (".html", ".htm"):
        raise ValueError(f"{page} would not open in a browser; name a file, such as report.html.")
    title = escape(" | ".join(_clean(run.name) for run in read))
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
    run = Run.read(Path(metrics_path), Path(metrics_path).absolute().parent.name)
    losses = [name for name in _losses([run]) if len(run.finite(name))]
    if not losses:
        raise ValueError(
            f"{metrics_path} has {len(run.rows)} rows and no finite loss in them, so there is "
            "nothing to draw. Train for at least one logged step."
        )

    def draw(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        _draw_curves(above, [run], losses, "nats per target")
        above.set_xlabel("")
        below.plot(*run.column("train/lr"), color="gray")
        below.set(ylabel="learning rate", xlabel="optimizer step", ylim=(0, None))

    return _write_png(_figure(draw, 8, 5.5, title or f"Loss of {run.name}"), png_path)


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
    run = Run.read(Path(metrics_path), Path(metrics_path).absolute().parent.name)
    if not (layers := _layers(run)):
        raise ValueError(
            f"{metrics_path} has no {LOAD}... in it. Log them: "
            "log.event(state, forgekit.run.expert_loads(state), show=False)."
        )
    title = title or f"Load of the experts of {run.name}"
    return _write_png(_loads_figure(run, layers, title), png_path)


def wrap_up(state: TrainState, out: str | os.PathLike[str], tokens: Path, *, prompt: str) -> str:
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
    out = Path(out)
    metrics = out / "metrics.jsonl"

    def losses() -> str:
        run = Run.read(out, out.name)
        last = {name: run.finite(name)[-1:] for name in _losses([run])}
        shown = (f"{name} {value[0]:.4f}" for name, value in last.items() if len(value))
        return f"{metrics}: {'  '.join(shown)}"

    def sample() -> str:
        tokenizer = load_tokenizer(tokens)
        text = write_sample(state, out, tokenizer, prompt, temperature=0.8, top_k=50)
        return f"sample ({out / 'samples'}):\n{text}"

    def loads() -> str:
        if not _layers(Run.read(out, out.name)):
            return ""
        return f"loads of experts: {plot_expert_loads(metrics, out / 'expert_loads.png')}"

    parts: dict[str, Callable[[], str]] = {"losses": losses}
    if (tokens / "tokenizer.json").exists():
        parts["sample"] = sample
    if process_rank() == 0:
        parts["loss curve"] = lambda: f"loss curve: {plot_losses(metrics, out / 'loss.png')}"
        parts |= {"loads": loads, "report": lambda: f"report: {write_report([out])}"}
    lines = []
    for name, make in parts.items():
        try:
            lines.append(make())
        except Exception as error:  # a tokenizer, a drawing library and a disk fail in their ways
            lines.append(f"no {name}: {error}")
    return "\n".join(filter(None, lines))


# The page


def _body(runs: Sequence[Run]) -> Iterator[str]:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield f"<p>Made {now} by forgekit {version_of('forgekit')}.</p>"
    for run in runs:
        yield from (_note(text) for text in [*run.notes, *_gaps(run)])
    numbers = [_headline(run) for run in runs]
    rows = [[name, *(n[name] for n in numbers)] for name in numbers[0]]
    yield _table(["", *(run.name for run in runs)], rows)
    if find_spec("matplotlib") is None:
        yield _note('There are no charts: matplotlib is missing. pip install "forgekit[plot]"')
    else:
        yield from _charts(runs)
        yield from (part for run in runs for part in _diagrams(run, runs))
    yield from _single_values(runs)
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        for path in sorted((run.folder / "samples").glob("*.txt"))[-6:]:
            yield f"<h3>{_text(prefix + path.stem)}</h3><pre>{_text(_sample_text(path))}</pre>"
        yield from _events(run, prefix)
    yield from _configuration(runs)


def _headline(run: Run) -> dict[str, str]:
    """The numbers that one looks for first, by name; "-" where a run does not have one."""
    status, history = run.files["status"], run.files["history"]
    started = [event for event in history if event.get("event") == "started"]
    last = started[-1] if started else {}
    step = max((row["step"] for row in run.rows), default=status.get("step", 0))
    total = run.setting("steps")
    said = "killed: no process holds the run" if run.is_killed() else status.get("status", "-")
    at = [f"step {step}" + (f" of {total}" if isinstance(total, int) else "")]
    at += [str(status[key]) for key in ("reason", "time") if status.get(key)]
    loss, tokens = run.finite("train/loss"), run.finite("perf/tokens_per_second")
    mfu, peak = run.finite("perf/mfu"), run.finite("memory/peak_gib")
    steps, targets = run.column("train/targets")
    seconds = run.column("perf/step_seconds")
    waited = np.nansum(run.column("perf/data_wait_seconds")[1]) / max(np.nansum(seconds[1]), 1e-9)
    evaluations = [name for name in _losses([run])[1:] if len(run.finite(name))]
    best = min(((run.finite(name).min(), name) for name in evaluations), default=None)
    half = min(len(loss), 1 + len(loss) // 20)
    bad = len(_bad_steps(run))
    times = f"{len(started)} starts" if len(started) > 1 else ""
    return {
        "status": f"{said}; {', '.join(at)}",
        "parameters": _short(last.get("parameters")),
        "devices": f"{last['ranks']} x {last.get('device', '?')}" if "ranks" in last else "-",
        "loss": f"{_short(float(np.median(loss[-half:])))}, median of {half} rows; last "
        f"{_short(float(loss[-1]))}"
        if len(loss)
        else "-",
        "best evaluation": "-" if best is None else f"{_short(float(best[0]))} ({best[1]})",
        "targets seen": _short(_over_steps(steps, targets)),
        "targets per second": _short(float(np.median(tokens[-half:]))) if len(tokens) else "-",
        "MFU": f"{mfu[-1]:.1%}" if len(mfu) else "-",
        "time in steps": f"{_duration(_over_steps(*seconds))}, {waited:.1%} waiting for data",
        "wall time": ", ".join(filter(None, [_duration(_wall_seconds(run)), times])),
        "peak memory": _size(float(peak.max())) if len(peak) else "-",
        "bad steps": str(bad),
    }


def _charts(runs: Sequence[Run]) -> Iterator[str]:
    """The charts by section; for several runs one for each metric."""
    yield "<h2>Training</h2>"
    section, names = "Training", _names(runs)
    losses = _losses(runs) if len(runs) == 1 else ["train/loss"]
    if any(len(run.finite(name)) for run in runs for name in losses):
        yield _curves(runs, losses, "Loss", "nats per target", frozenset({"marks"}))
    used = {*losses} if len(losses) > 2 else {"train/loss"}
    for heading, title, unit, pattern, options in TOPICS:
        matching = [n for n in names if n not in used and re.fullmatch(pattern, n)]
        used |= {*matching}
        if matching and heading != section:
            section = heading
            yield f"<h2>{heading}</h2>"
        together = len(runs) == 1 and bool(title)
        for some in [matching[:MOST_CURVES]] if together else [[n] for n in matching[:24]]:
            if some:
                name = some[0] if len(some) == 1 and (not title or not together) else title
                yield _curves(runs, some, name, unit, options)
        if left := matching[MOST_CURVES if together else 24 :]:
            yield f"<p>Not drawn: {_text(', '.join(left[:50]))}.</p>"


def _curves(
    runs: Sequence[Run], names: Sequence[str], title: str, unit: str, options: frozenset[str]
) -> str:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _draw_curves(axes, runs, names, unit, options)
        if len(runs) == 1:
            _draw_marks(axes, runs[0], with_bad="marks" in options or "log" in options)

    if "marks" in options:
        return _svg(_figure(draw, 11, 3.4, title))
    return _svg(_figure(draw, 6, 3, title)).replace("<svg", '<svg class="half"', 1)


def _names(runs: Sequence[Run]) -> list[str]:
    """Metrics that have a curve: two finite values or more in a run."""
    names = {name for run in runs for row in run.rows for name in row}
    drawn = [name for name in names if not NOT_DRAWN.fullmatch(name)]
    return sorted((n for n in drawn if any(len(r.finite(n)) > 1 for r in runs)), key=_by_number)


def _single_values(runs: Sequence[Run]) -> Iterator[str]:
    """Evaluations, and what was logged once and so has no chart, as a table."""
    names = sorted({n for run in runs for row in run.rows for n in row}, key=_by_number)
    rows = []
    for run in runs:
        for name in names:
            steps, values = run.column(name)
            is_shown = name.startswith("eval/") or not NOT_DRAWN.fullmatch(name)
            if is_shown and (name.startswith("eval/") or len(run.finite(name)) == 1):
                at = np.flatnonzero(np.isfinite(values))
                if len(at):
                    best, last = int(at[values[at].argmin()]), int(at[-1])
                    cells = (f"{_short(float(values[i]))} at step {steps[i]}" for i in (last, best))
                    rows.append([run.name, name, *cells])
    if rows:
        table = _table(["run", "metric", "last", "least"], rows)
        yield f"<h2>Evaluations, and what was logged once</h2>{table}"


def _events(run: Run, prefix: str) -> Iterator[str]:
    rows = []
    for event in [*run.files["history"], *run.files["config_changes"]]:
        known = ("event", "time", "step", "samples")
        rest = ", ".join(f"{k} {_value(v)}" for k, v in event.items() if k not in known and v)
        name = str(event.get("event", "configuration")).replace("_", " ")
        rows.append([event.get("time", ""), event.get("step", ""), name, rest])
    rows.sort(key=lambda row: str(row[0]))
    if rows:
        table = _table(["time", "step", "what", ""], rows[-EVENTS:])
        yield f"<h2>{_text(prefix)}What happened</h2>{table}"
    if bad := run.files["bad_steps"]:
        keys = ("step", "spike", "loss", "grad_norm", "samples", "sources", "rows")
        table = _table(keys, [[_value(one.get(key)) for key in keys] for one in bad[-EVENTS:]])
        yield f"<h3>{_text(prefix)}Bad steps: {len(bad)}</h3>{table}"
        yield "<p><code>forgekit replay RUN --script FILE</code> looks at one again.</p>"


def _configuration(runs: Sequence[Run]) -> Iterator[str]:
    """Of one run first the keys that its command set, of several those that differ."""
    flat = [dict(_flat(run.files["config"])) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    if len(runs) == 1:
        starts = [e for e in runs[0].files["history"] if e.get("event") == "started"]
        arguments = starts[-1].get("arguments", []) if starts else []
        set_here = {str(a).lstrip("-").partition("=")[0] for a in arguments}
        first = [key for key in keys if any(f"{key}.".startswith(f"{s}.") for s in set_here)]
    else:
        first = [key for key in keys if len({one.get(key) for one in flat}) > 1]
    if keys:
        heads = ["key", *(run.name for run in runs)]
        rows = {key: [key, *(one.get(key, "") for one in flat)] for key in keys}
        yield "<h2>Configuration</h2>"
        if first:
            yield _table(heads, [rows[key] for key in first])
        rest = _table(heads, [rows[key] for key in keys if key not in first])
        others = "others, as by default" if len(runs) == 1 else "equal keys"
        yield f"<details><summary>{len(keys) - len(first)} {others}</summary>{rest}</details>"


# Drawing


def _figure(draw: Callable[[Figure], None], width: float, height: float, title: str) -> Figure:
    require("matplotlib.figure", extra="plot")
    # Not pyplot: it keeps figures, and a window system, in global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    draw(figure)
    figure.suptitle(_clean(title), fontsize=11, parse_math=False)
    for axes in figure.axes:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    picture = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "forgekit"}):
        figure.savefig(picture, format="svg", metadata={"Date": None})
    return "<svg" + picture.getvalue().partition("<svg")[2]


def _write_png(figure: Figure, path: str | os.PathLike[str]) -> Path:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, picture.getvalue())
    return Path(path)


def _draw_curves(
    axes: Axes,
    runs: Sequence[Run],
    names: Sequence[str],
    unit: str,
    options: frozenset[str] = frozenset(),
) -> None:
    """Rows as points where they are few; else pale, with their median over a window."""
    everything, trends = [], []
    for run in runs:
        for name in names:
            steps, values = run.column(name)
            if not np.isfinite(values).any():
                continue
            label = name if len(runs) == 1 else run.name
            everything.append(values[np.isfinite(values)])
            if len(steps) < FEW or name.startswith("eval/") or "zero" in options:
                trends.append(everything[-1])
                style = "o-" if len(steps) < 3 * FEW else "-"
                axes.plot(*_thin(steps, values), style, ms=3, lw=1.2, label=_clean(label))
                continue
            (line,) = axes.plot(*_thin(steps, values), lw=0.7, alpha=0.3)
            trends.append(_trend(values))
            axes.plot(
                steps[_sampled(len(steps))], trends[-1], color=line.get_color(), label=_clean(label)
            )
    values, steady = np.concatenate(everything), np.concatenate(trends)
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.locator_params(axis="x", integer=True)
    axes.grid(color="#e4e6ea")
    if len(names) * len(runs) > 1:
        axes.legend(frameon=False, fontsize=8)
    if "log" in options and values.min() > 0 and values.max() > 10 * values.min():
        axes.set_yscale("log")
        return
    if "zero" in options:
        axes.set_ylim(min(0.0, values.min()), None)
    # A few rows far above all others would flatten everything else.
    middle, most = np.percentile(values, [50, 98])
    limit = max(np.nanmax(steady), middle + 6 * (most - middle))
    if values.max() > limit > values.min():
        axes.set_ylim(values.min() - 0.04 * (limit - values.min()), limit)
        largest = _short(float(values.max()))
        axes.set_title(f"{(values > limit).sum()} rows above, the largest {largest}", fontsize=8)


def _draw_marks(axes: Axes, run: Run, *, with_bad: bool) -> None:
    history = [event for event in run.files["history"] if isinstance(event.get("step"), int)]
    starts = [e["step"] for e in history if e["event"] == "started"][1:]
    back = [e["step"] for e in history if e["event"] == "rolled_back"]
    for steps, color, label in (
        (starts, "gray", "started again"),
        (back, "purple", "rolled back"),
        (_phases(run), "black", "phase"),
    ):
        for index, step in enumerate(steps[-200:]):
            axes.axvline(step, color=color, ls="--", lw=0.8, label="" if index else label)
    if with_bad and (bad := sorted(_bad_steps(run))[-200:]):
        across = axes.get_xaxis_transform()
        style = {"color": "crimson", "ms": 14, "mew": 2, "clip_on": False, "label": "bad step"}
        axes.plot(bad, [0] * len(bad), "|", transform=across, **style)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)


def _diagrams(run: Run, runs: Sequence[Run]) -> Iterator[str]:
    """Loads of experts, the pipeline's clock, and a mask that is more than causal."""
    prefix = f"{run.name}: " if len(runs) > 1 else ""
    if layers := _layers(run):
        yield _svg(_loads_figure(run, layers, f"{prefix}Load of each expert"))
    layout = _layout(run)
    if 1 < layout["pp"] <= 64:
        yield _pipeline(run, layout, prefix)
    if run.setting("data.doc_ids") is True or 1 < layout["cp"] <= 8:
        yield _svg(_figure(partial(_draw_mask, run, layout["cp"]), 4, 4.2, "Who attends to whom"))


def _layers(run: Run) -> list[str]:
    return sorted({n for row in run.rows for n in row if n.startswith(LOAD)}, key=_by_number)


def _loads_figure(run: Run, layers: Sequence[str], title: str) -> Figure:
    shown = [layers[int(i)] for i in _sampled(len(layers), MOST_LAYERS)]
    columns = math.ceil(math.sqrt(len(shown)))
    lines = math.ceil(len(shown) / columns)

    def draw(figure: Figure) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm

        norm = LogNorm(1 / MOST_LOAD, MOST_LOAD)
        panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        for axes, layer in zip(panels.flat, shown, strict=False):
            rows = [row for row in run.rows if isinstance(row.get(layer), list)]
            rows = [row for row in rows if len(row[layer]) == len(rows[-1][layer])]
            loads = np.array([[_number(x) for x in row[layer]] for row in rows]).T
            # Steps are as far apart as rows were logged, so each row has a column of its own.
            axes.pcolormesh(
                _edges([row["step"] for row in rows]),
                np.arange(len(loads) + 1) - 0.5,
                np.maximum(loads, 1e-6),  # a logarithm has no 0
                cmap="RdBu_r",
                norm=norm,
                rasterized=True,
            )
            name = layer.removeprefix(LOAD).removesuffix(".feed_forward")
            axes.set_title(_clean(name), fontsize=9)
            axes.locator_params(integer=True)
        for axes in panels.flat[len(shown) :]:
            axes.set_visible(False)
        figure.supxlabel("optimizer step")
        figure.supylabel("expert")
        ticks = [1 / MOST_LOAD, 1, MOST_LOAD]
        colors = ScalarMappable(norm, "RdBu_r")
        scale = figure.colorbar(colors, ax=panels, extend="both", ticks=ticks)
        scale.minorticks_off()
        scale.ax.set_yticklabels(["idle: 1/4", "even", "4 times the mean"])

    return _figure(draw, max(8, 2 * columns), max(4.5, 1.5 * lines + 1), title)


def _edges(steps: Sequence[int]) -> list[int]:
    """Where columns of the picture begin and end: each reaches back to the step before.

    Examples:
        >>> _edges([20, 25, 40])
        [15, 20, 25, 40]
    """
    width = steps[1] - steps[0] if len(steps) > 1 else 1
    return [steps[0] - width, *steps]


def _pipeline(run: Run, layout: Mapping[str, int], prefix: str) -> str:
    """Who works on what in a step, on a simulated clock: stages cost the same, messages nothing."""
    from forgekit.parallel.pipeline.timeline import timeline

    ranks, schedule = layout["pp"], run.setting("pipeline_schedule") or "1f1b"
    data_ranks = layout["dp_replicate"] * layout["dp_shard"]
    rows, batch = run.setting("global_batch_size"), run.setting("batch_size")
    count = run.setting("micro_batches")
    if count is None and isinstance(rows, int) and isinstance(batch, int) and batch > 0:
        count = rows // (batch * data_ranks)
    count = count if isinstance(count, int) and count > 0 else 2 * ranks
    if count * ranks > 512:
        return _note(f"{prefix}{count} micro-batches on {ranks} ranks are too many to draw.")
    try:
        clock = timeline(schedule, ranks, count)
    except (ValueError, KeyError) as error:
        return _note(f"No pipeline timeline: {error}")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        kinds = {"F": "forward", "B": "backward", "I": "to inputs", "W": "to weights"}
        colors = ("tab:blue", "tab:green", "tab:olive", "tab:orange")
        for (kind, label), color in zip(kinds.items(), colors, strict=True):
            for stage, alpha in ((0, 1.0), (1, 0.5)):  # paler: a rank's second stage
                work = [i for i in clock.intervals if i.work.kind == kind]
                work = [i for i in work if (i.work.stage >= ranks) == stage]
                for rank in {i.rank for i in work}:
                    spans = [(i.start, i.end - i.start) for i in work if i.rank == rank]
                    style = {"color": color, "alpha": alpha, "edgecolor": "white"}
                    axes.broken_barh(spans, (rank - 0.45, 0.9), **style)
                if work and not stage:
                    axes.plot([], [], "s", color=color, label=label)
        axes.invert_yaxis()
        axes.set(xlabel="time, in forward passes of one stage", ylabel="rank")
        axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))

    title = f"{prefix}Pipeline {schedule}, {count} micro-batches, simulated"
    title += f": bubble {clock.bubble:.1%}"
    return _svg(_figure(draw, 11, 1.4 + ranks / 4, title))


def _draw_mask(run: Run, cp: int, figure: Figure) -> None:
    import torch

    from forgekit.data.batch import slice_positions
    from forgekit.model.attention import document_mask

    size = 2 * cp * math.ceil(24 / (2 * cp))
    ends = torch.tensor([round(0.4 * size), round(0.8 * size)])
    ids = torch.bucketize(torch.arange(size), ends, right=True)[None]
    mask = document_mask(ids * (run.setting("data.doc_ids") is True))[0, 0].numpy()
    method = "zigzag" if (run.setting("context_parallel") or "ring") == "ring" else "contiguous"
    holder = np.zeros((size, 1))
    for rank in range(cp):
        holder[slice_positions(torch.arange(size), rank=rank, world=cp, method=method)] = rank
    axes = figure.subplots()
    axes.imshow(np.where(mask, holder, np.nan), cmap="tab10", vmin=0, vmax=9)
    colors = "; a color for each cp rank" if cp > 1 else ""
    axes.set(xlabel="key position", ylabel=f"query position{colors}")


def _layout(run: Run) -> dict[str, int]:
    """Sizes of the mesh; one that takes what is left follows from the ranks of the last start."""
    sizes = {name: run.setting(f"mesh.{name}") for name in ("pp", "dp_replicate", "cp", "tp")}
    known = {n: size if isinstance(size, int) and size > 0 else 1 for n, size in sizes.items()}
    shard = run.setting("mesh.dp_shard")
    ranks = [event["ranks"] for event in run.files["history"] if "ranks" in event]
    left = ranks[-1] // math.prod(known.values()) if ranks else 1
    return known | {"dp_shard": shard if isinstance(shard, int) and shard > 0 else max(left, 1)}


# Numbers


def _number(value: Any) -> float:
    """A number that can be drawn, else NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        return math.nan
    return float(value)


def _losses(runs: Sequence[Run]) -> list[str]:
    names = {name for run in runs for row in run.rows for name in row}
    return ["train/loss", *sorted(name for name in names if re.fullmatch("eval/.+/loss", name))]


def _gaps(run: Run) -> Iterator[str]:
    """Metrics with numbers that are not finite, in a sentence."""
    gaps = []
    for name in sorted({name for row in run.rows for name in row} - {"step"}):
        steps, values = run.column(name)
        if not name.startswith(LOAD) and np.isnan(values).any():
            missing = steps[np.isnan(values)]
            gaps.append(f"{name} in {len(missing)} of {len(steps)} rows, step {missing[0]} first")
    if gaps:
        yield f"{run.name}: not finite or too large to draw: {'; '.join(gaps[:6])}."


def _bad_steps(run: Run) -> set[int]:
    """Steps in ``bad_steps.jsonl``; without it rows that count some."""
    steps, skipped = run.column("train/skipped")
    listed = {bad["step"] for bad in run.files["bad_steps"] if isinstance(bad.get("step"), int)}
    return listed or {int(step) for step in steps[skipped > 0]}


def _phases(run: Run) -> list[float]:
    """Steps at which the phases of the configuration begin."""
    phases = run.setting("phases")
    phases = [p for p in phases if isinstance(p, dict)] if isinstance(phases, list) else []
    steps, samples = run.column("samples")
    starts = [
        float(np.interp(p["start"], [0, *samples], [0, *steps])) for p in phases if "start" in p
    ]
    return [float(p["step"]) for p in phases if "step" in p] + (starts if len(steps) else [])


def _over_steps(steps: np.ndarray, values: np.ndarray) -> float | None:
    """A number of each step, summed over all steps up to the last row."""
    if not np.isfinite(values).any():
        return None
    return float(np.nansum(values * np.diff(steps, prepend=min(0, steps[0]))))


def _wall_seconds(run: Run) -> float | None:
    """From each start to what was heard of it last, without the time between them."""
    total, began, last = 0.0, None, None
    now = {"event": "now", "time": run.files["status"].get("time")}
    for event in [*run.files["history"], now]:
        try:
            at = datetime.fromisoformat(str(event.get("time")))
        except ValueError:
            continue
        if event.get("event") == "started":
            total += (last - began).total_seconds() if began and last else 0.0
            began = at
        last = at
    return total + (last - began).total_seconds() if began and last else None


def _trend(values: np.ndarray) -> np.ndarray:
    """Centred median over a twentieth to each side: one spike does not lift it, as it lifts a mean.

    Towards the start, where a loss falls fastest, the window narrows to stay centred.
    """
    half = max(1, min(len(values) // 20, 250))
    finite = np.isfinite(values)
    medians = np.full(len(values), np.nan)
    for i in _sampled(len(values)):
        around = slice(i - min(i, half), i + min(i, half) + 1)
        if finite[i]:
            medians[i] = np.median(values[around][finite[around]])
    return medians[_sampled(len(values))]


def _sampled(count: int, most: int = COLUMNS) -> np.ndarray:
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _thin(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep of each column of a picture its lowest and its highest value: no spike is lost."""
    if len(steps) <= 2 * COLUMNS:
        return steps, values
    kept: set[int] = set()
    for part in np.array_split(np.arange(len(steps)), COLUMNS):
        finite = part[np.isfinite(values[part])]
        if not len(finite):
            kept.add(part[0])  # a gap stays one
            continue
        kept |= {finite[values[finite].argmin()], finite[values[finite].argmax()]}
    index = np.array(sorted(kept))
    return steps[index], values[index]


def _by_number(name: str) -> list[str | int]:
    """Order names as people do: numbers in them count as numbers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _duration(seconds: float | None) -> str:
    """Write seconds as people say them.

    Examples:
        >>> _duration(42.3), _duration(3723), _duration(200_000), _duration(None)
        ('42 s', '1 h 02 min', '2 d 7 h', '-')
    """
    if seconds is None:
        return "-"
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _size(gib: float) -> str:
    """Write a size in the unit that fits.

    Examples:
        >>> _size(12.345), _size(0.25)
        ('12.3 GiB', '256 MiB')
    """
    return f"{gib:.3g} GiB" if gib >= 1 else f"{gib * 1024:.3g} MiB"


def _short(value: Any) -> str:
    """Write a number for people.

    Examples:
        >>> _short(0.00031), _short(3.14159), _short(25000.0), _short(1.5e7), _short(None)
        ('0.00031', '3.142', '25,000', '15 M', '-')
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-"
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if size <= abs(value) < 1000 * size:
            return f"{value / size:.4g} {unit}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.4g}"


# Text


def _table(heads: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>\n"


def _note(text: str) -> str:
    return f'<p class="note">{_text(text)}</p>'


def _text(value: object) -> str:
    return escape(_clean(value))


def _clean(value: object) -> str:
    """Text without characters that HTML and fonts do not have."""
    return NOT_TEXT.sub("\ufffd", str(value))


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else _short(value)
    text = json.dumps(value) if text == "-" else text
    return text if len(text) <= 200 else f"{text[:200]}..."


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _value(value)


def _sample_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            text = file.read(8001).decode("utf-8", errors="replace")
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    return text if len(text) <= 2000 else f"{text[:2000]}..."
