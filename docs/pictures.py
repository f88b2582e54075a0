"""Draw the pictures of the layouts from the library's own data: ``python docs/pictures.py [DIR]``.

Nothing here knows how sequences are cut or schedules ordered; it asks the functions that train.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from forgekit.data.slices import slice_places
from forgekit.model.attention import document_mask
from forgekit.parallel.areas import areas_seen
from forgekit.parallel.schedules import PipelineSchedule, timeline

HERE = Path(__file__).parent
RANKS = ("#4878b8", "#e0893b", "#5a9e6f", "#b05a8f")
NOTHING = "#f1f2f4"
KINDS = {"F": "#4878b8", "B": "#5a9e6f", "I": "#9cc9a8", "W": "#e3c267"}
KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "backward to the weights",
}


def main() -> None:
    """Draw every picture into a folder, ``docs/pictures`` if none is given."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in {"slices": draw_slices, "masks": draw_masks, "ring": draw_ring}.items():
        _save(draw(), folder / f"{name}.png")
    for schedule in get_args(PipelineSchedule):
        _save(draw_timeline(schedule), folder / f"schedule_{schedule}.png")


def draw_slices(places: int = 32, ranks: int = 4) -> Figure:
    """Which rank holds which places of a row, by zigzag and contiguous slices."""
    figure = Figure(figsize=(9, 2.1), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, method in zip(panels, ("zigzag", "contiguous"), strict=True):
        holder = np.zeros((1, places))
        for rank in range(ranks):
            mine = slice_places(torch.arange(places), rank=rank, world=ranks, method=method)
            holder[0, mine.numpy()] = rank
        axes.pcolormesh(holder, cmap=ListedColormap(RANKS[:ranks]), edgecolors="w", linewidth=0.6)
        axes.set_yticks([0.5], [{"zigzag": "ring (zigzag)"}.get(method, f"Ulysses ({method})")])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    panels[-1].set_xlabel("place in the row")
    _legend(figure, {f"rank {rank}": RANKS[rank] for rank in range(ranks)})
    return figure


def draw_masks(places: int = 24) -> Figure:
    """Who may attend to whom: one document, three packed ones, and as a zigzag ring holds them."""
    documents = torch.tensor([[0] * 9 + [1] * 11 + [-1] * 4])
    order = torch.cat([slice_places(torch.arange(places), rank=r, world=2) for r in range(2)])
    packed = document_mask(documents)[0, 0]
    shown = {
        "causal": document_mask(torch.zeros(1, places))[0, 0],
        "two documents and padding": packed,
        "the same, places in ring order": packed[order][:, order],
    }
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(1, 3), shown.items(), strict=True):
        colors = ListedColormap((NOTHING, RANKS[0]))
        axes.pcolormesh(mask.int().numpy(), cmap=colors, edgecolors="w", linewidth=0.5)
        axes.set_title(title, fontsize=10)
        _square(axes, places)
    _legend(figure, {"attends": RANKS[0], "does not": NOTHING})
    return figure


def draw_ring(places: int = 8, ranks: int = 4) -> Figure:
    """What each rank of a ring computes in each step: two chunks of keys against two of queries."""
    figure = Figure(figsize=(9, 8.6), layout="constrained")
    for rank, row in enumerate(figure.subplots(ranks, ranks)):
        for step, axes in enumerate(row):
            source = (rank - step) % ranks
            seen = np.zeros((places, places))
            for area in areas_seen(rank, source, places):
                part = seen[area.queries, area.keys]
                part[:] = 1 if area.offset is None else np.tri(*part.shape, area.offset)
            colors = ListedColormap((NOTHING, RANKS[source]))
            axes.pcolormesh(seen, cmap=colors, vmin=0, vmax=1, edgecolors="w", linewidth=0.5)
            axes.set_title(f"step {step}: {int(seen.sum())} pairs", fontsize=9)
            axes.set_ylabel(f"queries of rank {rank}" if step == 0 else "", fontsize=9)
            axes.set_xlabel(f"keys of rank {source}", fontsize=9)
            _square(axes, places)
    return figure


def draw_timeline(schedule: PipelineSchedule, ranks: int = 4, micro_batches: int = 8) -> Figure:
    """Who works on what, and when, in a step; all stages cost the same."""
    drawn = timeline(schedule, ranks, micro_batches)
    figure = Figure(figsize=(11, 2.2), layout="constrained")
    axes = figure.subplots()
    for interval in drawn.intervals:
        work, width = interval.work, interval.end - interval.start
        # A rank's later stages are paler, so that the turns of a micro-batch can be told apart.
        alpha = 1.0 if work.stage < ranks else 0.55
        box = {"color": KINDS[work.kind], "edgecolor": "w", "linewidth": 0.7, "alpha": alpha}
        axes.barh(interval.rank, width, left=interval.start, height=0.92, **box)
        axes.text(
            interval.start + width / 2,
            interval.rank,
            str(work.micro_batch),
            ha="center",
            va="center",
            fontsize=6,
        )
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, drawn.span)
    axes.set_xlabel("time, in forward passes of one stage")
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{schedule}: {micro_batches} micro-batches, bubble {drawn.bubble:.1%}"
    axes.set_title(title, fontsize=10, loc="left")
    used = {interval.work.kind for interval in drawn.intervals}
    _legend(figure, {KIND_NAMES[k]: color for k, color in KINDS.items() if k in used})
    return figure


def _square(axes: Axes, places: int) -> None:
    axes.set_aspect("equal")
    axes.set_xlim(0, places)
    axes.set_ylim(places, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, colors: dict[str, str]) -> None:
    handles: Sequence[Any] = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(colors), frameon=False)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_figure(path, format="png", dpi=110)
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
