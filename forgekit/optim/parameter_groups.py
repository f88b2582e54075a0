"""Which parameters decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from forgekit.inputs import brief, check_numbers
from forgekit.optim.chain import Chained


def decay_groups(
    model: nn.Module, weight_decay: float, *, without: Iterable[nn.Parameter] = ()
) -> list[dict[str, Any]]:
    """Split the trainable parameters into matrices that decay and the rest, which does not.

    Embeddings, norms and biases do not decay: pulling a rare token's embedding or a norm's scale
    towards zero regularises nothing. An output projection tied to the embedding is an embedding.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        weight_decay: Decay of the matrices, per unit of learning rate.
        without: Parameters that another optimizer takes.

    Returns:
        Parameter groups for any ``torch.optim.Optimizer``; groups without parameters are left out.

    Raises:
        ValueError: If ``weight_decay`` is negative or not finite, or nothing is trainable.

    Examples:
        >>> groups = decay_groups(nn.Linear(2, 2), weight_decay=0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (1, 0.0)]
    """
    check_numbers(weight_decay=(weight_decay, 0))
    embedded = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("the model has no trainable parameter; set requires_grad on some.")
    taken = set(without)
    decayed = [p for p in trainable if p.ndim >= 2 and p not in embedded | taken]
    kept = [p for p in trainable if (p.ndim < 2 or p in embedded) and p not in taken]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]] or groups[:1]


def parameters_by_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, list[str]]:
    """List which optimizer takes which parameters, for a table at the start of a run.

    Args:
        model: The model.
        optimizer: Its optimizer, a chain of several or one.

    Returns:
        Names of parameters by the class of the optimizer that steps them, those of trainable
        parameters that nobody steps under ``"none"``.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        >>> parameters_by_optimizer(model, Optimizer([model[0].weight], {}))
        {'Optimizer': ['0.weight'], 'none': ['1.weight']}
    """
    members = optimizer.members if isinstance(optimizer, Chained) else (optimizer,)
    steps = {p: type(m).__name__ for m in members for g in m.param_groups for p in g["params"]}
    found: dict[str, list[str]] = {type(member).__name__: [] for member in members}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or parameter in steps:
            found.setdefault(steps.get(parameter, "none"), []).append(name)
    return found


def check_betas(betas: tuple[float, float]) -> None:
    """Refuse decay rates of two moments that are not two, or out of range.

    Raises:
        ValueError: With what was given.
    """
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas are {brief(betas)}; each of the two is at least 0 and below 1.")
