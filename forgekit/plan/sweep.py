"""Layouts of a world, planned one after the other and ranked by estimated time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from forgekit.mesh import MeshSpec
from forgekit.plan.result import Plan

LONG = 16_384
"""Positions of a row from which a sweep tries context parallelism."""
BEHIND = 2
"""Sizes in a row that bring nothing faster, after which a sweep ends."""


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
    specs: Sequence[MeshSpec], plan: Callable[[MeshSpec], Plan], tell: Callable[[str], None]
) -> tuple[list[Plan], list[LeftOut]]:
    """Plan layouts and rank them: those that fit first, by the time of a target.

    What is larger in pp * tp * cp communicates more: ``BEHIND`` sizes in a row that bring nothing
    faster than a smaller one that fits end the sweep. Of layouts that differ in how parameters are
    sharded alone, the one with the most shards comes first: if it does not fit, the others do not
    either; if nothing waits for its sharding, the others have nothing to save.

    Args:
        specs: As from ``layouts``.
        plan: Plans one; what it raises makes a layout invalid.
        tell: Called with a line for each layout that is planned or invalid.

    Returns:
        The plans, the best first, and what was left out: each of ``specs`` is in one of them.
    """
    found: list[Plan] = []
    left_out: list[LeftOut] = []
    enough: dict[MeshSpec, str] = {}
    behind, ended = 0, None
    for size, group in itertools.groupby(specs, _model_ranks):
        best = min(map(order_of, found), default=None)
        for spec in group:
            apart = attrs.evolve(spec, dp_replicate=1, dp_shard=1)
            reason = ended or enough.get(apart)
            if reason is None:
                try:
                    one = plan(spec)
                except Exception as error:
                    reason = f"{type(error).__name__}: {error}"
                    tell(f"{_shown(spec)}: {reason}")
                else:
                    found.append(one)
                    if why := _enough(spec, one):
                        enough[apart] = why
                    verdict = "" if one.fits else ", does not fit"
                    tell(f"{_shown(spec)}: {one.step_seconds:.3f} s{verdict}")
            if reason is not None:
                left_out.append(LeftOut(attrs.asdict(spec), reason))
        is_behind = best is not None and not best[0] and min(map(order_of, found)) == best
        behind = behind + 1 if is_behind else 0
        if behind == BEHIND:
            ended = f"not planned: pp * tp * cp above {size}, where {BEHIND} sizes were no faster"
    return sorted(found, key=order_of), left_out


def order_of(plan: Plan) -> tuple[bool, float]:
    """Order of a sweep: what fits, by the time of a target; steps may differ in their targets."""
    return not plan.fits, -plan.tokens_per_second_per_device


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
    found: set[MeshSpec] = set()
    for pp, tp, cp, ep in itertools.product(powers, powers, contexts, shares):
        model_ranks = pp * tp * cp
        if tp > node_size or world % model_ranks:
            continue
        ranks = world // model_ranks
        for shards in {ranks, min(ranks, max(1, node_size // (tp * cp))), 1}:
            if ranks % shards == 0 and shards * cp % ep == 0:
                sizes = {"pp": pp, "tp": tp, "cp": cp, "ep": ep}
                found.add(MeshSpec(**sizes, dp_replicate=ranks // shards, dp_shard=shards))
    return sorted(found, key=lambda one: (_model_ranks(one), one.pp, one.cp, one.ep, -one.dp_shard))


def _model_ranks(spec: MeshSpec) -> int:
    return spec.pp * spec.tp * spec.cp


def _enough(spec: MeshSpec, plan: Plan) -> str | None:
    """Why a layout with fewer shards need not be planned; None if it may be better."""
    if not plan.fits:
        return f"not planned: {_shown(spec)}, with more shards, does not fit"
    if not plan.exposed_seconds:
        return f"not planned: {_shown(spec)}, with more shards, does not wait for them"
    return None


def _shown(spec: MeshSpec) -> str:
    sizes = {name: size for name, size in attrs.asdict(spec).items() if size > 1}
    return " ".join(f"{name}={size}" for name, size in sizes.items()) or "one device"
