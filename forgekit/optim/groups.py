"""Weight-decay groups, and the role of each parameter.

Roles are read from the model's own table of names, never from shapes: embeddings, heads, routers
and the factors of adapters are matrices too, but optimizers of matrices are meant for projections
between hidden states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import Optimizer

from forgekit.checks import check_choice, check_numbers
from forgekit.optim.chain import Chained

ROLES = ("matrix", "embedding", "head", "router", "norm", "adapter", "other")
"""Valid roles; a parameter that matches no pattern is "other"."""


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Group trainable parameters by weight decay: matrices decay, everything else does not.

    Embeddings, norms and biases do not decay: pulling a rare token's embedding or a norm's scale
    towards zero regularises nothing. An output projection tied to the embedding is an embedding.

    Args:
        model: The model, after ``parallelize`` where there is more than one rank.
        weight_decay: Decay of the matrices, per unit of learning rate.

    Returns:
        Parameter groups for any ``torch.optim.Optimizer``; groups without parameters are left out.

    Raises:
        ValueError: If ``weight_decay`` is negative or not finite, or no parameter is trainable.

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
    decayed = [p for p in trainable if p.ndim >= 2 and p not in embedded]
    kept = [p for p in trainable if p.ndim < 2 or p in embedded]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def parameters_by_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, list[str]]:
    """List the parameters that each optimizer updates.

    Args:
        model: The model.
        optimizer: Its optimizer, possibly a chain of several.

    Returns:
        Parameter names by optimizer class, or by the transforms of a chain; trainable parameters
        without an optimizer are under ``"none"``.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        >>> parameters_by_optimizer(model, Optimizer([model[0].weight], {}))
        {'Optimizer': ['0.weight'], 'none': ['1.weight']}
    """
    members = optimizer.members if isinstance(optimizer, Chained) else (optimizer,)
    steps = {p: name_of(m) for m in members for g in m.param_groups for p in g["params"]}
    by_optimizer: dict[str, list[str]] = {name_of(member): [] for member in members}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or parameter in steps:
            by_optimizer.setdefault(steps.get(parameter, "none"), []).append(name)
    return by_optimizer


def name_of(optimizer: Optimizer) -> str:
    """Name an optimizer: its chain of transforms, or its class."""
    return getattr(optimizer, "label", type(optimizer).__qualname__)


def roles_of(model: nn.Module, table: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the role of each trainable parameter.

    Args:
        model: The model, or a module around models that have a table.
        table: Patterns of parameter names to roles; the first match counts. Defaults to the
            ``roles`` of the model and its modules, with names relative to the module.

    Returns:
        Roles by parameter name.

    Raises:
        ValueError: If there is no table, it has an unknown role, or a pattern of ``table`` matches
            no parameter.

    Examples:
        >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2, bias=False))
        >>> roles_of(model, {"1.weight": "matrix"})
        {'0.weight': 'other', '1.weight': 'matrix'}
    """
    held = {name: getattr(module, "roles", None) for name, module in model.named_modules()}
    tables = {name: each for name, each in held.items() if isinstance(each, Mapping)}
    tables = tables if table is None else {"": table}
    if not tables:
        names = [name for name, _ in model.named_parameters()]
        raise ValueError(
            f"{type(model).__name__} has no attribute 'roles' that says which parameters are "
            "matrices; their shapes do not. Pass patterns of names: "
            f'roles={{"layers.*.weight": "matrix"}}; it has {names[:3]} and others.'
        )
    for role in (role for patterns in tables.values() for role in patterns.values()):
        check_choice("a role", role, ROLES)
    check_patterns("roles", model, table or ())
    roles = {name: "other" for name, p in model.named_parameters() if p.requires_grad}
    for module, patterns in reversed(tables.items()):  # outer tables take precedence
        prefix = f"{module}." if module else ""
        for name in roles:
            if name.startswith(prefix):
                inner = name.removeprefix(prefix)
                matching = (role for p, role in patterns.items() if fnmatchcase(inner, p))
                roles[name] = next(matching, "other")
    return roles


def check_patterns(argument: str, model: nn.Module, patterns: Iterable[str]) -> None:
    """Raise if a pattern matches no parameter.

    A model that is split into pipeline stages is not checked: the pattern may match a parameter of
    another rank.

    Args:
        argument: Name of the argument, for the message.
        model: The model.
        patterns: Patterns of parameter names.

    Raises:
        ValueError: If a pattern matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    is_whole = not any(getattr(module, "is_absent", False) for module in model.modules())
    for pattern in patterns:
        if is_whole and not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"the pattern {pattern!r} of {argument} matches no parameter of "
                f"{type(model).__name__}; it has {names[:3]} and others."
            )
