"""The sums of a step, and the one collective that adds them over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from forgekit.parallel.agreement import exchange
from forgekit.parallel.layout import full, shard_and_owners, size_of, world_of
from forgekit.state import Agreement, TrainState
from forgekit.steps.audit.agreement import Report, UnreducedError, agree, compare, difference
from forgekit.steps.losses import Loss, pair_of
from forgekit.steps.ranges import ranged

LAG = 2
"""Steps after which an accelerator's host reads whether a rank had a problem, as a stop request."""


@attrs.frozen
class Totals:
    """Sums over a step's targets: this rank's until ``reduce_totals``, then everybody's.

    Attributes:
        flat: ``[]`` float64 by name: ``targets``, ``loss``, ``("metrics", name, "sum")`` and
            ``("metrics", name, "count")`` of each metric, votes such as ``stop``, and, once
            reduced, ``grad_sq``, the squared norm of the raw gradient. ``loss_scale`` is a power of
            two in float32. Of a model with experts also what its routers noted, as
            ``("experts", "counts")``, with a row for each layer.
        samples: Rows consumed globally in this step; padding does not count.
        rows: Rows of this rank where ``samples`` takes them to be as many on every rank, else 0.
        digest: Of the rows of a run's first micro-batch, for the ranks to compare.
        unreduced: Names of parameters whose gradients FSDP holds back on this rank; refused by
            ``reduce_totals``, on all ranks together.
        problem: Why a loss of this rank cannot be trained on; raised like ``unreduced``.
        agreed: What the ranks agreed to add up, once reduced; ``update`` keeps it in the state.
        audit: Whether a first step's proofs were asked of ``accumulate``.
        held: Where ``accumulate`` ended, for a call that goes on; None once reduced.
    """

    flat: Mapping[Any, Tensor]
    samples: int = 0
    rows: int = 0
    digest: str = ""
    unreduced: tuple[str, ...] = ()
    problem: str | None = None
    agreed: Agreement | None = None
    audit: bool = True
    held: Held | None = attrs.field(default=None, repr=False)

    @classmethod
    def of(cls, *, samples: int = 0, **sums: float | Tensor) -> Self:
        """Build totals from numbers, for tests and hand-written loops.

        Examples:
            >>> Totals.of(targets=8, loss=2.0)["targets"]
            tensor(8., dtype=torch.float64)
        """
        values = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in sums.items()}
        return cls(values, samples)

    def __getitem__(self, key: str | tuple[str, ...]) -> Tensor:
        """Read one sum; ``grad_sq`` comes with ``reduce_totals``."""
        return self.flat[key]

    @property
    def sums(self) -> TensorDict:
        """The sums as a TensorDict, ``sums["metrics", name, "count"]``; built when it is read."""
        sums = TensorDict({"metrics": TensorDict({}, [])}, [])
        for key, value in self.flat.items():
            sums[key] = value
        return sums

    def plus(self, **sums: Tensor) -> Self:
        """Return totals with further sums, such as a vote."""
        return attrs.evolve(self, flat={**self.flat, **sums})


