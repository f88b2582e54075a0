"""Give matrices of a model adapters, by patterns of names, and freeze all else."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Literal, get_args

import attrs
from torch import nn
from torch.distributed.tensor import DTensor

from forgekit.inputs import brief, check_choice, check_integers, check_numbers, is_integer, quoted
from forgekit.model.lora_layers import Adapter, LoraExperts, LoraLinear, lora_layers
from forgekit.model.moe import Experts
from forgekit.model.nf4 import PIECE
from forgekit.model.transformer import Transformer

NONE = MappingProxyType({})
STACKS = ("gate", "up", "down")
Base = Literal["nf4"]
"""How the matrices that get an adapter are held."""


def add_adapters(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: Collection[str] | str,
    rank_pattern: Mapping[str, int] = NONE,
    alpha_pattern: Mapping[str, float] = NONE,
    dropout: float = 0.0,
    dora: bool = False,
    rslora: bool = False,
    base: Base | None = None,
    seed: int = 0,
) -> nn.Module:
    """Add adapters to the matrices that match, and freeze all else, in place; see ``add_lora``."""
    _check_options(rank, alpha, dropout, seed, rank_pattern, alpha_pattern)
    if base is not None:
        check_choice("base", base, get_args(Base))
    check_sharded(model)
    template = Adapter(
        name="", rank=rank, alpha=alpha, dropout=dropout, dora=dora, rslora=rslora, seed=seed
    )
    names = _match(model, [targets] if isinstance(targets, str) else targets)
    ranks, alphas = _by_name(names, rank_pattern, rank), _by_name(names, alpha_pattern, alpha)
    chosen = [attrs.evolve(template, name=n, rank=ranks[n], alpha=alphas[n]) for n in names]
    return add_chosen(model, chosen, base)


def add_chosen(model: nn.Module, chosen: list[Adapter], base: Base | None = None) -> nn.Module:
    """Add adapters to the matrices that they name, and freeze all else, in place."""
    if find_matrices(model).keys() & {"", *STACKS}:
        raise ValueError(
            f"the model is a {type(model).__name__} itself, and adapters take the place of a "
            "model's layers. Put it into a module: torch.nn.Sequential(model)."
        )
    _check_matrices(model, chosen)
    if base is not None:
        _check_packable(model, chosen)
    for adapter in chosen:
        _add(model, adapter, packs=base is not None)
    trained = set(adapter_names(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model


def find_matrices(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that adapters are for, by name of the matrix: a linear layer's or a stack's."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = module
        elif isinstance(module, Experts):
            found |= dict.fromkeys((_join(name, stack) for stack in STACKS), module)
    return found


def adapter_names(model: nn.Module) -> list[str]:
    """Names of the parameters of a model's adapters; those that this rank has."""
    return [
        _join(name, leaf)
        for name, layer in lora_layers(model).items()
        for matrix in layer.adapters
        for leaf in layer.factor_names(matrix)
        if leaf is not None
    ]


def check_sharded(model: nn.Module) -> None:
    """Raise if ranks share the model's parameters already."""
    sharded = next((n for n, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded!r} is sharded over ranks already, and gradients of adapters that are added "
            "now would never be summed: each rank would train its own. Call "
            "forgekit.add_lora(model) before forgekit.parallelize(model, mesh)."
        )


def _check_options(
    rank: int,
    alpha: float,
    dropout: float,
    seed: int,
    rank_pattern: Mapping[str, int],
    alpha_pattern: Mapping[str, float],
) -> None:
    check_integers(seed=(seed, -(2**63)))
    for what, value in {"rank": rank, **_quoted("rank_pattern", rank_pattern)}.items():
        if not is_integer(value) or value < 1:
            raise ValueError(f"{what} is {brief(value)}; it must be an integer of at least 1.")
    for what, value in {"alpha": alpha, **_quoted("alpha_pattern", alpha_pattern)}.items():
        check_numbers(**{what: (value, 0)})
        if not value:
            raise ValueError(f"{what} is 0, so the adapter would add nothing; make it positive.")
    check_numbers(dropout=(dropout, 0))
    if dropout >= 1:
        raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1.")


def _quoted(what: str, pattern: Mapping[str, float]) -> dict[str, float]:
    return {f"{what}[{key!r}]": value for key, value in pattern.items()}


def _match(model: nn.Module, targets: Iterable[str]) -> list[str]:
    """Names of the matrices that a pattern matches, or whose experts it does."""
    matrices, found = find_matrices(model), set[str]()
    patterns = list(targets)
    if not patterns:
        raise ValueError("targets is empty; give at least one pattern, such as '*.query'.")
    for pattern in patterns:
        matched = {
            name
            for name, module in matrices.items()
            if fnmatchcase(name, pattern)
            or (isinstance(module, Experts) and fnmatchcase(name.rpartition(".")[0], pattern))
        }
        if not matched:
            raise ValueError(_unmatched(model, pattern, list(matrices)))
        found |= matched
    return [name for name in matrices if name in found]


