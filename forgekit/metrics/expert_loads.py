"""How busy each expert of each layer is, as numbers in a run's metrics.

A model keeps the load of its last good step, so nothing is counted for this, and no step is slower
for it. What is logged with the other metrics is resumed and rolled back with them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from forgekit.model.moe import MoE
from forgekit.parallel.layout import size_of
from forgekit.state import TrainState
from forgekit.steps.experts import find_routed

LOAD = "moe/load/"
"""The metric of a layer is this and the layer's name."""


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