class LossSums:
    """The losses of a step, added up in float64: float32 would lose integers above 2**24."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self.losses: list[Tensor] = []
        self.counts: list[Tensor | float] = []
        self.metrics: dict[str, tuple[list[Any], list[Any]]] = {}
        self.is_nll = True
        self.problem: str | None = None

    def add(self, loss: Loss, *, rows: int) -> None:
        """Take one micro-batch's loss; nothing is computed yet."""
        self.rows += rows
        self.is_nll &= loss.is_nll
        self.problem = self.problem or loss.problem
        self.losses.append(loss.sum.detach())
        is_wrong = not isinstance(loss.count, Tensor) and loss.count < 0
        self.counts.append(math.nan if is_wrong else loss.count)
        for name, metric in loss.metrics.items():
            sums = self.metrics.setdefault(name, ([], []))
            for values, value in zip(sums, pair_of(metric), strict=True):
                # Detached here: a metric would keep its micro-batch's graph until the step ends.
                values.append(full(value.detach()) if isinstance(value, Tensor) else value)

    def fold(self) -> None:
        """Add up what was taken so far; a number that stays splits the memory it was made in."""
        self.losses, self.counts = [self._total(self.losses)], [self._targets()]
        for sums in (values for pair in self.metrics.values() for values in pair):
            sums[:] = [self._total(sums)]

    def totals(
        self, loss_scale: Tensor, samples: int, noted: Mapping[Any, Tensor] = {}, **more: Any
    ) -> Totals:
        """Add everything up.

        Args:
            loss_scale: ``[]``.
            samples: Rows consumed globally.
            noted: Further sums.
            **more: Further fields of the totals.
        """
        values: dict[Any, Tensor] = {
            "targets": self._targets(),
            "loss": self._total(self.losses),
            "loss_scale": loss_scale,
            **noted,
        }
        for name, pair in self.metrics.items():
            for kind, numbers in zip(("sum", "count"), pair, strict=True):
                values["metrics", name, kind] = self._total(numbers)
        return Totals(values, samples, **{"problem": self.problem, **more})

    def _targets(self) -> Tensor:
        """The number of targets; NaN, which makes the step a bad one, if a count is below zero."""
        counts = (stack.double() for stack in self._stacks(self.counts))
        return self._add([torch.threshold(n, -math.ulp(0.0), math.nan).sum() for n in counts])

    def _total(self, values: Iterable[Tensor | float]) -> Tensor:
        return self._add([stack.sum(dtype=torch.float64) for stack in self._stacks(values)])

    def _add(self, parts: list[Tensor]) -> Tensor:
        total = sum(parts[1:], parts[0])
        if total.device == self.device:
            return total
        # Added, not moved: an accelerator takes a number of the host without a wait.
        return torch.zeros((), dtype=torch.float64, device=self.device) + total

    def _stacks(self, values: Iterable[Tensor | float]) -> list[Tensor]:
        """Tensors of one dtype each, which together might be rounded; numbers as their sum."""
        numbers = 0.0
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value in values:
            if not isinstance(value, Tensor):
                numbers += value
            elif value.ndim:
                raise ValueError(
                    f"a loss has a sum, count or metric of shape {tuple(value.shape)}; each is a "
                    "number or a 0-d tensor. Sum it first."
                )
            else:
                by_dtype.setdefault(value.dtype, []).append(value)
        stacks = [torch.stack(v) if v[1:] else v[0] for v in by_dtype.values()]
        if numbers or not stacks:
            stacks.append(torch.full((), numbers, dtype=torch.float64, device=self.device))
        return stacks


@attrs.define(eq=False)
class Held:
    """Where a call of ``accumulate`` ended.

    Attributes:
        step: Number of the state's step.
        losses: The micro-batches' losses so far.
        noted: What routers of experts noted so far.
        samples: Rows consumed so far, globally.
        is_counted: Whether those are the rows of each rank, as many on all of them.
        shares: Rows, and the size of the whole step, of each part of a step among replica groups.
        read: Names of parameters whose shards the loss has read outside of the model.
        gradient: The first of the gradients to which the next call adds; another one, or none,
            means that they were cleared since.
        is_over: Whether a call has gone on from here.
    """

    step: int
    losses: LossSums
    noted: list[dict[str, dict[str, Tensor]]] = attrs.field(factory=list)
    samples: int = 0
    is_counted: bool = True
    shares: tuple[tuple[Any, Any], ...] = ()
    read: set[str] = attrs.field(factory=set)
    gradient: TensorWeakRef | None = None
    is_over: bool = False

    def count_rows(self, batches: Any, rows: int) -> None:
        """Count what a call has consumed: what its micro-batches say, or the rows of all ranks."""
        samples = getattr(batches, "samples", None)
        self.is_counted &= samples is None
        self.samples += rows if samples is None else samples
        if (whole := getattr(batches, "whole", None)) is not None:
            self.shares += ((samples, whole),)


def take_held(totals: Totals, state: TrainState, gradient: Tensor | None) -> Held:
    """Go on from what a call of ``accumulate`` returned, which works once.

    Args:
        totals: What it returned.
        state: The state whose step goes on.
        gradient: The first of the gradients that are there.

    Raises:
        ValueError: If they are not those of the totals.
    """
    held = totals.held
    if held is None or held.is_over or held.step != state.step:
        raise ValueError(GONE)
    # A gradient that was freed is None too, as no gradient is that was cleared.
    before = None if held.gradient is None else held.gradient()
    if before is not gradient or (held.gradient is not None and before is None):
        raise ValueError(GONE)
    held.is_over = True
    return attrs.evolve(held, is_over=False)


