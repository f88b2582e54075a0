"""Sweep over the layouts of a world, ranked by estimated time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from forgekit.mesh import MeshSpec
from forgekit.plan.plan import GIB, Plan, named

LONG = 16_384
"""Minimum sequence length for which a sweep tries context parallelism."""
INTERRUPTED = "not planned: interrupted"
"""Reason for layouts that Ctrl-C or a signal left out."""


def sweep(
    specs: Sequence[MeshSpec], plan: Callable[[MeshSpec], Plan], tell: Callable[[str], None]
) -> tuple[list[Plan], list[dict[str, Any]]]:
    """Plan layouts and rank them: those that fit first, by time per target.

    Args:
        specs: As from ``layouts``.
        plan: Plans one layout; its errors make a layout invalid. KeyboardInterrupt ends the sweep.
        tell: Called with a line for each layout that is planned or invalid.

    Returns:
        The plans, the best first, and each other ``layout`` with why it was ``refused``.
    """
    plans: list[Plan] = []
    refused: list[dict[str, Any]] = []
    with suppress(KeyboardInterrupt):
        for spec in specs:
            try:
                one = plan(spec)
            except Exception as error:
                layout, why = attrs.asdict(spec), f"{type(error).__name__}: {error}"
                refused.append({"layout": layout, "refused": why})
                tell(f"{named(layout)}: {why}")
                continue
            plans.append(one)
            fits = "" if one.fits else ", does not fit"
            tell(f"{named(one.layout)}: {one.step_seconds:.3f} s{fits}")
    rest = specs[len(plans) + len(refused) :]
    refused += [{"layout": attrs.asdict(spec), "refused": INTERRUPTED} for spec in rest]
    # Steps differ in their targets.
    plans.sort(key=lambda one: (not one.fits, -one.tokens_per_second_per_device))
    return plans, refused


def layouts(config: Any, world: int, node_size: int) -> list[MeshSpec]:
    """List a sweep's layouts, in powers of two, the fewest ranks per row first.

    Tensor parallelism stays inside a node. Context parallelism is tried for sequences from
    ``LONG`` positions, and where it is configured; expert parallelism where there are experts.
    Parameters are sharded over all data ranks, over those of a node, or not at all.

    Args:
        config: A recipe's, with ``mesh``.
        world: Number of ranks.
        node_size: Ranks of a node.

    Returns:
        The layouts, by ``pp * tp * cp``, then the most shards first.
    """
    given = config.mesh
    model, data = getattr(config, "model", None), getattr(config, "data", config)
    experts = getattr(getattr(model, "moe", None), "experts", 1)
    length = getattr(data, "seq_len", getattr(config, "seq_len", 0))
    powers = [2**n for n in range(4)]
    contexts = powers if given.cp > 1 or length >= LONG else [1]
    shares = [n for n in powers if experts % n == 0] if experts > 1 else [given.ep]
    specs: set[MeshSpec] = set()
    for pp, tp, cp, ep in itertools.product(powers, powers, contexts, shares):
        model_ranks = pp * tp * cp
        if tp > node_size or world % model_ranks:
            continue
        ranks = world // model_ranks
        for shards in {ranks, min(ranks, max(1, node_size // (tp * cp))), 1}:
            if ranks % shards == 0 and shards * cp % ep == 0:
                sizes = {"pp": pp, "tp": tp, "cp": cp, "ep": ep}
                specs.add(MeshSpec(**sizes, dp_replicate=ranks // shards, dp_shard=shards))
    return sorted(
        specs, key=lambda one: (one.pp * one.tp * one.cp, one.pp, one.cp, one.ep, -one.dp_shard)
    )


def show_sweep(
    plans: Sequence[Plan], refused: Sequence[Mapping[str, Any]], console: Console
) -> None:
    """Print layouts, the best first, and the reasons of invalid ones."""
    lines = Table("layout", "fits")
    for name in ("peak GiB", "step s", "tokens/s/device", "MFU"):
        lines.add_column(name, justify="right")
    for plan in plans:
        lines.add_row(
            named(plan.layout),
            "yes" if plan.fits else "no",
            f"{plan.peak / GIB:.2f}",
            f"{plan.step_seconds:.3f}",
            f"{plan.tokens_per_second_per_device:,.0f}",
            f"{plan.mfu:.1%}",
        )
    console.print(lines)
    for reason, count in Counter(one["refused"] for one in refused).most_common():
        console.print(f"{count} x {reason}", markup=False)
