"""A run's report: one self-contained HTML page; matplotlib draws the charts.

A run that was killed, still runs or has broken files has a page too: what cannot be read is noted.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from forgekit.checks import flat, parse_json
from forgekit.environment import require
from forgekit.files import is_locked, read_regular, write_atomic
from forgekit.remote.urls import Location, is_url
from forgekit.terminal import printable

if TYPE_CHECKING:
    from forgekit.state import TrainState

PathLike = str | os.PathLike[str]
LOSSES = "train/loss|eval/.+/loss"
CHARTS = MappingProxyType(
    {
        LOSSES: "Loss (nats per target)",
        "train/lr": "Learning rate",
        "train/grad_norm": "Gradient norm before clipping",
        "grad_norm/.+": "Gradient norm by layer",
        "perf/tokens_per_second.*": "Targets per second",
        "perf/.*seconds.*": "Seconds per step",
        "perf/mfu.*": "Model FLOP utilisation",
        "memory/.+": "Memory (GiB)",
        "source/.+/loss": "Loss by source (nats per target)",
        "source/.+/targets": "Targets by source, per step",
        "moe/[^/]+": "Routers of experts",
        "step|samples|train/(loss_mean|targets|skipped.*|spikes)|eval/.+/(perplexity|targets)": "",
    }
)
"""Patterns of metrics and the titles of their charts; all others get a chart each."""
LOAD = "moe/load/"
EMPTY = np.empty(0), np.empty(0)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline';
img-src data:"><style>body {{font: 15px/1.4 system-ui, sans-serif; max-width: 70rem; margin: auto;
padding: 1rem}} svg {{width: 100%; height: auto}} pre {{background: #f5f6f8; white-space: pre-wrap}}
td, th {{text-align: left; vertical-align: top; padding-right: .8rem; overflow-wrap: anywhere}}
</style></head><body><h1>{title}</h1>{body}</body></html>
"""


@attrs.define
class Run:
    """A run as read from its files; what they lack is empty, ``notes`` name what is unreadable.

    ``columns`` has the steps and values of each metric: ``[rows]``, or ``[rows e]`` of experts.
    """

    folder: Path
    notes: list[str] = attrs.field(factory=list)
    columns: dict[str, tuple[np.ndarray, ...]] = attrs.field(factory=dict)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run directory, or a file of metrics alone; raise if it has nothing to show."""
        run = cls(path if path.is_dir() else path.parent)
        columns: dict[str, list[tuple[int, Any]]] = {}
        for row in run.objects("metrics.jsonl" if path.is_dir() else path.name):
            for name, value in row.items() if isinstance(row.get("step"), int) else ():
                # Larger numbers would flatten a chart, or overflow.
                is_number = isinstance(value, int | float) and abs(value) < 1e100
                if is_number or (name.startswith(LOAD) and value):
                    columns.setdefault(name, []).append((row["step"], value))
        for name, pairs in columns.items():
            run.columns[name] = tuple(np.array(each, float) for each in zip(*pairs, strict=True))
        if not columns and not run.objects("status.json"):
            raise ValueError(
                f"{path} has no row and no status.json. {' '.join(run.notes)} Pass a run directory."
            )
        return run

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Read a file's JSON objects, one per line, or one in a ``.json``; note all others."""
        text, objects, broken = self.text(self.folder / name), [], []
        lines = io.StringIO(text) if name.endswith("l") else [text] if text else ()
        for number, line in enumerate(lines, start=1):
            try:
                objects.append({**parse_json(line)})
            except (ValueError, TypeError):  # a TypeError: no object
                broken.append(f"line {number} is {line.rstrip()[:60]!r}")
        if broken:
            self.notes.append(f"{len(broken)} lines of {name} are left out; {broken[0]}.")
        return objects

    def text(self, path: Path) -> str:
        """Read a file; empty if it is missing, or with a note if it is unreadable."""
        try:
            return read_regular(path).decode(errors="replace")
        except FileNotFoundError:
            return ""
        except OSError as error:
            self.notes.append(f"{path} cannot be read: {error}")
            return ""

    def bad_steps(self) -> list[int]:
        """Return the steps in ``bad_steps.jsonl``; without it, of the rows that count bad steps."""
        steps, skipped = self.columns.get("train/skipped", EMPTY)
        bad = [each["step"] for each in self.objects("bad_steps.jsonl") if "step" in each]
        return bad or steps[skipped > 0].tolist()


def write_report(run: PathLike, out: PathLike | None = None) -> Path:
    """Write a run's report, one page that opens without a network, and return its path.

    A ``metrics.jsonl`` alone makes a page too. ``out`` is by default ``report.html`` beside it.
    """
    read = Run.read(Path(run))
    page = read.folder / "report.html" if out is None else Path(out)
    write_atomic(page, PAGE.format(title=_text(read.folder), body=_body(read)).encode())
    return page