GONE = (
    "onto: the gradients that belong to these totals are gone. Another call went on from them or "
    "cleared them, an exception broke such a call off, or they were reduced. Begin the step again, "
    "without onto."
)
OPEN = (
    "the last call of accumulate had more=True, so gradients of this step are held back. Make the "
    "last call without it."
)


@ranged
def reduce_totals(
    totals: Totals,
    state: TrainState,
    *,
    settings: Mapping[str, Any] | None = None,
) -> Totals:
    """Add a step's sums, the squared gradient norm and the votes over all ranks.

    The one collective of a step, an all-reduce of a float64 vector. Weights of ownership make a
    plain sum right: losses and counts come from one tensor-parallel rank of the last pipeline
    stage, and a parameter's shard counts as one over the number of ranks that hold it.

    At a run's first step the ranks compare before that what they are about to add up, in one more
    collective, and that replicas of a parameter and of its gradient agree. A problem of one rank at
    a later step travels as a vote, so that no rank leaves alone: the step is a bad one on all
    ranks, and all of them raise; on an accelerator, where no host waits for a step, at the end of
    the second step after it. Rows that differ between the ranks make a step a bad one.

    Args:
        totals: What ``accumulate`` returned, with votes added where there are any.
        state: The state whose gradients were accumulated; not changed.
        settings: Options by name that have to be the same on all ranks; compared as text, as
            replicas and rows are, unless ``accumulate`` was told ``audit=False``.

    Returns:
        Totals that are the same on every rank, with ``grad_sq``.

    Raises:
        UnreducedError: If FSDP held gradients back.
        ValueError: If a loss cannot be trained on, ranks bring different names or rows, replicas
            differ, or names change from one step to the next: the vector would be added up across
            different things. On the other ranks as ``RuntimeError``, with the rank that says so.
    """
    totals, agreed = with_gradient_square(totals, state), state.agreed
    if agreed is None:
        options = {"step": state.step, "samples": state.samples, "seed": state.seed}
        options |= settings or {}
        agreed = agree(_report(totals, state), state, options, audit=totals.audit)
        problem = None
    else:
        problem = find_problem(totals, state)
    totals = attrs.evolve(totals, agreed=agreed, held=None)
    world = world_of(state.mesh)
    if world == 1:
        if problem is not None:
            raise problem
        return totals
    if problem is not None:
        totals = totals.plus(grad_sq=torch.full_like(totals["grad_sq"], torch.nan))
    # All ranks bring as many rows if their sum squared is their number times the sum of squares.
    rows = torch.full_like(totals["loss"], totals.rows)
    failed = torch.full_like(rows, problem is not None)
    totals = totals.plus(rows=rows, rows_squared=rows.square(), failed=failed)
    totals = _sum_over_ranks(totals, state, (*agreed.sums, "rows", "rows_squared", "failed"))
    _raise_together(agreed, totals["failed"], problem)
    is_even = world * totals["rows_squared"] == totals["rows"].square()
    return totals.plus(grad_sq=torch.where(is_even, totals["grad_sq"], torch.nan))


def find_problem(totals: Totals, state: TrainState) -> Exception | None:
    """Say why this rank cannot take a step; names of sums are compared from the second step on."""
    if totals.unreduced:
        return UnreducedError(totals.unreduced)
    if totals.problem is not None:
        return ValueError(totals.problem)
    agreed = state.agreed
    if agreed is None or not state.layout.has_last:
        return None
    names, keys = ({*every} - {"grad_sq", "loss_scale"} for every in (agreed.sums, totals.flat))
    if names == keys:
        return None
    return ValueError(
        f"the names of a step's sums changed: {difference(names, keys)}. Report the same "
        "metrics in every step; use (0.0, 0) for a metric without observations."
    )


