"""What a run looked like: its last losses, a sample, and pictures."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forgekit.data.tokenizer import load_tokenizer
from forgekit.evaluation.generate import write_sample
from forgekit.mesh import process_rank
from forgekit.metrics.expert_loads import LOAD, plot_expert_loads
from forgekit.metrics.log import read_metrics
from forgekit.metrics.pictures import new_figure, write_picture
from forgekit.run.reporting.curves import smoothed
from forgekit.state import TrainState

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BLUE, GREY = "#1f5fa8", "#5f6670"
EVALUATIONS = ("#d1495b", "#2a9d8f", "#e08e0b", "#7b4fa3", "#8a5a44")
"""Colours of the evaluation sets, told apart from the blue of training by hue and by marker."""

WINDOWS = 10
"""The moving mean takes in one part in this many of the rows."""


def plot_losses(
    metrics_path: str | os.PathLike[str],
    png_path: str | os.PathLike[str],
    *,
    title: str | None = None,
) -> Path:
    """Draw the losses of a run over its steps, with the learning rate below, into a PNG file.

    The training loss is drawn twice: each logged step, thin, and a moving mean of them, since a
    single step's loss is noisy. Evaluations are points. A step without a finite loss is a gap.

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
    figure = new_figure(8, 5.5)
    rows = read_metrics(metrics_path)
    if not _column(rows, "train/loss")[1] and not _evaluations(rows):
        raise ValueError(
            f"{metrics_path} has {len(rows)} rows and no finite loss in them, so there is nothing "
            "to draw. Train for at least one logged step."
        )
    _draw(figure, rows, title or f"Loss of {Path(metrics_path).absolute().parent.name}")
    return write_picture(figure, png_path)


def wrap_up(state: TrainState, out: str | os.PathLike[str], tokens: Path, *, prompt: str) -> str:
    """Look at a finished run: its last losses, a sample, pictures, and the page with all of it.

    What cannot be made, because a package is not installed, the disk is full or there is no loss to
    draw, is left out with its reason: a run that has ended well must not fail because of a picture.
    Every rank calls it; the first one writes.

    Args:
        state: The last state.
        out: The run directory; ``samples/``, ``loss.png``, ``report.html`` (as ``forgekit report
            --no-png`` writes it) and, where loads were logged, ``expert_loads.png`` are written.
        tokens: The token file, with its ``tokenizer.json`` if there is to be a sample.
        prompt: The text that the sample continues.

    Returns:
        What to show, some lines of text.
    """
    out = Path(out)
    parts = [_said("losses", lambda: _last_losses(out / "metrics.jsonl"))]
    if (tokens / "tokenizer.json").exists():
        parts.append(_said("sample", lambda: _sample(state, out, tokens, prompt)))
    if process_rank() == 0:
        parts.append(_said("loss curve", lambda: _curve(out)))
        parts.append(_said("loads of experts", lambda: _loads(out)))
        parts.append(_said("report", lambda: _report(out)))
    return "\n".join(filter(None, parts))


def _said(what: str, look: Callable[[], str]) -> str:
    """What ``look`` returns, or why it could not."""
    try:
        return look()
    except Exception as error:  # a tokenizer, a drawing library and a disk fail in their own ways
        return f"no {what}: {error}"


def _sample(state: TrainState, out: Path, tokens: Path, prompt: str) -> str:
    tokenizer = load_tokenizer(tokens)
    text = write_sample(state, out, tokenizer, prompt, temperature=0.8, top_k=50)
    return f"sample ({out / 'samples'}):\n{text}"


def _curve(out: Path) -> str:
    return f"loss curve: {plot_losses(out / 'metrics.jsonl', out / 'loss.png')}"


def _loads(out: Path) -> str:
    path = out / "metrics.jsonl"
    if not any(name.startswith(LOAD) for row in read_metrics(path) for name in row):
        return ""
    return f"loads of experts: {plot_expert_loads(path, out / 'expert_loads.png')}"


def _report(out: Path) -> str:
    from forgekit.run.reporting.write import write_report  # not before a run has ended

    return f"report: {write_report([out], pictures=False).page}"


def _last_losses(path: Path) -> str:
    """The newest value of each loss in the metrics, as one line."""
    newest: dict[str, Any] = {}
    for row in read_metrics(path):
        newest |= row
    names = sorted(name for name in newest if name.endswith(("/loss", "/bits_per_byte")))
    shown = "  ".join(f"{name} {newest[name]:.4f}" for name in names if newest[name] is not None)
    return f"{path}: {shown}"


def _draw(figure: Figure, rows: Sequence[dict[str, Any]], title: str) -> None:
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    figure.suptitle(title, fontsize=13, fontweight="bold")
    _draw_losses(losses, rows)
    rates.plot(*_column(rows, "train/lr"), color=GREY, linewidth=1.5)
    rates.set_ylim(bottom=0)
    rates.set_ylabel("learning rate")
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    rates.set_xlabel("optimizer step")
    rates.locator_params(axis="x", integer=True)
    figure.align_ylabels()
    for axes in (losses, rates):
        axes.grid(color="#e4e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_losses(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    steps, losses = _column(rows, "train/loss", gaps=True)
    raw = {"color": BLUE, "alpha": 0.35, "linewidth": 0.8, "marker": ".", "markersize": 3}
    axes.plot(steps, losses, label="train, each logged step", **raw)
    half = max(1, len(losses) // (2 * WINDOWS))
    smooth = smoothed(np.array(losses), half).tolist()
    axes.plot(steps, smooth, color=BLUE, linewidth=2, label=f"train, mean{_last(smooth)}")
    for index, name in enumerate(_evaluations(rows)):
        steps, losses = _column(rows, name)
        label = f"{name.removesuffix('/loss')}{_last(losses)}"
        color = EVALUATIONS[index % len(EVALUATIONS)]
        axes.plot(steps, losses, "o-", color=color, linewidth=1, markersize=5, label=label)
    axes.set_ylabel("loss (nats per target)")
    axes.legend(frameon=False)


def _last(losses: Sequence[float]) -> str:
    """The newest finite loss for the legend: the number that one looks for in the picture."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return f" ({finite[-1]:.3f})" if finite else ""


def _evaluations(rows: Sequence[dict[str, Any]]) -> list[str]:
    names = {name for row in rows for name in row if name.startswith("eval/")}
    return sorted(name for name in names if name.endswith("/loss") and _column(rows, name)[1])


def _column(
    rows: Sequence[dict[str, Any]], name: str, *, gaps: bool = False
) -> tuple[list[int], list[float]]:
    """Steps and values of one metric; with ``gaps``, NaN stands where a row says null."""
    pairs = [
        (row["step"], math.nan if row[name] is None else row[name])
        for row in rows
        if name in row and (gaps or row[name] is not None)
    ]
    return [step for step, _ in pairs], [value for _, value in pairs]
