"""What one looks at beside the loss: gradient norms by layer, gradient noise, loads of experts.

A hook is a function, and it is called where a recipe calls it. Those of gradients stand between
``reduce_totals`` and ``update``: ``make_step(..., gradient_hook=...)`` calls one there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor

from forgekit.checks import check_integers
from forgekit.model.moe import MoE
from forgekit.parallel.fsdp import clear_gradients, fsdp_modules, release
from forgekit.parallel.layout import size_of, world_of
from forgekit.state import TrainState
from forgekit.steps.accumulate import accumulate
from forgekit.steps.experts import find_routed
from forgekit.steps.gradients import grad_norms
from forgekit.steps.make_step import GradientHook
from forgekit.steps.micro_batch import LossFn
from forgekit.steps.totals import Totals, reduce_totals, with_gradient_square

WIDE = torch.float32
"""The narrowest dtype in which gradients are added."""
LOAD = "moe/load/"
"""The metric of a layer's loads is this and the layer's name."""


def every_steps(steps: int, hook: GradientHook) -> GradientHook:
    """Call a gradient hook in every ``steps``-th step only, so that it costs nothing in others.

    Args:
        steps: Steps from one call to the next; the step that takes a state to ``state.step ==
            steps`` is the first. Choose a multiple of ``log_every``, or no row will have it.
        hook: What to call; every rank calls it in the same steps.

    Raises:
        ValueError: If ``steps`` is less than 1.
    """
    check_integers(steps=(steps, 1))
    return lambda state, totals: {} if (state.step + 1) % steps else hook(state, totals)


def layer_norms(state: TrainState, totals: Totals) -> dict[str, Tensor]:
    """Give the norm of the token-mean gradient of each layer, as a gradient hook.

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


def gradient_noise(
    state: TrainState, batches: Iterable[TensorDictBase], loss_fn: LossFn
) -> dict[str, Tensor]:
    r"""Estimate how noisy the gradient is, from the norms of micro-batches' own gradients.

    A micro-batch of :math:`n` targets has a mean gradient whose expected squared norm is
    :math:`|G|^2 + S / n`, where :math:`G` is the true gradient and :math:`S` the trace of its
    covariance per target. The mean over micro-batches and the gradient of all of them give two
    equations for the two. :math:`S / |G|^2` is the simple noise scale: the batch size, in targets,
    below which doubling it nearly halves the steps that are needed. Source: McCandlish et al., "An
    Empirical Model of Large-Batch Training", 2018, appendix A.

    It costs the gradients of these micro-batches once more, and the memory of one gradient. No
    gradient is left behind, nothing in ``state`` changes. Dropout is the same in each of them.

    Args:
        state: The state; every rank calls it. Parameters that its optimizer does not hold are left
            out.
        batches: At least two micro-batches, as for ``accumulate``; those of the next step will do.
            A pipeline has to be able to run each alone.
        loss_fn: ``loss_fn(model, batch) -> Loss``.

    Returns:
        ``[]`` float64, the same on every rank: ``noise/trace`` and ``noise/gradient_sq``, each
        without bias, and ``noise/scale``, their quotient. A single estimate is noisy, and
        ``noise/gradient_sq`` may be negative: average each of the two over time, then divide. NaN
        if fewer than two micro-batches have targets.

    Raises:
        ValueError: If there are fewer than two micro-batches.
    """
    pulled = list(batches)
    if len(pulled) < 2:
        raise ValueError(
            f"gradient_noise got {len(pulled)} of at least 2 micro-batches, whose gradients it "
            "compares. Lower batch_size, so that a step has more of them."
        )
    sharded = fsdp_modules(*state.layout.roots(state.model))
    sums: dict[Tensor, Tensor] = {}
    parts = []
    try:
        for batch in pulled:
            totals = accumulate(state, [batch], loss_fn, audit=False)
            parts.append(reduce_totals(totals, state))
            release(sharded)
            for p in state.model.parameters():
                if p.grad is not None:
                    wide = p.grad.detach().to(torch.promote_types(p.dtype, WIDE))
                    sums[p] = sums[p].add_(wide) if p in sums else wide.clone()
        for p, total in sums.items():
            p.grad = total.to(p.dtype)
        return _noise(state, parts)
    finally:
        clear_gradients(sharded)


def _noise(state: TrainState, parts: Sequence[Totals]) -> dict[str, Tensor]:
    """Solve for the two unknowns; the parameters hold the sum of the parts' gradients."""
    targets = torch.stack([part["targets"] for part in parts])
    scale = parts[-1]["loss_scale"].double()
    squares = torch.stack([part["grad_sq"] for part in parts]) / scale.square()
    whole = with_gradient_square(parts[-1], state)["grad_sq"]
    if world_of(state.mesh) > 1:
        dist.all_reduce(whole)
    large = whole / (scale * targets.sum()).square()
    has = targets > 0
    count = has.sum()
    small = torch.where(has, squares / targets.square(), 0.0).sum() / count
    per_part = torch.where(has, targets.reciprocal(), 0.0).sum() / count
    trace = (small - large) / (per_part - targets.sum().reciprocal())
    true = large - trace / targets.sum()
    return {"noise/trace": trace, "noise/gradient_sq": true, "noise/scale": trace / true}


@torch.no_grad()
def expert_loads(state: TrainState) -> dict[str, list[float]]:
    """Read how busy each expert was in the last good step; call it on every rank.

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
