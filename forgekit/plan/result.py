"""What a plan found, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from forgekit.plan.watch import CATEGORIES

GIB = 2**30


@attrs.frozen(kw_only=True)
class RankMemory:
    """Bytes on a rank, the same on all ranks of a pipeline position or less."""

    rank: int
    pp: int
    memory: dict[str, int]


@attrs.frozen(kw_only=True)
class Traffic:
    """Collectives of one kind along one mesh dimension in a step, of the rank with the most.

    Attributes:
        op: The kind.
        dimension: The mesh dimension; several joined by ``+``.
        count: How many.
        bytes: Of the whole tensors on a rank: of what is gathered, scattered or sent.
    """

    op: str
    dimension: str
    count: int
    bytes: int


@attrs.frozen(kw_only=True)
class Plan:
    """A layout's step on a machine; bytes and seconds. See ``docs/plan.md``.

    Attributes:
        micro_batches: Of a step, on each data-parallel rank.
        exposed_seconds: Of the step: communication of sharded parameters and of rings that the
            computation is too short to hide.
        memory_limit: Bytes that tensors may have on a device.
        remedies: Changes that need less memory, where the layout does not fit.
    """

    world: int
    device: str
    layout: dict[str, int]
    parameters: int
    active_parameters: int
    micro_batches: int
    targets_per_step: int
    flops_per_step: int
    step_seconds: float
    exposed_seconds: float
    tokens_per_second_per_device: float
    mfu: float
    bubble: float
    memory_limit: float
    remedies: tuple[str, ...] = ()
    ranks: tuple[RankMemory, ...]
    collectives: tuple[Traffic, ...]

    @property
    def fits(self) -> bool:
        """Whether no rank needs more than the limit."""
        return self.peak <= self.memory_limit

    @property
    def peak(self) -> int:
        """Bytes of the rank that needs most."""
        return max(rank.memory["peak"] for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """A tree of plain values."""
        return {**attrs.asdict(self), "fits": self.fits}


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan."""
    console.print(f"{_shown(plan)}: {plan.world} x {plan.device}", markup=False)
    rows = {
        "parameters": f"{plan.parameters:,}",
        "active parameters": f"{plan.active_parameters:,}",
        "micro-batches": f"{plan.micro_batches:,}",
        "targets per step": f"{plan.targets_per_step:,}",
        "FLOPs per step": f"{plan.flops_per_step:.3e}",
        "step, estimated": f"{plan.step_seconds:.3f} s",
        "of it, waiting for shards": f"{plan.exposed_seconds:.3f} s",
        "tokens per second and device": f"{plan.tokens_per_second_per_device:,.0f}",
        "MFU, estimated": f"{plan.mfu:.1%}",
    }
    if plan.layout.get("pp", 1) > 1:
        rows["bubble"] = f"{plan.bubble:.1%}"
    for name, value in rows.items():
        console.print(f"{name:<30}{value}", markup=False)
    console.print(_memory(plan))
    console.print(_collectives(plan))
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    have = f"of the {plan.memory_limit / GIB:.1f} GiB that tensors can have on a device"
    console.print(f"{verdict}: {plan.peak / GIB:.2f} GiB at the peak, {have}", markup=False)
    for remedy in plan.remedies:
        console.print(f"  {remedy}", markup=False)


def show_sweep(plans: Sequence[Plan], console: Console) -> None:
    """Print layouts, the best first."""
    table = Table()
    for name in ("layout", "fits", "peak GiB", "step s", "tokens/s/device", "MFU", "bubble"):
        table.add_column(name, justify="left" if name in ("layout", "fits") else "right")
    for one in plans:
        speed = f"{one.tokens_per_second_per_device:,.0f}"
        shares = f"{one.mfu:.1%}", f"{one.bubble:.1%}"
        peak, step = f"{one.peak / GIB:.2f}", f"{one.step_seconds:.3f}"
        table.add_row(_shown(one), "yes" if one.fits else "no", peak, step, speed, *shares)
    console.print(table)


def _shown(plan: Plan) -> str:
    sizes = (f"{name} {size}" for name, size in plan.layout.items() if size > 1)
    return " x ".join(sizes) or "1 rank"


def _memory(plan: Plan) -> Table:
    table = Table(title="memory in GiB, the most of each", title_justify="left")
    for name in ("rank", "pp", *CATEGORIES, "peak"):
        table.add_column(name, justify="right")
    for one in plan.ranks:
        sizes = (f"{one.memory[name] / GIB:.3f}" for name in (*CATEGORIES, "peak"))
        table.add_row(str(one.rank), str(one.pp), *sizes)
    return table


def _collectives(plan: Plan) -> Table:
    table = Table(title="collectives of a rank in a step", title_justify="left")
    for name, side in (("op", "left"), ("dimension", "left"), ("count", "right"), ("MiB", "right")):
        table.add_column(name, justify=side)  # pyright: ignore[reportArgumentType]
    for one in plan.collectives:
        table.add_row(one.op, one.dimension, f"{one.count:,}", f"{one.bytes / 2**20:,.2f}")
    return table
