"""Pictures that are no curves: loads of experts, the pipeline's clock, who attends to whom."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeGuard, get_args

import numpy as np

from forgekit.metrics.expert_loads import LOAD, MOST
from forgekit.run.reporting.chart_svg import words
from forgekit.run.reporting.curves import by_number, evenly
from forgekit.run.reporting.run_data import RunData

HEAT_COLUMNS = 240
"""Columns of a heat map; each is the mean of its rows of metrics."""

MOST_LAYERS = 24
"""Layers that are drawn, evenly chosen among more."""

SCALE = ((5, 48, 97), (67, 147, 195), (247, 247, 247), (214, 96, 77), (103, 0, 31))
"""Colours from idle over even to busy."""

MOST_TURNS = 512
"""Micro-batches times ranks of a timeline; of more the first ones are drawn."""

MOST_WORK = 16_384
"""Micro-batches times ranks of which the bubble is computed."""

KINDS = (
    ("F", "forward"),
    ("B", "backward"),
    ("I", "backward to the inputs"),
    ("W", "backward to the weights"),
)


def expert_maps(run: RunData) -> str:
    """Draw how busy each expert of each layer was over the run; empty if no loads were logged."""
    lists = run.metrics.lists
    layers = sorted((name for name in lists if name.startswith(LOAD)), key=by_number)
    chosen = evenly(layers, MOST_LAYERS)
    maps = [_heat_map(name.removeprefix(LOAD), lists[name]) for name in chosen]
    if not any(maps):
        return ""
    left = f" {len(chosen)} of {len(layers)} layers." if len(chosen) < len(layers) else ""
    stops = ", ".join(f"rgb{color}" for color in SCALE)
    return (
        '<figure class="chart wide" id="expert_loads"><figcaption><b>Load of each expert</b> '
        '<span class="unit down y-label">expert, by layer; tokens over the mean</span>'
        "</figcaption>"
        f'<div class="maps">{"".join(maps)}</div><div class="x-label">optimizer step</div>'
        f'<p><span class="scale" style="background:linear-gradient(90deg,{stops})"></span> '
        f"idle (1/{MOST:g} of the mean or less), even, busy ({MOST:g} times or more).{left}</p>"
        "</figure>\n"
    )


def _heat_map(layer: str, rows: Sequence[tuple[int, Sequence[float]]]) -> str:
    """One layer as a picture: a line of pixels for each expert, a column for each time."""
    experts = len(rows[-1][1])
    rows = [(step, loads) for step, loads in rows if len(loads) == experts]
    steps = np.array([step for step, _ in rows])
    loads = np.array([load for _, load in rows], np.float64)
    bounds = np.unique(np.linspace(0, len(rows), min(HEAT_COLUMNS, len(rows)) + 1).astype(int))
    means = np.stack([np.nanmean(loads[a:b], axis=0) for a, b in pairwise(bounds)], axis=1)
    with np.errstate(divide="ignore"):
        level = np.log(np.nan_to_num(means, nan=1.0)) / math.log(MOST)  # -1 idle, 0 even, 1 busy
    index = np.rint((np.clip(level, -1, 1) + 1) * 127).astype(np.uint8)
    name = words(layer.removesuffix(".feed_forward"))
    return (
        f'<div class="map"><span>{name}: {experts} experts</span>'
        f'<img alt="loads of {name}" src="data:image/png;base64,{_png(index)}">'
        f"<span>{steps[0]:,}<i>{steps[-1]:,}</i></span></div>"
    )


def _png(index: np.ndarray) -> str:
    """Encode ``[rows columns]`` numbers from 0 to 254 as a PNG in the colours of the scale."""
    stops = np.linspace(0, 254, len(SCALE))
    colors = np.stack([np.interp(np.arange(255), stops, c) for c in zip(*SCALE, strict=True)], 1)
    height, width = index.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), index], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"PLTE", np.rint(colors).astype(np.uint8).tobytes()),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    content = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()


def pipeline_timeline(run: RunData) -> str:
    """Draw who works on what, and when, in a step; empty for a run without a pipeline."""
    ranks = _layout(run).get("pp", 1)
    if not 1 < ranks <= 64:
        return ""
    from forgekit.parallel.pipeline.schedule import PipelineSchedule
    from forgekit.parallel.pipeline.timeline import timeline

    schedule = run.setting("pipeline_schedule", "1f1b")
    count, source = _micro_batches(run, ranks)
    try:
        if schedule not in get_args(PipelineSchedule):
            raise ValueError(f"no schedule {schedule!r} in this version")
        if count * ranks > MOST_WORK:
            raise ValueError(f"{count:,} micro-batches on {ranks} ranks are too many to draw")
        whole = timeline(schedule, ranks, count)
        drawn, shown = whole, count
        if count * ranks > MOST_TURNS:
            shown = max(2 * ranks, MOST_TURNS // ranks // ranks * ranks)
            drawn = timeline(schedule, ranks, shown)
    except ValueError as error:
        return f'<p class="note">No pipeline timeline: {words(error)}</p>'
    first = f" The first {shown} are drawn." if shown < count else ""
    paths = []
    for kind, _ in KINDS:
        for is_later in (False, True):
            boxes = [
                f"M{i.start + 0.04:g} {i.rank + 0.06:g}h{i.end - i.start - 0.08:g}v.88"
                f"H{i.start + 0.04:g}z"
                for i in drawn.intervals
                if i.work.kind == kind and (i.work.stage >= ranks) == is_later
            ]
            if boxes:
                paths.append(f'<path class="k{kind}{" later" * is_later}" d="{"".join(boxes)}"/>')
    used = {interval.work.kind for interval in drawn.intervals}
    keys = "".join(f'<span class="key k{k}">{name}</span>' for k, name in KINDS if k in used)
    labels = "".join(
        f'<span class="tick y" style="bottom:{100 * (1 - (rank + 0.5) / ranks):.2f}%">{rank}</span>'
        for rank in range(0, ranks, math.ceil(ranks / 16))
    )
    return (
        f'<figure class="chart wide" id="pipeline"><figcaption><b>Pipeline: {words(schedule)}, '
        f'bubble {whole.bubble:.1%}</b> <span class="unit down y-label">rank</span>'
        f'<span class="legend">{keys}</span></figcaption>'
        f'<div class="plot" style="height:{min(2 + 1.4 * ranks, 24):g}rem">{labels}'
        f'<svg viewBox="0 0 {drawn.span:g} {ranks}" preserveAspectRatio="none" role="img" '
        f'aria-label="timeline">{"".join(paths)}</svg></div>'
        '<div class="x-label">time, in forward passes of one stage</div>'
        f"<p>A simulated step, not a measured one: all stages cost the same, messages nothing, "
        f"{count} micro-batches ({source}).{first} Paler: later stages of a rank.</p></figure>\n"
    )


def _micro_batches(run: RunData, ranks: int) -> tuple[int, str]:
    """Micro-batches of a step, and how they are known."""
    if _is_count(count := run.setting("micro_batches")):
        return count, "its configuration"
    rows, batch = run.setting("global_batch_size"), run.setting("batch_size")
    layout = _layout(run)
    data_ranks = math.prod(layout.get(name, 0) for name in ("dp_replicate", "dp_shard"))
    if data_ranks and _is_count(rows) and _is_count(batch):
        count, rest = divmod(rows, batch * data_ranks)
        if count and not rest:
            return count, f"{rows} rows per step on {math.prod(layout.values())} ranks"
    return 2 * ranks, "two per rank: the run does not say how many"


def _layout(run: RunData) -> dict[str, int]:
    """Sizes of the mesh; one that was to take what is left follows from the ranks of a start."""
    defaults = {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1}
    layout = {name: run.setting(f"mesh.{name}", size) for name, size in defaults.items()}
    known = {name: size for name, size in layout.items() if _is_count(size)}
    worlds = [event["ranks"] for event in run.history if _is_count(event.get("ranks"))]
    left = [name for name, size in layout.items() if size == -1]
    if len(left) == 1 and worlds and worlds[-1] % (held := math.prod(known.values())) == 0:
        known[left[0]] = worlds[-1] // held
    return known


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def attention_mask(run: RunData) -> str:
    """Draw who attends to whom, as far as the configuration says; empty without one."""
    if not run.setting("model"):
        return ""
    import torch

    from forgekit.data.batches.sequence_slices import slice_positions
    from forgekit.model.attention import document_mask

    cp = _layout(run).get("cp", 1)
    cp = cp if cp <= 8 else 1
    size = 2 * cp * math.ceil(24 / (2 * cp))
    packed = run.setting("data.doc_ids")
    ends = (round(0.4 * size), round(0.8 * size))
    numbers = torch.tensor([[0] * ends[0] + [1] * (ends[1] - ends[0]) + [2] * (size - ends[1])])
    documents = numbers if packed is True else torch.zeros_like(numbers)
    mask = document_mask(documents)[0, 0].numpy()
    method = "zigzag" if run.setting("context_parallel", "ring") == "ring" else "contiguous"
    holder = np.zeros(size, int)
    for rank in range(cp):
        mine = slice_positions(torch.arange(size), rank=rank, world=cp, method=method)
        holder[mine.numpy()] = rank
    paths = "".join(
        f'<path class="f{rank % 8}" d="{_cells(mask & (holder == rank)[:, None])}"/>'
        for rank in range(cp)
    )
    keys = "".join(f'<span class="key c{r % 8}">rank {r}</span>' for r in range(cp) if cp > 1)
    known = {
        True: "Documents of one row do not see each other (data.doc_ids); three, for example.",
        False: "Each position sees all before it in its row, other documents too (data.doc_ids).",
    }.get(packed, "Causal; the configuration does not say whether documents share a row.")
    return (
        '<figure class="chart" id="attention"><figcaption><b>Who attends to whom</b> '
        f'<span class="unit down y-label">query position</span><span class="legend">{keys}</span>'
        f'</figcaption><div class="mask"><svg viewBox="0 0 {size} {size}" role="img" '
        f'aria-label="attention mask"><path class="nothing" d="M0 0h{size}v{size}H0z"/>{paths}'
        '</svg></div><div class="x-label">key position</div>'
        f"<p>A scheme of {size} positions. {known}</p></figure>\n"
    )


def _cells(mask: np.ndarray) -> str:
    cells = np.argwhere(mask).tolist()
    return "".join(f"M{x + 0.06:g} {y + 0.06:g}h.88v.88h-.88z" for y, x in cells)
