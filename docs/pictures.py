"""Draw the pictures of the pages from the library's own data: ``python docs/pictures.py [DIR]``.

Nothing here knows how sequences are cut, documents packed or schedules ordered; it asks the
functions that train.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from lazy_clock import simulate
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from schedule_clock import timeline

from forgekit.data.batch import slice_positions
from forgekit.data.order import BLOCK, Phase, make_order
from forgekit.data.packing import pack
from forgekit.data.rows import packed_dataset
from forgekit.model.attention import document_mask
from forgekit.model.moe_spec import MoESpec
from forgekit.model.routing import Router, Routing
from forgekit.parallel.context.attention_areas import areas_seen
from forgekit.parallel.pipeline.schedule import PipelineSchedule

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
    pictures = {
        "slices": draw_slices,
        "masks": draw_masks,
        "ring": draw_ring,
        "packing": draw_packing,
        "mixture": draw_mixture,
        "balance": draw_balance,
        "lazy": draw_lazy,
    }
    for name, draw in pictures.items():
        _save(draw(), folder / f"{name}.png")
    for schedule in get_args(PipelineSchedule):
        _save(draw_timeline(schedule), folder / f"schedule_{schedule}.png")


def draw_slices(positions: int = 32, ranks: int = 4) -> Figure:
    """Which rank holds which positions of a row, by zigzag and contiguous slices."""
    figure = Figure(figsize=(9, 2.1), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, method in zip(panels, ("zigzag", "contiguous"), strict=True):
        holder = np.zeros((1, positions))
        for rank in range(ranks):
            mine = slice_positions(torch.arange(positions), rank=rank, world=ranks, method=method)
            holder[0, mine.numpy()] = rank
        axes.pcolormesh(holder, cmap=ListedColormap(RANKS[:ranks]), edgecolors="w", linewidth=0.6)
        axes.set_yticks([0.5], [{"zigzag": "ring (zigzag)"}.get(method, f"Ulysses ({method})")])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    panels[-1].set_xlabel("position in the row")
    _legend(figure, {f"rank {rank}": RANKS[rank] for rank in range(ranks)})
    return figure


def draw_masks(positions: int = 24) -> Figure:
    """Who may attend to whom: one document, three packed ones, and as a zigzag ring holds them."""
    documents = torch.tensor([[0] * 9 + [1] * 11 + [-1] * 4])
    order = torch.cat([slice_positions(torch.arange(positions), rank=r, world=2) for r in range(2)])
    packed = document_mask(documents)[0, 0]
    shown = {
        "causal": document_mask(torch.zeros(1, positions))[0, 0],
        "two documents and padding": packed,
        "the same, positions in ring order": packed[order][:, order],
    }
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(1, 3), shown.items(), strict=True):
        colors = ListedColormap((NOTHING, RANKS[0]))
        axes.pcolormesh(mask.int().numpy(), cmap=colors, edgecolors="w", linewidth=0.5)
        axes.set_title(title, fontsize=10)
        _square(axes, positions)
    _legend(figure, {"attends": RANKS[0], "does not": NOTHING})
    return figure


def draw_ring(positions: int = 8, ranks: int = 4) -> Figure:
    """What each rank of a ring computes in each step: two chunks of keys against two of queries."""
    figure = Figure(figsize=(9, 8.6), layout="constrained")
    for rank, row in enumerate(figure.subplots(ranks, ranks)):
        for step, axes in enumerate(row):
            source = (rank - step) % ranks
            seen = np.zeros((positions, positions))
            for area in areas_seen(rank, source, positions):
                part = seen[area.queries, area.keys]
                part[:] = 1 if area.offset is None else np.tri(*part.shape, area.offset)
            colors = ListedColormap((NOTHING, RANKS[source]))
            axes.pcolormesh(seen, cmap=colors, vmin=0, vmax=1, edgecolors="w", linewidth=0.5)
            axes.set_title(f"step {step}: {int(seen.sum())} pairs", fontsize=9)
            axes.set_ylabel(f"queries of rank {rank}" if step == 0 else "", fontsize=9)
            axes.set_xlabel(f"keys of rank {source}", fontsize=9)
            _square(axes, positions)
    return figure


def draw_packing(rows: int = 24, longest: int = 2048) -> Figure:
    """How much of a batch is padding: a document per row, and as many rows of packed documents."""
    draw = np.random.default_rng(0).lognormal(np.log(300), 1.0, 20 * rows)
    lengths = draw.clip(1, longest).astype(np.int64)
    capacity = int(lengths[:rows].max())
    documents = max(n for n in range(len(lengths)) if len(pack(lengths[:n], capacity)) <= rows)
    alone = np.arange(capacity) < lengths[:rows, None]
    bins = pack(lengths[:documents], capacity)
    packed = packed_dataset([np.zeros(n, np.int64) for n in lengths[:documents]], bins)
    numbers = packed.__getitems__(range(rows))["doc_ids"].numpy()
    shown = {
        f"{rows} documents, padded to the longest": np.where(alone, 0, -1),
        f"{documents} documents, packed": numbers,
    }
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, held) in zip(panels, shown.items(), strict=True):
        colors = np.where(held < 0, 0, 1 + (held + np.arange(rows)[:, None]) % len(RANKS))
        look = {"cmap": ListedColormap((NOTHING, *RANKS)), "vmin": 0, "vmax": len(RANKS)}
        axes.pcolormesh(colors, rasterized=True, **look)
        axes.hlines(np.arange(1, rows), 0, capacity, color="w", linewidth=1.5)
        axes.set_title(f"{title}: {(held >= 0).mean():.0%} filled", fontsize=10)
        axes.set_xlabel("position in the row")
        axes.set_xticks([0, capacity // 2, capacity])
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("rows")
    return figure


def draw_mixture(blocks: int = 120) -> Figure:
    """The shares of three sources along a run of two phases, and the epochs of each."""
    sizes = {"code": 640_000, "prose": 960_000, "tables": 240_000}
    phases = (
        Phase(start=50 * BLOCK, weights={"code": 3, "tables": 1}),
        Phase(start=95 * BLOCK, weights={"prose": 0.5, "tables": 0}, lr_scale=0.5),
    )
    order = make_order(sizes, {"code": 2, "prose": 3, "tables": 3}, phases=phases)
    starts = np.arange(blocks) * BLOCK
    ends = np.append(starts, blocks * BLOCK)
    shares = np.array([order.shares(int(start), BLOCK) for start in starts]).T
    epochs = np.array([order.taken(int(end)) for end in ends]).T / np.array(order.sizes)[:, None]
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    tops = np.cumsum(shares, axis=0)
    for name, share, top, taken, color in zip(
        order.sources, shares, tops, epochs, RANKS, strict=False
    ):
        above.stairs(top, ends, baseline=top - share, fill=True, color=color)
        below.plot(ends, taken, color=color, linewidth=2, label=name)
    for axes in (above, below):
        axes.set_xlim(0, ends[-1])
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        for phase in phases:
            axes.axvline(phase.start, color="#30343b", linewidth=1, linestyle="--")
    for number, phase in enumerate(phases, start=1):
        text = f"phase {number}, learning rate x {phase.lr_scale:g}"
        above.text(phase.start, 1.03, text, fontsize=9, ha="center")
    above.set_ylim(0, 1)
    above.set_ylabel("share of the samples")
    below.set_ylabel("epochs")
    below.set_xlabel("sample")
    below.xaxis.set_major_formatter("{x:,.0f}")
    _legend(figure, dict(zip(order.sources, RANKS, strict=False)))
    return figure


def draw_balance(steps: int = 150) -> Figure:
    """How the balance loss evens out a router: by the load of the last step, and of this one."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    lines = {"load of this step (the usual form)": "-", "load of the last step": "--"}
    for (name, style), color in zip(lines.items(), ("#b9bec7", RANKS[0]), strict=True):
        busiest = _train_router(steps, is_usual="usual" in name)
        label = f"{name}: {np.mean(busiest[-50:]):.2f} at the end"
        axes.plot(busiest, style, color=color, linewidth=4 if style == "-" else 1.8, label=label)
    axes.axhline(1, color="#30343b", linewidth=0.8)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("busiest expert over the mean")
    axes.set_xlim(0, steps - 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _train_router(steps: int, *, is_usual: bool) -> list[float]:
    """Move a router by its balance loss alone, on new tokens each step; load of the busiest."""
    spec = MoESpec(experts=8, top_k=2, ffn_dim=1, aux_loss=1.0)
    router, generator = Router(16, spec, "layer"), torch.Generator().manual_seed(0)
    torch.nn.init.normal_(router.weight, std=0.3, generator=generator)
    busiest = []
    for _ in range(steps):
        x, routing = torch.randn(256, 8, 16, generator=generator) + 0.7, Routing()
        *_, term = router(x, routing)
        counts = routing.notes["layer"]["counts"].double()
        if is_usual:
            mean = (x @ router.weight.T).softmax(-1).mean((0, 1))
            term = spec.experts * (counts / counts.sum()).float() @ mean
        else:
            term = term / x[..., 0].numel()
        router.weight.data -= 0.3 * torch.autograd.grad(term, router.weight)[0]
        router.rebalance(counts, torch.tensor(data=True), 0.0)
        busiest.append(float(counts.max() / counts.mean()))
    return busiest


def draw_lazy(steps: int = 4, micro_batches: int = 8) -> Figure:
    """When a generator samples and a trainer trains: eager, eager without a reserve, and lazy."""
    shown = {
        "eager, 8 messages may wait": simulate(eager=True),
        "eager, 1 message may wait": simulate(eager=True, most=1),
        "lazy, 8 messages may wait": simulate(eager=False),
    }
    colors = {"of the trainer's version": RANKS[0], "of the version before": RANKS[1]}
    figure = Figure(figsize=(11, 5.2), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    for axes, (name, drawn) in zip(panels, shown.items(), strict=True):
        drawn_messages = zip(drawn.clock.made, drawn.trained, strict=True)
        for (made, version), (begins, stale) in islice(drawn_messages, steps * micro_batches):
            color = list(colors.values())[stale]
            for lane, at in enumerate((made, begins)):
                axes.barh(lane, 1, left=at, height=0.92, color=color, edgecolor="w", linewidth=0.7)
                axes.text(at + 0.5, lane, str(version), ha="center", va="center", fontsize=6)
        for when in drawn.clock.published[1 : steps + 1]:
            axes.axvline(when, color="#30343b", linewidth=1, linestyle="--")
        axes.set_yticks((0, 1), ("generator", "trainer"))
        axes.tick_params(left=False)
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
        means = f"staleness {drawn.staleness:.2f}, trainer idle {drawn.idle:.1%}"
        axes.set_title(f"{name}: {means}", fontsize=10, loc="left")
    panels[-1].set_xlabel("time, in messages")
    _legend(figure, colors)
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


def _square(axes: Axes, positions: int) -> None:
    axes.set_aspect("equal")
    axes.set_xlim(0, positions)
    axes.set_ylim(positions, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, colors: dict[str, str]) -> None:
    handles: Sequence[Any] = [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(colors), frameon=False)


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_figure(path, format="png", dpi=110)
    sys.stdout.write(f"{path}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
