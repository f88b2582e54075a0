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
Changes = Mapping[str, Any]
"""Settings besides the layout, by key."""


@attrs.frozen
class LeftOut:
    """An invalid layout of a sweep.

    Attributes:
        layout: Its sizes.
        refused: Why.
    """

    layout: dict[str, int]
    refused: str


def sweep(
    specs: Sequence[MeshSpec],
    changes: Sequence[Changes],
    plan: Callable[[MeshSpec, Changes], Plan],
    tell: Callable[[str], None],
) -> tuple[list[Plan], list[LeftOut]]:
    """Plan layouts and rank them: those that fit first, by time per target.

    Args:
        specs: As from ``layouts``.
        changes: As from ``lighter_settings``; of each layout the first that fits counts.
        plan: Plans one layout; its errors make a layout invalid. KeyboardInterrupt ends the sweep.
        tell: Called with a line for each layout that is planned or invalid.

    Returns:
        The plans, the best first, and what is invalid: each of ``specs`` is in one of them.
    """
    plans: list[Plan] = []
    left_out: list[LeftOut] = []
    with suppress(KeyboardInterrupt):
        for spec in specs:
            try:
                one = _first_that_fits(spec, changes, plan)
            except Exception as error:
                left_out.append(LeftOut(attrs.asdict(spec), f"{type(error).__name__}: {error}"))
                tell(f"{named(attrs.asdict(spec))}: {left_out[-1].refused}")
                continue
            plans.append(one)
            tell(f"{one}: {one.step_seconds:.3f} s{'' if one.fits else ', does not fit'}")
    rest = specs[len(plans) + len(left_out) :]
    left_out += [LeftOut(attrs.asdict(spec), INTERRUPTED) for spec in rest]
    return sorted(plans, key=order_of), left_out


def _first_that_fits(
    spec: MeshSpec, changes: Sequence[Changes], plan: Callable[[MeshSpec, Changes], Plan]
) -> Plan:
    *first, last = changes
    for change in first:
        planned = plan(spec, change)
        if planned.fits:
            return attrs.evolve(planned, changed=dict(change))
    return attrs.evolve(plan(spec, last), changed=dict(last))


def order_of(plan: Plan) -> tuple[bool, float]:
    """Sort key: layouts that fit first, by time per target, as steps differ in targets."""
    return not plan.fits, -plan.tokens_per_second_per_device


def lighter_settings(config: Any) -> list[Changes]:
    """Yield a recipe's settings and ever lighter ones, with less memory and more time."""
    settings: list[Changes] = [{}]
    if getattr(config, "activation_checkpoint", "full") != "full":
        settings.append({"activation_checkpoint": "full"})
    if getattr(config, "batch_size", 1) != 1:
        settings.append({**settings[-1], "batch_size": 1})
    return settings


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
    return sorted(specs, key=lambda one: (_model_ranks(one), one.pp, one.cp, one.ep, -one.dp_shard))


def _model_ranks(spec: MeshSpec) -> int:
    return spec.pp * spec.tp * spec.cp


def show_sweep(plans: Sequence[Plan], left_out: Sequence[LeftOut], console: Console) -> None:
    """Print layouts, the best first, and the reasons of invalid ones."""
    lines = Table("layout", "fits", title="device-hours of a billion targets", title_justify="left")
    for name in ("peak GiB", "step s", "tokens/s/device", "device-hours", "MFU"):
        lines.add_column(name, justify="right")
    for plan in plans:
        lines.add_row(
            str(plan),
            "yes" if plan.fits else "no",
            f"{plan.peak / GIB:.2f}",
            f"{plan.step_seconds:.3f}",
            f"{plan.tokens_per_second_per_device:,.0f}",
            f"{plan.device_hours:,.1f}",
            f"{plan.mfu:.1%}",
        )
    console.print(lines)
    for reason, count in Counter(one.refused for one in left_out).most_common():
        console.print(f"{count} x {reason}", markup=False)
