"""What a step's routers need and report: the loss scale in, counts out, one change of balance.

Each call of the model in a step gets one ``Routing``: router terms are sums like the loss, so they
need the loss scale and nothing else, whatever is divided by later. What the routers note is added
up, travels in the step's one collective, and moves their buffers in ``update``. Calls outside of a
step (an evaluation, a proof) get none, and so count nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from forgekit.model.moe import MoE
from forgekit.model.routing import Routing
from forgekit.model.transformer import Transformer
from forgekit.ranges import NOTHING

EXPERTS = "experts"
"""The key of the routers' counts among a step's sums."""

NUMBERS = ("kept", "positions", "aux_loss", "z_loss", "bias_range")
"""What a layer notes besides its counts, one number each."""


def find_routed(modules: Iterable[nn.Module]) -> Transformer | None:
    """Find the ``Transformer`` with experts among a model's modules; None without one.

    Raises:
        ValueError: If there are two: their layers have the same names.
    """
    routed = [m for m in modules if isinstance(m, Transformer) and m.spec.moe is not None]
    if len(routed) > 1:
        raise ValueError(
            f"the model has {len(routed)} Transformers with experts, whose layers have the same "
            "names. Keep one in the model, and a frozen reference in a field of the state."
        )
    return routed[0] if routed else None


class StepRouters:
    """What the routers of a model note during one step.

    Args:
        modules: All modules of the model; nothing in them changes.
        loss_scale: ``[]``.
        device: Where sums are kept.
        stages: What is called in place of the model: this rank's pipeline stages, copies of it.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        loss_scale: Tensor,
        device: torch.device,
        stages: Iterable[nn.Module] = (),
    ) -> None:
        self._routed = find_routed(modules)
        copies = [find_routed(stage.modules()) for stage in stages] if self._routed else []
        self._called = [module for module in (self._routed, *copies) if module is not None]
        self._loss_scale = loss_scale
        self._device = device
        self._router_counts: list[dict[str, dict[str, Tensor]]] = []

    def recording(self) -> AbstractContextManager[object]:
        """Give each call of the model inside, where gradients are computed, a ``Routing``."""
        if not self._called:
            return NOTHING
        hooks = ExitStack()
        for module in self._called:
            hooks.enter_context(
                module.register_forward_pre_hook(self._add_routing, with_kwargs=True)
            )
        return hooks

    def sums(self) -> dict[str, dict[str, Tensor]]:
        """Add up what was noted; nothing for a dense model.

        Returns:
            Under ``"experts"`` float64 sums by name, with the model's layers as rows, those of
            other pipeline stages too: ``counts`` ``[l e]``, the others ``[l]``.

        Raises:
            ValueError: If the loss function came to the experts without a call of the model.
        """
        if self._routed is None or self._routed.spec.moe is None:
            return {}
        if not self._router_counts:
            raise ValueError(
                f"loss_fn did not call {type(self._routed).__name__} with gradients, so its "
                "routers got no loss scale. Call model(...), not model.forward or a submodule."
            )
        layers = self._routed.spec.routed.values()
        experts = self._routed.spec.moe.experts
        shapes = {"counts": (experts,), **dict.fromkeys((*NUMBERS, "calls"), ())}
        sums = {
            name: torch.stack([self._sum(layer, name, shape) for layer in layers])
            for name, shape in shapes.items()
        }
        return {EXPERTS: sums}

    def _sum(self, layer: str, name: str, shape: tuple[int, ...]) -> Tensor:
        total = torch.zeros(shape, dtype=torch.float64, device=self._device)
        for notes in self._router_counts:
            if layer in notes:  # a stage notes its own layers only
                total = total + (1.0 if name == "calls" else notes[layer][name])
        return total

    def _add_routing(
        self, _module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not torch.is_grad_enabled():  # a reference or a generation: it counts nothing
            return None
        routing = Routing(scale=self._loss_scale)
        self._router_counts.append(routing.notes)
        return args, {**keywords, "routing": routing}


def rebalance(
    model: nn.Module, sums: Mapping[str, Any], is_good: Tensor, step: int, total: int | None
) -> None:
    """Move the balance of a model's routers by what all ranks counted in a step, in place.

    Args:
        model: The model.
        sums: Reduced sums of the step.
        is_good: ``[]`` bool; a bad step changes nothing.
        step: Number of the step, from 0.
        total: Number of steps, for rates that depend on it.
    """
    noted = sums.get(EXPERTS, None)
    routed = None if noted is None else find_routed(model.modules())
    if noted is None or routed is None or routed.spec.moe is None:
        return
    rate = routed.spec.moe.rate(step, total)
    rows = {layer: row for row, layer in enumerate(routed.spec.routed.values())}
    for layer in routed.modules():
        if isinstance(layer, MoE):
            router = layer.router
            own = rate if router.weight.requires_grad else 0.0  # frozen, with its bias
            router.rebalance(noted["counts"][rows[router.layer]], is_good, own)


def expert_metrics(sums: Mapping[str, Any]) -> dict[str, Tensor]:
    """Turn what a step's routers noted into the numbers that one reports.

    Args:
        sums: Reduced sums of the step.

    Returns:
        ``[]`` float64 each; none for a dense model. ``moe/load_max`` and ``moe/load_min``: tokens
        of the busiest and the idlest expert over the mean of their layer; ``moe/dropped``: share
        of choices beyond capacity; ``moe/bias_range``: the widest of all layers; ``moe/aux_loss``
        and ``moe/z_loss``: means over positions and layers, unweighted.
    """
    if (noted := sums.get(EXPERTS, None)) is None:
        return {}
    counts = noted["counts"]
    mean = counts.mean(-1)
    return {
        "moe/load_max": (counts.amax(-1) / mean).amax(),
        "moe/load_min": (counts.amin(-1) / mean).amin(),
        "moe/dropped": 1.0 - noted["kept"].sum() / counts.sum(),
        "moe/bias_range": (noted["bias_range"] / noted["calls"]).amax(),
        "moe/aux_loss": noted["aux_loss"].sum() / noted["positions"].sum(),
        "moe/z_loss": noted["z_loss"].sum() / noted["positions"].sum(),
    }
