"""Start-up summary of a run: layout, size, memory and optimizers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forgekit.checks import counted
from forgekit.mesh import expert_ranks
from forgekit.metrics.flops import Flops, row_length
from forgekit.optim.groups import parameters_by_optimizer
from forgekit.parallel.fsdp import compute_dtype
from forgekit.state import TrainState
from forgekit.tensors import local

MIB = 2**20
SHOWN = 3
"""Maximum number of parameter names in a line; names that differ in a number count once."""


def start_summary(
    state: TrainState, flops: Flops, dataset: Any, config: Mapping[str, Any]
) -> list[str]:
    """Describe a run: layout, size, memory, tokens per step, and each optimizer's parameters.

    Args:
        state: The state to start from.
        flops: Of the whole model, for its size.
        dataset: What is read; its ``seq_len`` and the configuration's ``global_batch_size`` give
            the tokens of a step.
        config: The resolved configuration.

    Returns:
        Lines of a name and a text; of parameters and memory, those of this rank.
    """
    rows = [
        ("layout", _layout(state)),
        ("parameters", _parameters(state, flops)),
        ("memory", _memory(state)),
        ("attention", ", ".join(f"{use} {k}" for use, k in (state.layout.attention or {}).items())),
        ("step", _step(dataset, config)),
        *_optimizers(state),
    ]
    return [f"{name + ':':<12} {text}" for name, text in rows if text]


def _layout(state: TrainState) -> str:
    dtype = str(compute_dtype(state.model)).removeprefix("torch.")
    where = f"products in {dtype} on {state.targets.device.type}"
    if state.mesh is None or state.mesh.size() == 1:
        return f"1 rank, {where}"
    sizes = zip(state.mesh.mesh_dim_names or (), state.mesh.shape, strict=True)
    shown = " x ".join(f"{name} {size}" for name, size in sizes if size > 1)
    _, shared = expert_ranks(state.mesh)
    experts = f" (ep {shared})" if shared > 1 else ""
    return f"{shown}{experts} = {state.mesh.size()} ranks, {where}"


def _parameters(state: TrainState, flops: Flops) -> str:
    trained = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
    held = sum(p.numel() for p in state.model.parameters())
    text = f"{_count(flops.parameters)}, of which a token meets {_count(flops.active_parameters)}"
    return text if trained == held else f"{text}; {_count(trained)} are trained"


def _memory(state: TrainState) -> str:
    """Describe the memory that is certain before the first step."""
    parameters = [local(p) for p in state.model.parameters()]
    gradients = [local(p) for p in state.model.parameters() if p.requires_grad]
    held, due = (sum(p.nbytes for p in some) / MIB for some in (parameters, gradients))
    return f"{held:,.1f} MiB of parameters and {due:,.1f} MiB of gradients on this rank"


def _step(dataset: Any, config: Mapping[str, Any]) -> str:
    length = row_length(dataset)
    rows = config.get("global_batch_size")
    return f"{rows * length:,} tokens, {rows} rows of {length}" if rows and length else ""


def _optimizers(state: TrainState) -> Iterator[tuple[str, str]]:
    sizes = {name: p.numel() for name, p in state.model.named_parameters()}
    for optimizer, names in parameters_by_optimizer(state.model, state.optimizer).items():
        total = _count(sum(sizes[name] for name in names))
        label = "no optimizer" if optimizer == "none" else optimizer
        yield label, f"{len(names)} tensors, {total}: {_shown(names)}"


def _shown(names: Sequence[str]) -> str:
    kinds = list(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
    more = f" and {counted(left, 'more kind')}" if (left := len(kinds) - SHOWN) > 0 else ""
    return ", ".join(kinds[:SHOWN]) + more


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if number >= size / 10:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,}"
