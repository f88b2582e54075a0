"""The tensor-parallel plan that a model of transformers brings, in the styles of this package."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

STYLES: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "replicated_with_grad_allreduce": "heads",
    }
)
"""Theirs, and what is called so here: the norms of a head see this rank's heads."""


def transformers_plan(model: nn.Module, size: int) -> dict[str, str] | None:
    """Read the plan of a model's configuration; embeddings and head are shared by tokens.

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
    if odd := [f"{name}: {style}" for name, style in theirs.items() if style not in STYLES]:
        raise ValueError(
            f"the plan of {type(model).__name__} has {odd[0]!r}, and the styles {[*STYLES]} are "
            "taken over. Pass plan=, or set tp to 1."
        )
    base = getattr(model, "base_model", model)
    names = {module: name for name, module in model.named_modules()}
    prefix = f"{names[base]}." if names.get(base) else ""
    plan = {f"{prefix}{name}": STYLES[style] for name, style in theirs.items()}
    for get, style in (("get_output_embeddings", "colwise"), ("get_input_embeddings", "embedding")):
        ends: Any = getattr(model, get, lambda: None)()
        if ends is not None and not len(ends.weight) % size:
            plan[names[ends]] = style
    return plan
