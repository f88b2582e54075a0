"""Layouts of a world, planned one after the other and ranked by estimated time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from rich.console import Console

from forgekit.mesh import MeshSpec
from forgekit.plan.plan import GIB, Plan, table

LONG = 16_384
"""Positions of a row from which a sweep tries context parallelism."""
BEHIND = 2
"""Sizes in a row that bring nothing faster, after which a sweep ends."""
Changes = Mapping[str, Any]
"""Settings beside the layout, by their key."""


@attrs.frozen
class LeftOut:
    """A layout of a sweep that does not run, or need not be planned.

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
    """Plan layouts and rank them: those that fit first, by the time of a target.

    What is larger in pp * tp * cp communicates more: ``BEHIND`` sizes in a row that bring nothing
    faster than a smaller one that fits end the sweep. Of layouts that differ in how parameters are
    sharded alone, the one with the most shards comes first: if it does not fit, the others do not
    either; if nothing waits for its sharding, the others have nothing to save.

    Args:
        specs: As from ``layouts``.
        changes: As from ``lighter_settings``; of each layout the first that fits counts.
        plan: Plans one; what it raises makes a layout invalid.
        tell: Called with a line for each layout that is planned or invalid.

    Returns:
        The plans, the best first, and what was left out: each of ``specs`` is in one of them.
    """
    plans: list[Plan] = []
    left_out: list[LeftOut] = []
    reasons: dict[MeshSpec, str] = {}
    behind, ended = 0, None
    for size, group in itertools.groupby(specs, _model_ranks):
        best = min(map(order_of, plans), default=None)
        for spec in group:
            unsharded = attrs.evolve(spec, dp_replicate=1, dp_shard=1)
            reason = ended or reasons.get(unsharded)
            if reason is None:
                try:
                    one = _first_that_fits(spec, changes, plan)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    tell(f"{_named(spec)}: {reason}")
                else:
                    plans.append(one)
                    verdict = "" if one.fits else ", does not fit"
                    tell(f"{one}: {one.step_seconds:.3f} s{verdict}")
                    if not (one.fits and one.exposed_seconds):
                        verb = "wait for them" if one.fits else "fit"
                        why = f"not planned: {_named(spec)}, with more shards, does not {verb}"
                        reasons[unsharded] = why
            if reason is not None:
                left_out.append(LeftOut(attrs.asdict(spec), reason))
        is_behind = best is not None and not best[0] and min(map(order_of, plans)) == best
        behind = behind + 1 if is_behind else 0
        if behind == BEHIND:
            ended = f"not planned: pp * tp * cp above {size}, where {BEHIND} sizes were no faster"
    return sorted(plans, key=order_of), left_out


def _first_that_fits(
    spec: MeshSpec, changes: Sequence[Changes], plan: Callable[[MeshSpec, Changes], Plan]
) -> Plan:
    plans = (attrs.evolve(plan(spec, change), changed=dict(change)) for change in changes)
    return next(one for last, one in enumerate(plans, 1) if one.fits or last == len(changes))


def order_of(plan: Plan) -> tuple[bool, float]:
    """Order of a sweep: what fits, by the time of a target; steps may differ in their targets."""
    return not plan.fits, -plan.tokens_per_second_per_device


def lighter_settings(config: Any) -> list[Changes]:
    """Settings of a recipe, and what needs less memory and more time, each on top of the others."""
    settings: list[Changes] = [{}]
    if getattr(config, "activation_checkpoint", "full") != "full":
        settings.append({"activation_checkpoint": "full"})
    if getattr(config, "batch_size", 1) != 1:
        settings.append({**settings[-1], "batch_size": 1})
    return settings


def layouts(config: Any, world: int, node_size: int) -> list[MeshSpec]:
    """Find the layouts of a sweep, in powers of two: the fewest ranks per copy of a row first.

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


def _named(spec: MeshSpec) -> str:
    sizes = {name: size for name, size in attrs.asdict(spec).items() if size > 1}
    return " ".join(f"{name}={size}" for name, size in sizes.items()) or "one device"


def show_sweep(plans: Sequence[Plan], console: Console) -> None:
    """Print layouts, the best first; device-hours are those of a billion targets."""
    names = ("layout", "fits", "peak GiB", "step s", "tokens/s/device", "device-hours", "MFU")
    rows = [
        (
            plan,
            "yes" if plan.fits else "no",
            f"{plan.peak / GIB:.2f}",
            f"{plan.step_seconds:.3f}",
            f"{plan.tokens_per_second_per_device:,.0f}",
            f"{plan.device_hours:,.1f}",
            f"{plan.mfu:.1%}",
        )
        for plan in plans
    ]
    console.print(table("", names, rows))
