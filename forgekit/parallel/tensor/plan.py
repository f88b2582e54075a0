"""Reading a tensor-parallel plan: each module's style, and whether everything divides.

It needs no processes and changes nothing, so that a plan that cannot work stops on every rank
alike, before the first collective.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from forgekit.checks import divisors, nearest_multiples
from forgekit.model.nf4 import is_packed
from forgekit.parallel.layout import EXPERT

Style = str | ParallelStyle
Plan = Mapping[str, Style]

ROUTED = "routed"
"""The style of a layer with a router, experts and shared experts."""

GROUPED = "grouped"
"""The style of experts of transformers, ``[e ...]``: each rank has some of them."""

TRANSFORMERS_EXPERTS = "moe_tp_experts"
"""What transformers calls the style of a module of experts, of whose parameters it has entries too.

Its style would shard the width of each expert, gate and projection side by side in one tensor; here
each rank has whole experts instead.
"""

TRANSFORMERS_STYLES: Mapping[str, str] = MappingProxyType(
    {
        "colwise": "colwise",
        "rowwise": "rowwise",
        "replicated_with_grad_allreduce": "heads",
        TRANSFORMERS_EXPERTS: GROUPED,
    }
)
"""Styles of transformers, and what they are called here: its norms see a rank's heads."""


def read_plan(model: nn.Module, size: int, plan: Plan | None = None) -> dict[str, Style]:
    """Find each module's style and check that everything divides; nothing is changed.

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
    names = dict(model.named_modules(remove_duplicate=False))
    # A module that has several names is known by the first of them.
    first = {module: name for name, module in reversed(names.items())}
    modules = {name: module for name, module in names.items() if first[module] == name}
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        if style not in (*KINDS, EXPERT) and not isinstance(style, ParallelStyle):
            raise ValueError(
                f"the plan gives {pattern!r} the style {style!r}; it is one of "
                f"{', '.join(map(repr, (*KINDS, EXPERT)))}, or a ParallelStyle of torch."
            )
        matched = [first[module] for name, module in names.items() if fnmatchcase(name, pattern)]
        if style != EXPERT and not matched:  # see `find_experts`
            nearest = difflib.get_close_matches(pattern, filter(None, names), n=3, cutoff=0.0)
            raise ValueError(
                f"the plan's pattern {pattern!r} matches no module; the nearest names are "
                f"{', '.join(map(repr, nearest))}."
            )
        styles |= dict.fromkeys(matched, style)
    for name, style in styles.items():
        _check_kind(name, modules[name], style)
        _check_sizes(name, modules, style, size)
    experts = [pattern for pattern, style in plan.items() if style == EXPERT]
    experts += [f"{name}.router" for name, style in styles.items() if style == ROUTED]
    patterns = [*experts, *(f"{pattern}.*" for pattern in experts)]
    unnamed = [
        name
        for name, module in modules.items()
        if name not in styles
        and next(module.parameters(recurse=False), None) is not None
        and not any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if unnamed and "sequence" in styles.values():
        raise ValueError(
            f"the plan shards positions ('sequence') and gives {unnamed} no style, so gradients "
            "would stay unsummed. Give each one: 'sequence' for norms, 'heads' for norms of heads, "
            "'replicate' for what sees all positions."
        )
    styles |= dict.fromkeys(unnamed, "replicate")
    return {name: styles[name] for name in modules if styles.get(name, EXPERT) != EXPERT}


def model_plan(model: nn.Module, size: int) -> Plan | None:
    """Read the plan that a model brings, or the configuration of a model of transformers.

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
            f"the plan of {type(model).__name__} has {odd[0]!r}, a style that is not known here. "
            "Pass plan=, or set tp to 1."
        )
    names = {module: name for name, module in model.named_modules()}
    base = names.get(getattr(model, "base_model", model))
    styles: dict[str, Style] = {}
    for pattern, style in plan.items():
        pattern, style = f"{base}.{pattern}" if base else pattern, TRANSFORMERS_STYLES[style]
        matched: list[Any] = [module for module, n in names.items() if fnmatchcase(n, pattern)]
        is_even = style != GROUPED or all(not module.num_experts % size for module in matched)
        # The configuration names what some models of its kind have: dense layers, or experts.
        if matched and is_even:
            styles[pattern] = style
    for get, style in (("get_output_embeddings", "colwise"), ("get_input_embeddings", "embedding")):
        ends: Any = getattr(model, get, lambda: None)()
        if ends is not None and not len(ends.weight) % size:
            styles[names[ends]] = style
    return styles


