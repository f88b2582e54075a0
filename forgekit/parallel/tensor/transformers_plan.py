"""The tensor-parallel plan that a model of transformers brings, in the styles of this package."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import nn

EXPERTS = "moe_tp_experts"
"""Their style of a module of experts; the entries of its parameters stand behind it."""

STYLES: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "replicated_with_grad_allreduce": "heads",
        EXPERTS: "grouped",
    }
)
"""Theirs, and what is called so here: the norms of a head see this rank's heads."""


def transformers_plan(model: nn.Module, size: int) -> dict[str, str] | None:
    """Read the plan of a model's configuration; embeddings and head are shared by tokens.

    Where theirs shards the width of every expert, gate and projection side by side in one tensor,
    each rank has whole experts here. What does not divide stays whole: a vocabulary, experts.

    Args:
        model: A model of transformers, or any other.
        size: Ranks that share each matrix.

    Returns:
        Patterns of module names to styles; None if the model brings no plan.

    Raises:
        ValueError: If its plan has a style for which there is none here.
    """
    config = getattr(model, "config", None)
    theirs = getattr(config, "base_model_tp_plan", None)
    if not isinstance(theirs, Mapping):
        return None
    experts = tuple(f"{name}." for name, style in theirs.items() if style == EXPERTS)
    theirs = {name: style for name, style in theirs.items() if not name.startswith(experts)}
    if odd := [f"{name}: {style}" for name, style in theirs.items() if style not in STYLES]:
        raise ValueError(
            f"the plan of {type(model).__name__} has {odd[0]!r}, and the styles {[*STYLES]} are "
            "taken over. Pass plan=, or set tp to 1."
        )
    names = {module: name for name, module in model.named_modules()}
    base = names.get(getattr(model, "base_model", model))
    plan = {f"{base}.{name}" if base else name: STYLES[style] for name, style in theirs.items()}
    # It names what some models of its kind have: dense layers, or experts.
    plan = {name: style for name, style in plan.items() if _fitting(names, name, style, size)}
    for get, style in (("get_output_embeddings", "colwise"), ("get_input_embeddings", "embedding")):
        ends: Any = getattr(model, get, lambda: None)()
        if ends is not None and not len(ends.weight) % size:
            plan[names[ends]] = style
    return plan


def _fitting(names: Mapping[nn.Module, str], pattern: str, style: str, size: int) -> bool:
    """Whether a pattern is of use: it matches modules, and experts can be divided."""
    found: list[Any] = [module for module, name in names.items() if fnmatchcase(name, pattern)]
    is_even = style != "grouped" or all(not module.num_experts % size for module in found)
    return bool(found) and is_even
