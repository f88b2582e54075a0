"""Plan of a recipe's step in a layout: memory, collectives and time, without its machines.

The recipe's own ``setup`` runs in this process as one rank of a world that is not there, on tensors
without values, and then a step. Ranks that differ in their pipeline position alone are planned one
after the other, each given what the others have broadcast to it; all others do what these do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

import attrs
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from forgekit.data.batch import IGNORED
from forgekit.data.groups import groups
from forgekit.mesh import DIMENSIONS, data_ranks
from forgekit.metrics.device_specs import MACHINES
from forgekit.metrics.flops import Flops
from forgekit.model.routing import Router
from forgekit.parallel.layout import size_of
from forgekit.parallel.pipeline.schedule import bubble as bubble_of
from forgekit.plan.estimate import USABLE, estimate, peak_of
from forgekit.plan.stand_ins import Broadcasts, MissingBroadcastError, PlanError, pretending
from forgekit.plan.watch import CATEGORIES, Call, StepWatch, Work, dimension_of
from forgekit.run.setup import check_length
from forgekit.state import AgreedNames, TrainState, donate
from forgekit.steps.accumulate import accumulate
from forgekit.steps.clip import clip
from forgekit.steps.totals import reduce_totals
from forgekit.steps.update import update

HIDDEN = ("dp_replicate", "dp_shard", "cp", "fsdp_ep")
"""Dimensions whose gathers and gradient reductions overlap with computation."""
GIB = 2**30


@attrs.frozen(kw_only=True)
class Job:
    """What to plan.

    Attributes:
        setup: A recipe's set-up, bound to its configuration.
        micro_batches: Of a step, by what ``setup`` returned; None if the loader knows.
        world: Number of ranks.
        pp: How many of these share a pipeline.
        schedule: The pipeline's.
        device: A name of ``forgekit.metrics.device_specs``.
        node_size: Ranks of a node.
        memory_limit: Bytes that tensors may have on a device; ``USABLE`` of its memory if None.
    """

    setup: Callable[[], Any]
    micro_batches: Callable[[Any], int | None]
    world: int
    pp: int = 1
    schedule: str = "1f1b"
    device: str = "h100"
    node_size: int = 8
    memory_limit: float | None = None


@attrs.frozen(kw_only=True)
class PlannedRank:
    """A rank's step.

    Attributes:
        rank: Its number.
        agreed_names: What the ranks add up, if this one holds the loss: the others need it.
        memory: See ``StepWatch.memory``.
        work: What its step computes and sends.
        dimensions: The mesh dimension of each of its collectives.
        layout: Sizes of all dimensions.
        parameters: Of its part of the model.
        active: Those of them that a token meets.
        targets: Positions with a label over all ranks, if all have the same number.
        micro_batches: Of a step.
        run: How many of these ``memory`` and ``work`` are of.
    """

    rank: int
    agreed_names: AgreedNames | None
    memory: dict[str, int]
    work: Work
    dimensions: Mapping[Call, str]
    layout: dict[str, int]
    parameters: int
    active: int
    targets: int
    micro_batches: int
    run: int

    @property
    def hidden(self) -> frozenset[Call]:
        """Collectives that overlap computation, which sequence exchanges do not."""
        return frozenset(
            call
            for call, name in self.dimensions.items()
            if call.op != "all_to_all" and all(part in HIDDEN for part in name.split("+"))
        )

    @property
    def traffic(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Count and bytes of its collectives, by kind and mesh dimension."""
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for call, count in self.work.calls.items():
            key = call.op, self.dimensions[call]
            before, size = sums.get(key, (0, 0))
            sums[key] = before + count, size + count * call.size
        return sums