def plot_losses(metrics_path: PathLike, png_path: PathLike) -> Path:
    """Draw the losses and the learning rate of a ``metrics.jsonl`` into a PNG file."""
    run, wanted = Run.read(Path(metrics_path)), f"{LOSSES}|train/lr"
    if not any(re.fullmatch(wanted, name) for name in run.columns):
        raise ValueError(f"{metrics_path} has no values of {wanted} to draw.")
    write_atomic(png_path, _draw(run, wanted, "png"))
    return Path(png_path)


def wrap_up(state: TrainState, out: PathLike, tokens: Location, *, prompt: str) -> str:
    """Summarise a finished run in text: last losses, a sample, pictures, and the report page.

    What cannot be made, because a package is not installed, the disk is full or there is no loss to
    draw, is left out with its reason: a run that has ended well must not fail because of a picture.
    Every rank calls it; the first one writes ``samples/``, ``loss.png`` and ``report.html``.

    Args:
        state: The last state.
        out: The run directory.
        tokens: The token file, with its ``tokenizer.json`` if there is to be a sample.
        prompt: The text that the sample continues.
    """
    from forgekit.data.tokenizer import load_tokenizer
    from forgekit.evaluation.generate import write_sample
    from forgekit.mesh import process_rank

    out, metrics = Path(out), Path(out, "metrics.jsonl")
    parts: dict[str, Callable[[], object]] = {
        f"{metrics}: ": lambda: "  ".join(map(" ".join, _last_losses(Run.read(out)).items()))
    }
    if is_url(tokens) or (Path(tokens) / "tokenizer.json").exists():
        parts[f"sample ({out / 'samples'}):\n"] = lambda: write_sample(
            state, out, load_tokenizer(tokens), prompt, temperature=0.8, top_k=50
        )
    if process_rank() == 0:
        parts["loss curve: "] = lambda: plot_losses(metrics, out / "loss.png")
        parts["report: "] = lambda: write_report(out)
    lines = []
    for head, make in parts.items():
        try:
            lines.append(f"{head}{make()}")
        except Exception as error:  # tokenizers, drawing libraries and disks raise anything
            lines.append(f"no {head.rstrip()} {error}")
    return "\n".join(lines)


def _body(run: Run) -> str:
    paths = sorted((run.folder / "samples").glob("*.txt"))[-6:]
    samples = (f"<h3>{_text(p.stem)}</h3><pre>{_text(run.text(p))}</pre>" for p in paths)
    charts = 'There are none: matplotlib is missing. pip install "forgekit[plot]"'
    if find_spec("matplotlib") is not None:
        charts = "<svg" + _draw(run, ".+", "svg").decode().partition("<svg")[2]
    sections = {
        "Headline": _table(_headline(run).items()),
        "Curves": charts,
        "Bad steps": _listed(run.objects("bad_steps.jsonl")),
        "Configuration": f"<details>{_table(flat(dict(*run.objects('config.json'))))}</details>",
        "Changes of the configuration": _listed(run.objects("config_changes.jsonl")),
        "Samples": "".join(samples),
    }
    notes = (f"<p><mark>{_text(note)}</mark></p>\n" for note in dict.fromkeys(run.notes))
    shown = (f"<h2>{title}</h2>{content}\n" for title, content in sections.items() if content)
    return "".join([*notes, *shown])


def _headline(run: Run) -> dict[str, object]:
    """Return the key figures by name."""
    config, status = (dict(*run.objects(name)) for name in ("config.json", "status.json"))
    starts = [each for each in run.objects("history.jsonl") if each.get("event") == "started"]
    started = starts[-1] if starts else {}
    how = status.get("status", "-")
    if how == "running" and not is_locked(run.folder / ".lock"):
        how = "killed: no process holds the run"
    step = max([status.get("step") or 0, *run.columns.get("step", EMPTY)[1]])
    more = [str(status[name]) for name in ("reason", "time") if status.get(name)]
    mfu = run.columns.get("perf/mfu", EMPTY)[1]
    seconds, targets = _over_steps(run, "perf/step_seconds"), _over_steps(run, "train/targets")
    waiting = _over_steps(run, "perf/data_wait_seconds") / max(seconds, 1e-9)
    return {
        "status": ", ".join([f"{how}; step {step:.0f} of {config.get('steps', '?')}", *more]),
        "parameters": f"{started.get('parameters', 0):,}",
        "devices": f"{started.get('ranks', '?')} x {started.get('device', '?')}",
        **_last_losses(run),
        "targets": f"{targets:,.0f}, {targets / max(seconds, 1e-9):,.0f} per second",
        "MFU": f"{np.median(mfu):.1%}" if len(mfu) else "-",
        "time in steps": f"{timedelta(seconds=round(seconds))}, {waiting:.1%} waiting for data",
        "starts": len(starts),
        "bad steps": len(run.bad_steps()),
    }


def _last_losses(run: Run) -> dict[str, str]:
    names = [n for n in run.columns if re.fullmatch(f"{LOSSES}|eval/.+/bits_per_byte", n)]
    return {name: f"{run.columns[name][1][-1]:.4f}" for name in names}


