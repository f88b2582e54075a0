"""Metrics beside the loss: gradient norms by layer, loads of experts.

A hook is a function, and it is called where a recipe calls it. Those of gradients stand between
``reduce_totals`` and ``update``: ``make_step(..., gradient_hook=...)`` calls one there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from forgekit.model.moe import MoE
from forgekit.parallel.layout import size_of
from forgekit.state import TrainState
from forgekit.steps.experts import find_routed
from forgekit.steps.gradients import grad_norms
from forgekit.steps.totals import Totals

LOAD = "moe/load/"
"""Prefix of the metrics of layers' loads."""


def layer_norms(state: TrainState, totals: Totals) -> dict[str, Tensor]:
    """Gradient hook: the norm of each layer's token-mean gradient.

    A layer is what stands before the first number in a parameter's name, with it
    (``layers.3.attention.query.weight`` is in ``layers.3``), else the module of the parameter.

    Args:
        state: The state whose gradients ``accumulate`` left; nothing in it changes.
        totals: Reduced totals.

    Returns:
        ``grad_norm/<layer>``: ``[]`` float64, before clipping, the same on every rank.
    """
    squares: dict[str, Tensor] = {}
    for name, norm in grad_norms(state, totals).items():
        layer = f"grad_norm/{_layer(name)}"
        squares[layer] = squares.get(layer, 0.0) + norm.square()
    return {layer: square.sqrt() for layer, square in squares.items()}


def _layer(name: str) -> str:
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), max(len(parts) - 2, 0))
    return ".".join(parts[: first + 1])


@torch.no_grad()
def expert_loads(state: TrainState) -> dict[str, list[float]]:
    """Read each expert's load in the last good step; call it on every rank.

    The model keeps that load, so nothing is counted for this. The host reads it, so a recipe asks
    for it now and then: ``log.event(state, expert_loads(state), show=False)``.

    Args:
        state: The state; nothing in it changes.

    Returns:
        By layer, such as ``"moe/load/layers.0.feed_forward"``, the tokens of each expert over
        their mean; all layers, also those of other pipeline stages. Empty for a dense model.
    """
    routed = find_routed(state.model.modules())
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