@attrs.frozen(kw_only=True)
class Plan:
    """A layout's step on a machine; bytes and seconds. See ``docs/plan.md``.

    Attributes:
        micro_batches: Of a step, on each data-parallel rank.
        exposed_seconds: Of the step: communication of sharded parameters and of rings that the
            computation is too short to hide.
        memory_limit: Bytes that tensors may have on a device.
        ranks: For each pipeline position its first ``rank``, ``pp``, and the bytes of ``memory`` by
            category; no rank has more.
        collectives: For each ``op`` along a mesh ``dimension`` (several joined by ``+``) the
            ``count`` and ``bytes`` of the whole tensors, of the rank with the most.
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
    ranks: list[dict[str, Any]]
    collectives: list[dict[str, Any]]

    @property
    def fits(self) -> bool:
        """Whether no rank needs more than the limit."""
        return self.peak <= self.memory_limit

    @property
    def peak(self) -> int:
        """Peak bytes of the rank that needs most."""
        return max(rank["memory"]["peak"] for rank in self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return a tree of plain values."""
        return {**attrs.asdict(self), "fits": self.fits}


def named(layout: Mapping[str, int]) -> str:
    """Format a layout by its sizes above 1."""
    sizes = (f"{name}={size}" for name, size in layout.items() if size > 1)
    return " ".join(sizes) or "one device"


def plan_step(job: Job) -> Plan:
    """Plan a recipe's step.

    Args:
        job: What to plan, on which machine.

    Returns:
        The plan.

    Raises:
        PlanError: If the step reads a number that only computation would give.
        Exception: What ``setup`` or the step raises, as on the machines.
    """
    return summed(job, plan_ranks(job))


def summed(job: Job, ranks: list[PlannedRank]) -> Plan:
    """Combine the ranks of all pipeline positions."""
    machine, first = MACHINES[job.device], ranks[0]
    seconds = [estimate(machine, job.node_size, rank.work, rank.hidden) for rank in ranks]
    bubble = 0.0
    if job.pp > 1:
        bubble = bubble_of(job.schedule, job.pp, first.micro_batches)  # pyright: ignore[reportArgumentType]
    step = max(one.busy for one in seconds) / (1 - bubble)
    flops = sum((rank.work.flops for rank in ranks), Counter[torch.dtype]())
    replicas = job.world // job.pp
    least = sum(count * replicas / peak_of(machine, dtype) for dtype, count in flops.items())
    limit = USABLE * machine.memory_bytes if job.memory_limit is None else job.memory_limit
    return Plan(
        world=job.world,
        device=job.device,
        layout=first.layout,
        parameters=sum(rank.parameters for rank in ranks),
        active_parameters=sum(rank.active for rank in ranks),
        micro_batches=first.micro_batches,
        targets_per_step=first.targets,
        flops_per_step=flops.total() * replicas,
        step_seconds=step,
        exposed_seconds=max(one.exposed for one in seconds),
        tokens_per_second_per_device=first.targets / step / job.world,
        mfu=least / (step * job.world),
        bubble=bubble,
        memory_limit=limit,
        ranks=[{"rank": one.rank, "pp": pp, "memory": one.memory} for pp, one in enumerate(ranks)],
        collectives=_most_traffic(ranks),
    )