def _over_steps(run: Run, metric: str) -> float:
    """Sum a per-step metric over all steps up to the last row."""
    steps, values = run.columns.get(metric, EMPTY)
    return float(values @ np.diff(steps, prepend=min([0, *steps[:1]])))


def _draw(run: Run, wanted: str, kind: str) -> bytes:
    """Draw metrics in a grid of two columns; the first chart, and a last odd one, span both."""
    panels: dict[str, list[str]] = {}
    for name in run.columns:
        title = next((t for pattern, t in CHARTS.items() if re.fullmatch(pattern, name)), name)
        if title and re.fullmatch(wanted, name):
            panels.setdefault(title, []).append(name)
    cells = [0, *range(len(panels)), len(panels) - 1][: len(panels) // 2 * 2 + 2]
    # Not pyplot: it keeps figures, and a window system, in global state.
    make = require("matplotlib.figure", extra="plot").Figure
    figure = make(figsize=(11, 1.5 * len(cells)), layout="constrained")
    grid = figure.subplot_mosaic(np.reshape(cells, (-1, 2)).tolist())
    for number, (title, names) in enumerate(panels.items()):
        draw = _draw_loads if run.columns[names[0]][1].ndim == 2 else _draw_curves
        draw(grid[number], run, names[:8])
        grid[number].set_title(printable(title), fontsize=10, parse_math=False)
        grid[number].set_xlabel("optimizer step")
        grid[number].locator_params(axis="x", integer=True, nbins=6)
    picture = io.BytesIO()
    # Points less than a pixel beside a line are left out: of 300,000 rows 60 kB stay, all spikes.
    settings = {"svg.fonttype": "none", "path.simplify_threshold": 1.0}
    with require("matplotlib", extra="plot").rc_context(settings):
        figure.savefig(picture, format=kind, dpi=150)
    return picture.getvalue()


def _draw_curves(axes: Any, run: Run, names: Sequence[str]) -> None:
    """Draw each row, pale, and a moving median; mark what happened in the chart of the loss."""
    for name in names:
        steps, values = run.columns[name]
        half = min(len(values) // 20, 250)
        windows = sliding_window_view(values, 2 * half + 1)
        (line,) = axes.plot(steps, values, lw=0.7, alpha=0.3, marker="o"[len(steps) > 20 :])
        at = np.arange(0, len(windows), 1 + len(windows) // 500)
        trend = steps[at + half], np.median(windows[at], axis=1)
        axes.plot(*trend, color=line.get_color(), label=printable(name))
    axes.grid(color="#e4e6ea")
    numbers = np.concatenate([run.columns[name][1] for name in names])
    if 0 < 10 * numbers.min() < numbers.max() and names != ["train/lr"]:
        axes.set_yscale("log")
    if "train/loss" in names:
        _draw_marks(axes, run)
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def _draw_marks(axes: Any, run: Run) -> None:
    """Mark events and phases by vertical lines, and bad steps at the lower edge."""
    steps, samples = ([0, *numbers] for numbers in run.columns.get("samples", EMPTY))
    phases = dict(*run.objects("config.json")).get("phases") or ()
    begins = [p.get("step") or np.interp(p.get("start", 0), samples, steps) for p in phases]
    events = [(each.get("event"), each.get("step")) for each in run.objects("history.jsonl")]
    for name, color, top, at in (
        ("bad step", "crimson", 0.05, run.bad_steps()),
        ("phase", "black", 1, begins),
        ("started", "gray", 1, [step for event, step in events if event == "started" and step]),
        ("rolled back", "purple", 1, [step for event, step in events if event == "rolled_back"]),
    ):
        if at:
            axes.vlines(at, 0, top, color, lw=0.8, label=name, transform=axes.get_xaxis_transform())


def _draw_loads(axes: Any, run: Run, names: Sequence[str]) -> None:
    """Draw experts over steps, load relative to the mean as color."""
    steps, loads = run.columns[names[0]]
    area = (steps[0], steps[-1] + 1, loads.shape[1] - 0.5, -0.5)  # a row is a column
    # A log2 scale from a quarter of the mean to four times it; zeros are clipped.
    style = {"cmap": "RdBu_r", "vmin": -2, "vmax": 2, "interpolation": "nearest"}
    image = axes.imshow(np.log2(np.maximum(loads.T, 0.01)), extent=area, aspect="auto", **style)
    axes.locator_params(axis="y", integer=True)
    scale = axes.figure.colorbar(image, ax=axes, extend="both")
    scale.set_ticks([-2, 0, 2], labels=["1/4", "mean", "4 times"])


def _table(rows: Iterable[Iterable[object]]) -> str:
    lines = ("".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _listed(records: Sequence[Mapping[str, Any]]) -> str:
    """Format the last records as a table of all their keys; "" without records."""
    keys = dict.fromkeys(key for record in records[-50:] for key in record)
    rows = ([record.get(key) for key in keys] for record in records[-50:])
    return _table([keys, *rows]) if keys else ""


def _text(value: object) -> str:
    """Format a value for the page, in which it can do nothing."""
    text = "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return escape(printable(text[:2000]))
