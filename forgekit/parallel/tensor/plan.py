"""Reading of tensor-parallel plans: the style of each module, and checks of divisibility.

It needs no processes and changes nothing, so that a plan that cannot work stops on every rank
alike, before the first collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from torch import nn

from forgekit.checks import divisors, nearest_multiples
from forgekit.model.nf4 import is_packed
from forgekit.parallel.layout import EXPERT, match_plan
from forgekit.parallel.tensor.styles import GROUPED, PARAMETER_LISTS, ROUTED, STYLES

Plan = Mapping[str, str]

TRANSFORMERS_EXPERTS = "moe_tp_experts"
"""Style of transformers for a module of experts, whose parameters have entries too.

Its style would shard the width of each expert, gate and projection side by side in one tensor; here
each rank has whole experts instead.
"""

TRANSFORMERS_STYLES: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "colwise_gather_output": "colwise_gathered",
        "rowwise_split_input": "rowwise_split",
        "replicated_with_grad_allreduce": "heads",
        TRANSFORMERS_EXPERTS: GROUPED,
    }
)
"""Names here of transformers' styles; its norms see a rank's heads."""


def read_plan(model: nn.Module, size: int, plan: Plan | None = None) -> dict[str, str]:
    """Find each module's style and check divisibility; nothing is changed.

    Args:
        model: The whole model.
        size: Ranks that share each matrix.
        plan: See ``apply_plan``.

    Returns:
        Styles by module name, in the order of registration; those of experts are left out.

    Raises:
        ValueError: If there is no plan, a pattern matches nothing, a style is unknown or does not
            fit the module, a module with parameters lacks a style where the residual stream is
            sharded, or features, heads or the vocabulary are not divisible by ``size``.
    """
    if size == 1:
        return {}
    if plan is None and (plan := model_plan(model, size)) is None:
        raise ValueError(
            f"tp is {size} and {type(model).__name__} has no plan of its own; set tp to 1, or pass "
            'for example plan={"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'
        )
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        if style not in (*STYLES, EXPERT):
            raise ValueError(
                f"the plan gives {pattern!r} the style {style!r}; it is one of "
                f"{', '.join(map(repr, (*STYLES, EXPERT)))}."
            )
    styles = match_plan(model, plan)
    for name, style in styles.items():
        _check_kind(name, modules[name], style)
        _check_sizes(name, modules, style, size)
    # Handled by the experts' styles, with all submodules.
    handled = [name for name, style in styles.items() if style == EXPERT]
    handled += [f"{name}.router" for name, style in styles.items() if style == ROUTED]
    unnamed = [
        name
        for name, module in modules.items()
        if name not in styles
        and next(module.parameters(recurse=False), None) is not None
        and not any(f"{name}.".startswith(f"{outer}.") for outer in handled)
    ]
    if unnamed and "sequence" in styles.values():
        raise ValueError(
            f"the plan shards positions ('sequence') but gives {unnamed} no style. Use 'sequence' "
            "for norms, 'heads' for norms of heads, 'replicate' for what sees all positions."
        )
    takers = [
        name
        for name, module in modules.items()
        if any(isinstance(child, PARAMETER_LISTS) for child in module.children())
        and "sequence" not in styles.values()
    ]
    styles = dict.fromkeys([*unnamed, *takers], "replicate") | styles
    return {name: styles[name] for name in modules if styles.get(name, EXPERT) != EXPERT}


def model_plan(model: nn.Module, size: int) -> Plan | None:
    """Return the plan of a model, or of a transformers model's configuration.

    Of the latter, embeddings and head are shared by tokens, and what does not divide stays whole: a
    vocabulary, experts.

    Args:
        model: Any model.
        size: Ranks that share each matrix.

    Returns:
        Patterns of module names to styles; None if the model brings no plan.

    Raises:
        ValueError: If transformers has a style there for which there is none here.
    """
    if isinstance(plan := getattr(model, "plan", None), Mapping):
        return plan
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not isinstance(plan, Mapping):
        return None
    experts = tuple(f"{n}." for n, style in plan.items() if style == TRANSFORMERS_EXPERTS)
    plan = {name: style for name, style in plan.items() if not name.startswith(experts)}
    odd = [f"{name}: {style}" for name, style in plan.items() if style not in TRANSFORMERS_STYLES]
    if odd:
        raise ValueError(
            f"the plan of {type(model).__name__} has {odd[0]!r}, an unknown style. Pass plan=, or "
            "set tp to 1."
        )
    names = {module: name for name, module in model.named_modules()}
    base = names.get(getattr(model, "base_model", model))
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        pattern, style = f"{base}.{pattern}" if base else pattern, TRANSFORMERS_STYLES[style]
        matched: list[Any] = [module for module, n in names.items() if fnmatchcase(n, pattern)]
        is_even = style != GROUPED or all(not module.num_experts % size for module in matched)
        # The configuration also names modules that only some models of its type have.
        if matched and is_even:
            styles[pattern] = style
    for get, style in (("get_output_embeddings", "colwise"), ("get_input_embeddings", "embedding")):
        ends: Any = getattr(model, get, lambda: None)()
        if ends is not None and not len(ends.weight) % size:
            styles[names[ends]] = style
    return styles


def _check_kind(name: str, module: nn.Module, style: str) -> None:
    kind = STYLES.get(style)
    if kind is not None and not kind.fits(module):
        is_leaf = next(module.children(), None) is None
        raise ValueError(
            f"style {style!r} is for {kind.of}; {name!r} is {module if is_leaf else type(module)}."
        )
    weight = module._parameters.get("weight")
    if style != "replicate" and weight is not None and is_packed(weight):
        raise ValueError(
            f'{name!r} is packed (add_lora(base="nf4")), which FSDP alone can shard. Use tp=1, or '
            "leave base out."
        )
    shards = style.startswith(("colwise", "rowwise", "embedding"))
    if shards and "weight" not in module._parameters:
        raise ValueError(
            f"{name!r} computes its weight (a parametrization); style {style!r} cannot shard it. "
            "Call torch.nn.utils.parametrize.remove_parametrizations first, or use tp=1."
        )


def _check_sizes(name: str, modules: Mapping[str, nn.Module], style: str, size: int) -> None:
    module, parent = modules[name], modules.get(name.rpartition(".")[0])
    kind = STYLES.get(style)
    for leaf, dim in kind.sharded(module).items() if kind is not None else ():
        if dim is None:
            continue
        number = (*module.get_parameter(leaf).shape, 1)[dim]
        shown = f"dimension {dim} of '{name}.{leaf}'"
        # Heads are not split: each rank has equally many query heads, and key and value heads.
        channels = _head_channels(parent) if style == "colwise" else 0
        if channels and number % channels == 0:
            number, shown = number // channels, f"the number of heads of {name!r}"
        if number % size:
            raise ValueError(
                f"{shown} is {number}, not a multiple of tp {size}; "
                f"{nearest_multiples(number, size)}. Change it, or tp to one of {divisors(number)}."
            )


def _head_channels(parent: nn.Module | None) -> int:
    for name in ("channels", "head_dim"):
        if isinstance(value := getattr(parent, name, None), int) and value > 0:
            return value
    return 0