def _raise_together(agreed: Agreement, failed: Tensor, problem: Exception | None) -> None:
    """Raise on all ranks if one of them had a problem; on an accelerator that of two steps ago."""
    event = None
    if failed.device.type != "cpu":
        failed = failed.to("cpu", non_blocking=True)
        event = torch.get_device_module().Event()
        event.record()
    agreed.waiting.append((failed, event, problem))
    if len(agreed.waiting) <= (0 if event is None else LAG):
        return
    failed, event, problem = agreed.waiting.popleft()
    if event is not None:
        event.synchronize()
    if isinstance(failed, FakeTensor) or failed.numpy() == 0:  # the first has no value
        return
    told = exchange(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    rank = next(rank for rank, one in enumerate(told) if one is not None)
    raise RuntimeError(f"rank {rank} could not take a step, which changed nothing: {told[rank]}")


def with_gradient_square(totals: Totals, state: TrainState) -> Totals:
    """Add ``grad_sq``, this rank's share of it."""
    return totals.plus(grad_sq=_gradient_square(state))


def reduce_losses(totals: Totals, state: TrainState) -> Totals:
    """Add the sums of an evaluation over all ranks, after comparing their names.

    Raises:
        ValueError: On every rank, if names or numbers of rows differ.
    """
    sums = compare(exchange(_report(totals, state), world_of(state.mesh)))
    return totals if world_of(state.mesh) == 1 else _sum_over_ranks(totals, state, sums)


def mean_metrics(totals: Totals) -> dict[str, Tensor]:
    """Divide the sums of a loss function's own metrics by their counts.

    Args:
        totals: Reduced totals.

    Returns:
        ``[]`` float64 by name, and of each ``<what>/loss`` its count as ``<what>/targets``.
    """
    means: dict[str, Tensor] = {}
    for key, total in totals.flat.items():
        if key[0] == "metrics" and key[2] == "sum":
            name, count = key[1], totals["metrics", key[1], "count"]
            means[name] = total / count
            if name.endswith("/loss"):
                means[name.removesuffix("loss") + "targets"] = count
    return means


def _sum_over_ranks(totals: Totals, state: TrainState, keys: Iterable[Any]) -> Totals:
    """All-reduce one vector; sums that this rank lacks, as stages before the last do, are zeros."""
    zero = torch.zeros_like(totals["loss"])
    owned = {key: totals.flat.get(key, zero) for key in keys}
    if not state.layout.owns_loss:
        owned = {key: value * 0.0 if _is_loss(key) else value for key, value in owned.items()}
    # Numbers of the host one by one: as a tensor they would be copied, for which the host waits.
    vector = torch.cat([value.reshape(-1) for value in owned.values()])
    dist.all_reduce(vector)
    parts = vector.split([value.numel() for value in owned.values()])
    pairs = zip(owned.items(), parts, strict=True)
    reduced = {key: part.view(value.shape) for (key, value), part in pairs}
    return attrs.evolve(totals, flat={**totals.flat, **reduced})


def _report(totals: Totals, state: TrainState) -> Report:
    return Report.of(
        state,
        _summed_keys(totals),
        totals.samples,
        totals.digest,
        unreduced=totals.unreduced,
        problem=totals.problem,
    )


def _is_loss(key: str | tuple[str, ...]) -> bool:
    return key in ("targets", "loss") or key[0] == "metrics"


def _summed_keys(totals: Totals) -> list[Any]:
    """The names in an order that is the same on all ranks, however metrics came."""
    return sorted((key for key in totals.flat if key != "loss_scale"), key=str)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer holds, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _gradient_square(state: TrainState) -> Tensor:
    """This rank's share of the squared L2 norm of the gradient that is due, ``[]`` float64."""
    # The ranks of other pipeline stages hold other parameters, never the same shard.
    world = world_of(state.mesh) // size_of(state.mesh, "pp")
    by_owners: dict[int, list[Tensor]] = {}
    for parameter in parameters_of(state.optimizer):
        if (gradient := parameter.grad) is not None:
            shard, owners = shard_and_owners(gradient, world)
            by_owners.setdefault(owners, []).append(shard)
    parts = []
    for owners, shards in by_owners.items():
        norms = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float64))
        square = norms.dot(norms)
        parts.append(square / owners if owners > 1 else square)
    device = state.targets.device
    if not parts or parts[0].device != device:  # of shards on the host: added as a number
        parts.insert(0, torch.zeros((), dtype=torch.float64, device=device))
    return sum(parts[1:], parts[0])