def plan_ranks(job: Job) -> list[PlannedRank]:
    """Plan one rank per pipeline position.

    A pipeline with many micro-batches is planned with fewer, twice: from two rounds on, of one
    micro-batch per rank (``dualpipev``: three), a schedule holds the same number at once, and each
    further round adds the same to what is computed, sent and, by receive buffers, held.

    Args:
        job: What to plan.

    Returns:
        By pipeline position what the first of its ranks does.
    """
    rounds = 4 if job.schedule == "dualpipev" else 3
    planned = plan_positions(job, rounds)
    if (rest := planned[0].micro_batches - planned[0].run) == 0:
        return planned
    return [
        _extended(more, less, rest // (more.run - less.run))
        for more, less in zip(planned, plan_positions(job, rounds - 1), strict=True)
    ]


def _extended(more: PlannedRank, less: PlannedRank, times: int) -> PlannedRank:
    """Add so many times what the one plan has more than the other."""
    memory = {n: size + times * (size - less.memory[n]) for n, size in more.memory.items()}
    work = more.work.plus(more.work.plus(less.work, -1), times)
    return attrs.evolve(more, memory=memory, work=work, run=more.micro_batches)


def plan_positions(job: Job, rounds: int) -> list[PlannedRank]:
    """Plan one rank per pipeline position, in the order that broadcasts determine.

    Args:
        job: What to plan.
        rounds: As for ``measure_step``.

    Returns:
        As ``plan_ranks``, of as many micro-batches as were run.
    """
    ranks = [position * job.world // job.pp for position in range(job.pp)]
    planned: dict[int, PlannedRank] = {}
    broadcasts: Broadcasts = {}
    agreed_names, rank = None, ranks[0]
    while len(planned) < len(ranks):
        try:
            planned[rank] = _plan_rank(job, rank, broadcasts, agreed_names, rounds)
        except MissingBroadcastError as missing:
            (rank,) = missing.args
        else:
            agreed_names = planned[rank].agreed_names or agreed_names
            rank = next((rank for rank in ranks if rank not in planned), -1)
    return [planned[rank] for rank in ranks]


def _plan_rank(
    job: Job, rank: int, broadcasts: Broadcasts, agreed_names: AgreedNames | None, rounds: int
) -> PlannedRank:
    with pretending(rank, job.world, broadcasts), StepWatch() as watch, ExitStack() as stack:
        try:
            built = job.setup()
            for part in (built.loader, getattr(built, "stop", None)):  # threads and signals
                if hasattr(part, "__exit__"):
                    stack.enter_context(part)  # pyright: ignore[reportArgumentType]
            check_length(built.state, getattr(built.loader, "dataset", None))
            count = job.micro_batches(built) or built.loader.micro_batches()
            return measure_step(built, watch, count, agreed_names, rounds)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise PlanError(
                f"the step reads a computed value ({error.func}), but forgekit plan computes "
                "none. Use torch.where instead of an if, or plan without this part."
            ) from error


def measure_step(
    built: Any,
    watch: StepWatch,
    micro_batches: int,
    agreed_names: AgreedNames | None = None,
    rounds: int | None = None,
) -> PlannedRank:
    """Take two steps of a recipe and measure the second, which is like all later ones.

    The first is taken in its parts, without what a run proves once. Of many micro-batches three are
    run, as those between the first and the last are like the second. A pipeline's schedule depends
    on their number: see ``plan_ranks``. Experts get equal loads.

    Args:
        built: What a recipe's ``setup`` returned, within ``watch``.
        watch: Watches since before the setup.
        micro_batches: Of a step.
        agreed_names: What the ranks add up, from the plan of a rank that holds the loss.
        rounds: In a pipeline, run this many rounds of one micro-batch per rank in place of more.

    Returns:
        What the step does.
    """
    state = built.state
    watch.label("parameters", [*state.model.parameters(), *state.model.buffers()])
    for module in state.model.modules():
        if isinstance(module, Router):  # choices by tokens need values
            module.spec = attrs.evolve(module.spec, force_balance=True, bias_rate=None)
    is_staged, ranks = state.layout.stages is not None, size_of(state.mesh, "pp")
    run = micro_batches if is_staged else min(micro_batches, 3)
    if is_staged and rounds is not None and run % ranks == 0:
        # Up to so many, two plans with fewer would be no less work.
        run = run if run <= (2 * rounds - 1) * ranks else rounds * ranks
    batches = groups(built.loader, run)
    if agreed_names is not None:
        state = donate(state, agreed_names=agreed_names)
    first = next(batches)
    state = _first_step(built, state, first if is_staged else [next(iter(first))])
    _end_step(watch, state)
    watch.begin()
    marked = _Marked(next(batches), watch)
    state, _ = built.step(state, marked)
    _end_step(watch, state)
    work, mesh = watch.work, state.mesh
    if run < micro_batches and not is_staged:
        work = work.plus(marked.marks[2].plus(marked.marks[1], -1), micro_batches - run)
    whole = Flops.of(state.model)
    sizes = {name: size_of(mesh, name) for name in DIMENSIONS}
    return PlannedRank(
        rank=dist.get_rank(),
        agreed_names=state.agreed_names if state.layout.has_last else None,
        memory=watch.memory(),
        work=work,
        dimensions={call: dimension_of(call, mesh) if mesh else "" for call in work.calls},
        layout=sizes | {"ep": state.layout.experts},
        parameters=whole.parameters,
        active=whole.active_parameters,
        targets=marked.targets * micro_batches // run * data_ranks(mesh)[1],
        micro_batches=micro_batches,
        run=micro_batches if not is_staged else run,
    )


def _first_step(built: Any, state: TrainState, batches: Iterable[Any]) -> TrainState:
    totals = accumulate(state, batches, built.loss_fn)
    for name, voter in (("stop", "stop"), ("ended", "end")):
        if getattr(built, voter, None) is not None:
            totals = totals.plus(**{name: torch.zeros_like(totals["loss"])})
    totals = reduce_totals(totals, state)
    return update(state, clip(totals, max_norm=1.0), lr=0.0, totals=totals)


def _end_step(watch: StepWatch, state: TrainState) -> None:
    watch.label("gradients", [p.grad for p in state.model.parameters() if p.grad is not None])
    watch.end_step()


class _Marked:
    """A group of micro-batches that records the work at each pull, and the targets."""

    def __init__(self, group: Any, watch: StepWatch) -> None:
        self._group, self._watch = group, watch
        self.samples = getattr(group, "samples", None)
        self.marks: list[Work] = []
        self.targets = 0

    def __len__(self) -> int:
        return len(self._group)

    def __iter__(self) -> Iterator[TensorDictBase]:
        for batch in self._group:
            self.marks.append(Work().plus(self._watch.work, 1))
            labels = batch.get("labels", batch.get("input_ids", torch.empty(0)))
            self.targets += int((labels != IGNORED).sum())
            yield batch


def _most_traffic(ranks: list[PlannedRank]) -> list[dict[str, Any]]:
    """Return the collectives of the rank with the most bytes, by kind and dimension."""
    most: dict[tuple[str, str], tuple[int, int]] = {}
    for rank in ranks:
        for key, sent in rank.traffic.items():
            most[key] = max(sent, most.get(key, sent), key=itemgetter(1))
    return [
        {"op": op, "dimension": dimension, "count": count, "bytes": size}
        for (op, dimension), (count, size) in sorted(most.items())
    ]


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan, with numbers named as in its JSON."""
    console.print(f"{named(plan.layout)}: {plan.world} x {plan.device}", markup=False)
    for name, value in plan.as_json().items():
        if isinstance(value, int | float) and name not in ("world", "memory_limit", "fits"):
            text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
            console.print(f"{name.replace('_', ' '):<36}{text}", markup=False)
    names = (*CATEGORIES, "peak")
    memory = Table("rank", "pp", *names, title="memory in GiB, the most of each")
    for rank in plan.ranks:
        sizes = (f"{rank['memory'][name] / GIB:.3f}" for name in names)
        memory.add_row(str(rank["rank"]), str(rank["pp"]), *sizes)
    traffic = Table("op", "dimension", "count", "MiB", title="collectives of a rank in a step")
    for one in plan.collectives:
        mib = f"{one['bytes'] / 2**20:,.2f}"
        traffic.add_row(one["op"], one["dimension"], f"{one['count']:,}", mib)
    for table in (memory, traffic):
        table.title_justify = "left"
        console.print(table)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    have = f"of the {plan.memory_limit / GIB:.1f} GiB that tensors can have on a device"
    console.print(f"{verdict}: {plan.peak / GIB:.2f} GiB at the peak, {have}", markup=False)
