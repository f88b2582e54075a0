"""Reading a tensor-parallel plan: each module's style, and whether everything divides.

It needs no processes and changes nothing, so that a plan that cannot work stops on every rank
alike, before the first collective.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from forgekit.inputs import divisors, nearest_multiples, quoted
from forgekit.model.nf4 import is_packed
from forgekit.parallel.tensor.transformers_plan import transformers_plan

Style = str | ParallelStyle
Plan = Mapping[str, Style]

EXPERT = "expert"
"""The style of expert layers, which are sharded over another mesh."""

ROUTED = "routed"
"""The style of a layer with a router, experts and shared experts."""

GROUPED = "grouped"
"""The style of experts of transformers, ``[e ...]``: each rank has some of them."""

EXAMPLE = (
    'plan={"embed": "embedding", "layers.*.up": "colwise", "layers.*.down": "rowwise", '
    '"head": "colwise"}'
)


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
    plan = _own_plan(model, size) if plan is None else plan
    names = dict(model.named_modules(remove_duplicate=False))
    first = {module: name for name, module in reversed(names.items())}
    modules = {name: module for name, module in names.items() if first[module] == name}
    chosen: dict[str, Style] = {}
    for pattern, style in plan.items():
        matched = [first[module] for name, module in names.items() if fnmatchcase(name, pattern)]
        _check_style(style, pattern)
        if style != EXPERT and not matched:
            raise ValueError(_unmatched(pattern, [name for name in names if name]))
        chosen |= dict.fromkeys(matched, style)
    for name, style in chosen.items():
        _check_kind(name, modules[name], style)
    experts = [pattern for pattern, style in plan.items() if style == EXPERT]
    experts += [f"{name}.router" for name, style in chosen.items() if style == ROUTED]
    unnamed = [n for n in _with_parameters(modules, experts) if n not in chosen]
    if unnamed and "sequence" in chosen.values():
        raise ValueError(
            f"the plan shards positions ('sequence') and gives {unnamed} no style; gradients of "
            "what sees only a rank's positions would stay unsummed. Give each of them one: "
            "'sequence' for norms, 'heads' for norms of heads, 'replicate' for what sees all "
            "positions."
        )
    chosen |= dict.fromkeys(unnamed, "replicate")
    _check_sizes(modules, chosen, size)
    return {name: chosen[name] for name in modules if chosen.get(name, EXPERT) != EXPERT}


def _own_plan(model: nn.Module, size: int) -> Plan:
    plan = getattr(model, "plan", None)
    if isinstance(plan, Mapping):
        return plan
    if (theirs := transformers_plan(model, size)) is not None:
        return theirs
    raise ValueError(
        f"tp is {size} and {type(model).__name__} has no plan of its own; pass plan=, for example "
        f"{EXAMPLE}, or set tp to 1."
    )


def _check_style(style: Any, pattern: str) -> None:
    names = [*KINDS, EXPERT]
    if style not in names and not isinstance(style, ParallelStyle):
        raise ValueError(
            f"the plan gives {pattern!r} the style {style!r}; it is one of "
            f"{', '.join(map(repr, names))}, or a ParallelStyle of torch."
        )


def _unmatched(pattern: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    return (
        f"the plan's pattern {pattern!r} matches no module; the nearest names are "
        f"{', '.join(map(repr, nearest))}. Correct it or leave it out."
    )


Sizes = list[tuple[str, int]]


class Kind(NamedTuple):
    """What a style is for.

    Attributes:
        of: The modules, in words.
        fits: Whether a module is one.
        sizes: What ``tp`` must divide, with the numbers, by the module and its name.
    """

    of: str
    fits: Callable[[Any], bool]
    sizes: Callable[[Any, str], Sizes] = lambda _m, _name: []


def _is_plain(module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding):
        return False
    return module.max_norm is None and not module.sparse and not module.scale_grad_by_freq


def _is_norm(module: nn.Module) -> bool:
    """Whether it works on each position by itself, as far as its parameters show."""
    is_leaf = next(module.children(), None) is None
    return is_leaf and all(p.ndim == 1 for p in module.parameters())


def _are_grouped(module: Any) -> bool:
    is_theirs = hasattr(module, "is_transposed")
    return is_theirs and all(len(p) == module.num_experts for p in module.parameters())


def _widths(module: Any, name: str) -> Sizes:
    """The widths that experts state; one that is not would be whole beside parts, unsummed."""
    experts = module.experts
    for leaf, _ in experts.named_parameters(recurse=False):
        if leaf not in experts.widths:
            raise ValueError(
                f"'{name}.experts.{leaf}' cannot be tensor-parallel: experts say the widths of "
                f"{quoted(experts.widths)} only. Add its own, None if every rank needs it whole, "
                "or use tp=1."
            )
    shapes = {leaf: experts.get_parameter(leaf).shape for leaf in experts.widths}
    return [
        (f"the width of '{name}.experts.{leaf}'", 0 if dim is None else shapes[leaf][dim])
        for leaf, dim in experts.widths.items()
    ]


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "colwise": Kind(
            "nn.Linear",
            lambda m: isinstance(m, nn.Linear),
            lambda m, name: [(f"out_features of {name!r}", m.out_features)],
        ),
        "rowwise": Kind(
            "nn.Linear",
            lambda m: isinstance(m, nn.Linear),
            lambda m, name: [(f"in_features of {name!r}", m.in_features)],
        ),
        "embedding": Kind(
            "an nn.Embedding without max_norm, sparse and scale_grad_by_freq",
            _is_plain,
            lambda m, name: [(f"the vocabulary of {name!r}", m.num_embeddings)],
        ),
        "sequence": Kind(
            "norms and nn.Dropout", lambda m: isinstance(m, nn.Dropout) or _is_norm(m)
        ),
        "heads": Kind("norms of a head's channels and activations with one weight", _is_norm),
        "channels": Kind(
            "modules of parameters [channels ...] that are no norms",
            lambda m: bool(m._parameters) and "Norm" not in type(m).__name__,
            lambda m, name: [
                (f"the first dimension of '{name}.{leaf}'", p.shape[0] if p.ndim else 1)
                for leaf, p in m.named_parameters(recurse=False)
            ],
        ),
        "replicate": Kind("any module", lambda _: True),
        ROUTED: Kind(
            "layers with a router, experts that say their widths, and a `reduce` socket",
            lambda m: hasattr(m, "reduce") and hasattr(getattr(m, "experts", None), "widths"),
            _widths,
        ),
        GROUPED: Kind(
            "experts of transformers 5, whose parameters are [experts ...]",
            _are_grouped,
            lambda m, name: [(f"the number of experts of {name!r}", m.num_experts)],
        ),
    }
)


def _check_kind(name: str, module: nn.Module, style: Style) -> None:
    kind = KINDS.get(style) if isinstance(style, str) else None
    if kind is not None and not kind.fits(module):
        is_leaf = next(module.children(), None) is None
        raise ValueError(
            f"style {style!r} is for {kind.of}; {name!r} is {module if is_leaf else type(module)}. "
            "Narrow the pattern or choose another style."
        )
    weight = module._parameters.get("weight")
    if style != "replicate" and weight is not None and is_packed(weight):
        raise ValueError(
            f'{name!r} is packed (add_lora(base="nf4")), and a packed matrix is sharded by FSDP '
            f"alone, not by style {style!r}. Use tp=1, or leave base out."
        )
    if style in ("colwise", "rowwise", "embedding") and "weight" not in module._parameters:
        raise ValueError(
            f"{name!r} computes its weight (weight norm, a parametrization), so style {style!r} "
            "has none to shard, and each rank would add up the whole product. Bake the weight in "
            "(torch.nn.utils.parametrize.remove_parametrizations), or leave tp at 1."
        )


def _with_parameters(modules: Mapping[str, nn.Module], experts: list[str]) -> list[str]:
    """Names of modules with parameters of their own, but for those of experts."""
    found = []
    for name, module in modules.items():
        own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
        parts = name.split(".")
        above = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
        is_expert = any(fnmatchcase(n, pattern) for pattern in experts for n in (*above, *own))
        if own and not is_expert:
            found.append(name)
    return found


def _check_sizes(modules: Mapping[str, nn.Module], chosen: Mapping[str, Style], size: int) -> None:
    for name, style in chosen.items():
        parent = modules.get(name.rpartition(".")[0])
        if style == "colwise" and parent is not None and _head_channels(parent):
            _check_heads(name.rpartition(".")[0], parent, chosen, size)
    for name, style in chosen.items():
        kind = KINDS.get(style) if isinstance(style, str) else None
        for what, number in () if kind is None else kind.sizes(modules[name], name):
            _check_divides(what, number, size)


def _check_divides(what: str, features: int, size: int) -> None:
    if features % size:
        nearest = nearest_multiples(features, size)
        raise ValueError(
            f"{what} is {features}, which tp {size} must divide; {nearest}. "
            f"Change it, or tp to one of {divisors(features)}."
        )


def _check_heads(name: str, parent: nn.Module, chosen: Mapping[str, Style], size: int) -> None:
    """Whole heads stay on one rank: as many query heads everywhere, and key and value heads."""
    channels = _head_channels(parent)
    projections = {
        leaf: int(child.out_features) // channels  # pyright: ignore[reportArgumentType]
        for leaf, child in parent.named_children()
        if chosen.get(f"{name}.{leaf}" if name else leaf) == "colwise"
    }
    if any(heads % size for heads in projections.values()):
        shown = ", ".join(f"{leaf} {heads}" for leaf, heads in projections.items())
        raise ValueError(
            f"the heads of {name!r} ({shown}; {channels} channels each) must be divisible by tp "
            f"{size}, key and value heads too. Change their numbers, or tp to one of "
            f"{divisors(math.gcd(*projections.values()))}."
        )


def _head_channels(parent: nn.Module) -> int:
    for name in ("channels", "head_dim"):
        if isinstance(value := getattr(parent, name, None), int) and value > 0:
            return value
    return 0
