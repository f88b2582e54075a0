"""A step's gradients, and the norm of each, in units that do not depend on how it was computed.

Between ``accumulate`` and ``update`` a parameter's ``.grad`` holds the loss scale times a *sum*
over targets, and of that this rank's shard. Whoever logs norms or looks for the layer that explodes
wants the gradient of the mean loss per target: the one that a single process would compute.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor

from forgekit.parallel.fsdp import fsdp_modules, release
from forgekit.parallel.layout import shard_and_owners, size_of, world_of
from forgekit.state import TrainState
from forgekit.steps.totals import Totals


def gradients(state: TrainState, totals: Totals, *, pattern: str = "*") -> dict[str, Tensor]:
    """Give the gradients of the token-mean loss, before clipping.

    Call it between ``reduce_totals`` and ``update``; a fused optimizer changes ``.grad``.

    Args:
        state: The state whose gradients ``accumulate`` left; nothing in it changes.
        totals: Reduced totals.
        pattern: Names of parameters, as ``"layers.0.*"``; each costs a copy of its gradient.

    Returns:
        By name a new tensor like the parameter: a DTensor where that is sharded, of which
        ``full_tensor()`` gives all. Parameters without a gradient, and those of other pipeline
        stages, are left out.

    Raises:
        KeyError: If the totals were not reduced.

    Examples:
        >>> from tensordict import TensorDict
        >>> from forgekit import Loss, accumulate, reduce_totals
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> state = TrainState.create(model, torch.optim.SGD(model.parameters()))
        >>> batch = TensorDict({"x": torch.tensor([[2.0], [4.0]])}, [2])
        >>> loss_fn = lambda model, batch: Loss(model(batch["x"]).sum(), 2)
        >>> totals = reduce_totals(accumulate(state, [batch], loss_fn), state)
        >>> gradients(state, totals)["weight"]
        tensor([[3.]])
    """
    unit = _unit(totals)
    release(fsdp_modules(*state.layout.roots(state.model)))
    return {
        name: parameter.grad.detach() * unit.to(parameter.grad.device)
        for name, parameter in state.model.named_parameters()
        if parameter.grad is not None and fnmatchcase(name, pattern)
    }


def grad_norms(state: TrainState, totals: Totals) -> dict[str, Tensor]:
    """Return the L2 norms of the token-mean loss's gradients, by parameter.

    Every rank calls it: one collective, of a number for each parameter. Call it between
    ``reduce_totals`` and ``update``. Nothing is read by the host.

    Args:
        state: The state whose gradients ``accumulate`` left; nothing in it changes.
        totals: Reduced totals.

    Returns:
        ``[]`` float64 each, before clipping, the same on every rank: of the whole parameters, those
        of other pipeline stages too. 0 where there is no gradient.

    Raises:
        KeyError: If the totals were not reduced.
    """
    unit = _unit(totals)
    release(fsdp_modules(*state.layout.roots(state.model)))
    squares = _squares(state, _names(state, totals))
    return {name: unit * square.sqrt() for name, square in squares.items()}


def _unit(totals: Totals) -> Tensor:
    """Factor from a raw gradient to the mean's, ``[]`` float64; without targets, to the sum's."""
    totals["grad_sq"]  # raises before `reduce_totals`
    targets = totals["targets"]
    return (totals["loss_scale"] * torch.where(targets > 0, targets, 1.0)).reciprocal()


def _names(state: TrainState, totals: Totals) -> list[str]:
    """All parameters' names, the same list on every rank."""
    if (agreed_names := totals.checked.agreed_names) is not None:
        return list(agreed_names.parameters)
    return [name for name, _ in state.model.named_parameters()]


def _squares(state: TrainState, names: list[str]) -> dict[str, Tensor]:
    """Squared norms of the raw gradients over all ranks, by name."""
    world = world_of(state.mesh)
    raw = {n: p.grad for n, p in state.model.named_parameters() if p.grad is not None}
    zero = torch.zeros((), dtype=torch.float64, device=state.targets.device)
    squares = dict.fromkeys(names, zero)
    for name, gradient in raw.items():
        # The ranks of other pipeline stages hold other parameters, never the same shard.
        shard, owners = shard_and_owners(gradient, world // size_of(state.mesh, "pp"))
        norm = torch.linalg.vector_norm(shard, dtype=torch.float64).to(zero.device)
        squares[name] = norm.square() / owners
    vector = torch.stack([squares[name] for name in names])
    if world > 1:
        dist.all_reduce(vector)
    return dict(zip(names, vector.unbind(), strict=True))
