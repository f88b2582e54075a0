"""How busy each expert of each layer is: as numbers in a run's metrics, and as a picture of them.

A model keeps the load of its last good step, so nothing is counted for this, and no step is slower
for it. What is logged with the other metrics is resumed and rolled back with them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from forgekit.metrics.log import read_metrics
from forgekit.metrics.pictures import new_figure, write_picture
from forgekit.model.moe import MoE
from forgekit.parallel.layout import size_of
from forgekit.state import TrainState
from forgekit.steps.experts import find_routed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh


LOAD = "moe/load/"
"""The metric of a layer is this and the layer's name."""

MOST = 4.0
"""Colours end at this many times the mean, and at the mean divided by it."""


@torch.no_grad()
def expert_loads(state: TrainState) -> dict[str, list[float]]:
    """Read how busy each expert was in the last good step; call it on every rank.

    The host reads it, so a recipe asks for it now and then: ``log.event(state,
    expert_loads(state), show=False)``.

    Args:
        state: The state; nothing in it changes.

    Returns:
        By layer, such as ``"moe/load/layers.0.feed_forward"``, the tokens of each expert over
        their mean; all layers, also those of other pipeline stages. Empty for a dense model.
    """
    routed = find_routed(state.model)
    if routed is None or routed.spec.moe is None:
        return {}
    experts, layers = routed.spec.moe.experts, list(routed.spec.routed.values())
    loads = torch.zeros(len(layers), experts, device=state.targets.device)
    for module in routed.modules():
        if isinstance(module, MoE):
            loads[layers.index(module.router.layer)] = module.router.load * experts
    if size_of(state.mesh, "pp") > 1 and state.mesh is not None:
        dist.all_reduce(loads, group=state.mesh.get_group("pp"))
    rows = [[round(load, 3) for load in row] for row in loads.tolist()]
    return {f"{LOAD}{layer}": row for layer, row in zip(layers, rows, strict=True)}


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
    rows = [row for row in read_metrics(metrics_path) if any(name.startswith(LOAD) for name in row)]
    if not rows:
        raise ValueError(
            f"{metrics_path} has no {LOAD}... in it. Log them: "
            "log.event(state, forgekit.run.expert_loads(state), show=False)."
        )
    layers = [name for name in rows[-1] if name.startswith(LOAD)]
    columns = math.ceil(math.sqrt(len(layers)))
    lines = math.ceil(len(layers) / columns)
    figure = new_figure(max(8, 2 * columns), max(4.5, 1.5 * lines) + 1)
    figure.suptitle(title or f"Load of the experts of {Path(metrics_path).absolute().parent.name}")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    drawn = [
        _draw_layer(axes, rows, layer) for axes, layer in zip(panels.flat, layers, strict=False)
    ]
    for axes in panels.flat[len(layers) :]:
        axes.set_visible(False)
    figure.supxlabel("optimizer step")
    figure.supylabel("expert")
    bar = figure.colorbar(drawn[-1], ax=panels, extend="both", ticks=[1 / MOST, 0.5, 1, 2, MOST])
    bar.minorticks_off()
    bar.ax.set_yticklabels(["idle: 1/4", "1/2", "even", "2", "4 times the mean"])
    return write_picture(figure, png_path)


def _draw_layer(axes: Axes, rows: Sequence[Mapping[str, Any]], layer: str) -> QuadMesh:
    from matplotlib.colors import LogNorm

    steps = [row["step"] for row in rows]
    loads = np.array([row[layer] for row in rows], dtype=np.float64).T  # an expert in each line
    mesh = axes.pcolormesh(
        _edges(steps),
        np.arange(len(loads) + 1) - 0.5,
        np.maximum(loads, 1e-6),  # a logarithm has no 0
        cmap="RdBu_r",
        norm=LogNorm(1 / MOST, MOST),
    )
    axes.set_title(layer.removeprefix(LOAD).removesuffix(".feed_forward"), fontsize=9)
    axes.locator_params(integer=True)
    return mesh


def _edges(steps: Sequence[int]) -> list[int]:
    """Where columns of the picture begin and end: each reaches back to the step before.

    Examples:
        >>> _edges([20, 25, 40])
        [15, 20, 25, 40]
    """
    width = steps[1] - steps[0] if len(steps) > 1 else 1
    return [max(0, steps[0] - width), *steps]