class Kind(NamedTuple):
    """What a style is for.

    Attributes:
        of: The modules, in words.
        fits: Whether a module is one.
        sharded: Of a module, the parameters that ranks share, and the dimension of each.
    """

    of: str
    fits: Callable[[Any], bool]
    sharded: Callable[[Any], Mapping[str, int | None]] = lambda _: {}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _is_plain(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _is_norm(module: nn.Module) -> bool:
    """Whether it works on each position by itself, as far as its parameters show."""
    is_leaf = next(module.children(), None) is None
    return is_leaf and all(p.ndim == 1 for p in module.parameters())


def _is_routed(module: Any) -> bool:
    """A parameter whose width is not said would be whole beside parts, unsummed."""
    if not hasattr(module, "reduce") or not hasattr(getattr(module, "experts", None), "widths"):
        return False
    return all(n in module.experts.widths for n in module.experts._parameters)


def _are_grouped(module: Any) -> bool:
    has_experts = hasattr(module, "is_transposed")  # as those of transformers do
    return has_experts and all(len(p) == module.num_experts for p in module.parameters())


def _first_dims(module: nn.Module) -> dict[str, int]:
    return {name: 0 for name, _ in module.named_parameters(recurse=False)}


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "colwise": Kind("nn.Linear", _is_linear, lambda _: {"weight": 0}),
        "rowwise": Kind("nn.Linear", _is_linear, lambda _: {"weight": 1}),
        "embedding": Kind(
            "an nn.Embedding without max_norm, sparse and scale_grad_by_freq",
            _is_plain,
            lambda _: {"weight": 0},
        ),
        "sequence": Kind(
            "norms and nn.Dropout", lambda m: isinstance(m, nn.Dropout) or _is_norm(m)
        ),
        "heads": Kind("norms of a head's channels and activations with one weight", _is_norm),
        "channels": Kind(
            "modules of parameters [channels ...] that are no norms",
            lambda m: bool(m._parameters) and "Norm" not in type(m).__name__,
            _first_dims,
        ),
        "replicate": Kind("any module", lambda _: True),
        ROUTED: Kind(
            "layers with a router, a `reduce` socket, and experts that say all of their widths",
            _is_routed,
            lambda m: {f"experts.{leaf}": dim for leaf, dim in m.experts.widths.items()},
        ),
        GROUPED: Kind(
            "experts of transformers 5, whose parameters are [experts ...]",
            _are_grouped,
            _first_dims,
        ),
    }
)


def _check_kind(name: str, module: nn.Module, style: Style) -> None:
    kind = KINDS.get(style) if isinstance(style, str) else None
    if kind is not None and not kind.fits(module):
        is_leaf = next(module.children(), None) is None
        raise ValueError(
            f"style {style!r} is for {kind.of}; {name!r} is {module if is_leaf else type(module)}."
        )
    weight = module._parameters.get("weight")
    if style != "replicate" and weight is not None and is_packed(weight):
        raise ValueError(
            f'{name!r} is packed (add_lora(base="nf4")), which FSDP alone can shard, not style '
            f"{style!r}. Use tp=1, or leave base out."
        )
    if style in ("colwise", "rowwise", "embedding") and "weight" not in module._parameters:
        raise ValueError(
            f"{name!r} computes its weight (weight norm, a parametrization), so style {style!r} "
            "has none to shard, and each rank would add up the whole product. Bake it in "
            "(torch.nn.utils.parametrize.remove_parametrizations), or use tp=1."
        )


def _check_sizes(name: str, modules: Mapping[str, nn.Module], style: Style, size: int) -> None:
    module, parent = modules[name], modules.get(name.rpartition(".")[0])
    kind = KINDS.get(style) if isinstance(style, str) else None
    for leaf, dim in kind.sharded(module).items() if kind is not None else ():
        if dim is None:
            continue
        number = (*module.get_parameter(leaf).shape, 1)[dim]
        shown = f"dimension {dim} of '{name}.{leaf}'"
        # Whole heads stay on one rank: as many query heads everywhere, and key and value heads.
        channels = _head_channels(parent) if style == "colwise" else 0
        if channels and number % channels == 0:
            number, shown = number // channels, f"the number of heads of {name!r}"
        if number % size:
            raise ValueError(
                f"{shown} is {number}, which tp {size} must divide; "
                f"{nearest_multiples(number, size)}. Change it, or tp to one of {divisors(number)}."
            )


def _head_channels(parent: nn.Module | None) -> int:
    for name in ("channels", "head_dim"):
        if isinstance(value := getattr(parent, name, None), int) and value > 0:
            return value
    return 0