def _unmatched(model: nn.Module, pattern: str, names: list[str]) -> str:
    tied = next((m for m in model.modules() if isinstance(m, Transformer) and m.spec.tied), None)
    if tied is not None and fnmatchcase("output", pattern):
        return (
            f"the pattern {pattern!r} is for the output projection, which is the embedding "
            "(TransformerSpec(tied=True)): merging would change both. Build the model with "
            "tied=False and load the embedding into both, or leave the pattern out."
        )
    nearest = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    others = [(n, m) for n, m in model.named_modules() if n and fnmatchcase(n, pattern)]
    but = f", only {others[0][0]!r} ({type(others[0][1]).__name__})" if others else ""
    return (
        f"the pattern {pattern!r} matches no linear layer and no stack of experts{but}; the "
        f"nearest names are {quoted(nearest)}. Correct it or leave it out."
    )


def _by_name(names: list[str], pattern: Mapping[str, float], default: float) -> dict[str, float]:
    """Each matrix's own value, of the last pattern that matches; the default without one."""
    found = dict.fromkeys(names, default)
    for key, value in pattern.items():
        matched = [name for name in names if fnmatchcase(name, key)]
        if not matched:
            raise ValueError(
                f"the pattern {key!r} matches none of the {len(names)} matrices that get an "
                f"adapter (first: {names[0]!r}). Correct it or leave it out."
            )
        found |= dict.fromkeys(matched, value)
    return found


def _check_matrices(model: nn.Module, chosen: list[Adapter]) -> None:
    matrices = find_matrices(model)
    shared = _shared_weights(model)
    heads = _heads(model)
    for adapter in chosen:
        name, layer = adapter.name, matrices[adapter.name]
        if isinstance(layer, LoraLinear | LoraExperts) and _stack(layer, name) in layer.adapters:
            raise ValueError(
                f"{name!r} has an adapter already; a matrix has one. Narrow the pattern, or build "
                "the model again."
            )
        if isinstance(layer, Experts):
            _check_plain(adapter, "experts", dora=adapter.dora)
        elif type(layer).forward is not nn.Linear.forward:
            raise ValueError(
                f"{name!r} is a {type(layer).__name__} with a forward of its own; adapters are for "
                "nn.Linear and for experts of forgekit. Narrow the pattern."
            )
        elif name in shared:
            raise ValueError(
                f"the weight of {name!r} is that of {shared[name]!r} too (tied), so merging would "
                "change both. Give it a weight of its own, or narrow the pattern."
            )
        if name in heads:
            _check_plain(adapter, "the output projection, whose weight a loss may read", dora=False)


def _heads(model: nn.Module) -> set[str]:
    named = model.named_modules()
    return {_join(name, "output") for name, m in named if isinstance(m, Transformer)}


def _check_packable(model: nn.Module, chosen: list[Adapter]) -> None:
    matrices, heads = find_matrices(model), _heads(model)
    for name in (adapter.name for adapter in chosen):
        layer = matrices[name]
        if not isinstance(layer, nn.Linear) or name in heads:
            what = "is the output projection" if name in heads else "is of experts"
            raise ValueError(
                f'{name!r} {what}, and base="nf4" packs other linear layers alone. Narrow the '
                "pattern; add_lora may be called again for it without base."
            )
        count = layer.out_features * layer.in_features
        if count % PIECE:
            raise ValueError(
                f"{name!r} is [{layer.out_features}, {layer.in_features}], {count} values; "
                f'base="nf4" packs {PIECE} together, which must divide them. Narrow the pattern; '
                "add_lora may be called again for it without base."
            )


def _check_plain(adapter: Adapter, what: str, *, dora: bool) -> None:
    """Raise where an adapter is added to its matrix instead of to what the matrix makes."""
    asked = {f"dropout={adapter.dropout}": adapter.dropout > 0, "dora=True": dora}
    if wrong := [text for text, is_asked in asked.items() if is_asked]:
        raise ValueError(
            f"{adapter.name!r} is of {what}; its adapter takes no {wrong[0].partition('=')[0]} "
            f"({wrong[0]}). Set it to {'False' if 'dora' in wrong[0] else '0'} or narrow the "
            "pattern; add_lora may be called again for other matrices."
        )


def _shared_weights(model: nn.Module) -> dict[str, str]:
    """Linear layers whose weight another module holds too, with a name of that."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {
        name.rpartition(".")[0]: next(other for other in known if other != name)
        for known in names.values()
        for name in known
        if len(known) > 1
    }


def _add(model: nn.Module, adapter: Adapter, *, packs: bool) -> None:
    layer = find_matrices(model)[adapter.name]
    path = adapter.name.rpartition(".")[0] if isinstance(layer, Experts) else adapter.name
    if isinstance(layer, Experts):
        adapted = layer if isinstance(layer, LoraExperts) else LoraExperts.of(layer)
        adapted.add_adapter(_stack(layer, adapter.name), adapter)
    else:
        adapted = LoraLinear.of(layer, adapter, packs=packs)
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, adapted)


def _stack(layer: nn.Module, name: str) -> str:
    return name.rpartition(".")[2] if isinstance(layer, Experts) else "weight"


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
