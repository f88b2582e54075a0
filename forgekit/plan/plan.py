"""A step of a recipe in a layout, without its machines: memory, collectives and time.

The recipe's own ``setup`` runs in this process as one rank of a world that is not there, on tensors
without values, and then a step. Ranks that differ in their pipeline position alone are planned one
after the other, each told what the others have sent it; all others do what these do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from forgekit.inputs import check_choice
from forgekit.mesh import DIMENSIONS, data_ranks
from forgekit.metrics.device_specs import MACHINES
from forgekit.metrics.flops import Flops
from forgekit.parallel.layout import size_of
from forgekit.parallel.pipeline.timeline import timeline
from forgekit.plan.collectives import Call, dimension_of
from forgekit.plan.estimate import USABLE, estimate, peak_of
from forgekit.plan.result import Plan, RankMemory, Traffic
from forgekit.plan.stand_ins import NotToldError, PlanError, Told, pretending
from forgekit.plan.steps import entered, measure_step
from forgekit.plan.watch import StepWatch, Work
from forgekit.run.run_directory import check_length
from forgekit.state import Agreement

HIDDEN = ("dp_replicate", "dp_shard", "cp", "fsdp_ep")
"""Dimensions along which parameters are gathered and gradients reduced while a step computes."""


@attrs.frozen(kw_only=True)
class Job:
    """What to plan.

    Attributes:
        setup: A recipe's set-up, bound to its configuration.
        micro_batches: Of a step, by what ``setup`` returned.
        world: Number of ranks.
        pp: How many of these share a pipeline.
        schedule: The pipeline's.
        device: A name of ``forgekit.metrics.device_specs``.
        node_size: Ranks of a node.
        memory_limit: Bytes that tensors may have on a device; ``USABLE`` of its memory if None.
    """

    setup: Callable[[], Any]
    micro_batches: Callable[[Any], int]
    world: int
    pp: int = 1
    schedule: str = "1f1b"
    device: str = "h100"
    node_size: int = 8
    memory_limit: float | None = None


@attrs.frozen(kw_only=True)
class PlannedRank:
    """What is kept of a rank's plan."""

    rank: int
    agreed: Agreement | None
    has_last: bool
    memory: dict[str, int]
    calls: Counter[Call]
    dimensions: Mapping[Call, str]
    work: Work
    layout: dict[str, int]
    parameters: int
    active: int
    targets: int
    micro_batches: int
    readers: int


def plan_step(job: Job) -> Plan:
    """Plan a recipe's step.

    Args:
        job: What to plan, on which machine.

    Returns:
        The plan.

    Raises:
        ValueError: If the device is unknown.
        PlanError: If the step reads a number that only computation would give.
        Exception: What ``setup`` or the step raises, as on the machines.
    """
    check_choice("device", job.device, tuple(MACHINES))
    machine = MACHINES[job.device]
    found = plan_ranks(job)
    seconds = [estimate(machine, job.node_size, r.work, r.calls, _hidden(r)) for r in found]
    first = found[0]
    bubble = 0.0
    if job.pp > 1:
        bubble = timeline(job.schedule, job.pp, first.micro_batches).bubble  # pyright: ignore[reportArgumentType]
    step = max(one.busy for one in seconds) / (1 - bubble)
    flops = sum((r.work.flops for r in found), Counter[torch.dtype]())
    each = job.world // job.pp
    targets = first.targets * first.readers
    least = sum(count * each / peak_of(machine, dtype) for dtype, count in flops.items())
    limit = USABLE * machine.memory_bytes if job.memory_limit is None else job.memory_limit
    return Plan(
        world=job.world,
        device=job.device,
        layout=first.layout,
        parameters=sum(r.parameters for r in found),
        active_parameters=sum(r.active for r in found),
        micro_batches=first.micro_batches,
        targets_per_step=targets,
        flops_per_step=flops.total() * each,
        step_seconds=step,
        exposed_seconds=max(one.exposed for one in seconds),
        tokens_per_second_per_device=targets / step / job.world,
        mfu=least / (step * job.world),
        bubble=bubble,
        memory_limit=limit,
        ranks=tuple(
            RankMemory(rank=r.rank, pp=position, memory=r.memory)
            for position, r in enumerate(found)
        ),
        collectives=_traffic(found),
    )


def plan_ranks(job: Job) -> list[PlannedRank]:
    """Plan one rank for each position in the pipeline; in what order, they find out themselves.

    Args:
        job: What to plan.

    Returns:
        By pipeline position what the first of its ranks does.
    """
    ranks = [position * job.world // job.pp for position in range(job.pp)]
    told, found, agreed = Told(), dict[int, PlannedRank](), None
    wanted = ranks[0]
    while len(found) < len(ranks):
        try:
            found[wanted] = _plan_rank(job, wanted, told, agreed)
            if found[wanted].has_last:
                agreed = found[wanted].agreed
            wanted = next((rank for rank in ranks if rank not in found), -1)
        except NotToldError as missing:
            wanted = missing.rank
    return [found[rank] for rank in ranks]


def _plan_rank(job: Job, rank: int, told: Told, agreed: Agreement | None) -> PlannedRank:
    with pretending(rank, job.world, told), StepWatch() as watch:
        try:
            built = job.setup()
            with entered(built):
                check_length(built.state, getattr(built.loader, "dataset", None))
                micro_batches = job.micro_batches(built)
                found = measure_step(built, watch, micro_batches, agreed)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise PlanError(
                f"the step reads a number that computation gives ({error.func}), and forgekit plan "
                "computes none. Use torch.where in place of an if, or plan without this part."
            ) from error
        state = found.state
        whole = Flops.of(state.model)
        sizes = {name: size_of(state.mesh, name) for name in DIMENSIONS}
        return PlannedRank(
            rank=rank,
            agreed=state.agreed,
            has_last=state.layout.has_last,
            memory=found.memory,
            calls=found.calls,
            dimensions={
                call: dimension_of(call, state.mesh) if state.mesh else "" for call in found.calls
            },
            work=found.work,
            layout=sizes | {"ep": state.layout.experts},
            parameters=whole.parameters,
            active=whole.active_parameters,
            targets=found.targets,
            micro_batches=micro_batches,
            readers=data_ranks(state.mesh)[1],
        )


def _hidden(rank: PlannedRank) -> frozenset[Call]:
    """Calls along dimensions that communicate beside computation, sequences' exchanges apart."""
    return frozenset(
        call
        for call, name in rank.dimensions.items()
        if call.op != "all_to_all" and all(part in HIDDEN for part in name.split("+"))
    )


def _traffic(found: list[PlannedRank]) -> tuple[Traffic, ...]:
    """Collectives by kind and dimension, of the rank that has the most of each."""
    most: dict[tuple[str, str], tuple[int, int]] = {}
    for rank in found:
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for call, count in rank.calls.items():
            key = call.op, rank.dimensions[call]
            before = sums.get(key, (0, 0))
            sums[key] = before[0] + count, before[1] + count * call.size
        for key, value in sums.items():
            most[key] = max(value, most.get(key, (0, 0)), key=lambda pair: pair[::-1])
    return tuple(
        Traffic(op=op, dimension=dimension, count=count, bytes=size)
        for (op, dimension), (count, size) in sorted(most.items())
    )
