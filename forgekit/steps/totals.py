"""The sums of a step, and the one collective that adds them over all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

import attrs
import torch
import torch.distributed as dist
from tensordict import TensorCollection, TensorDict
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from forgekit.parallel.agreement import exchange
from forgekit.parallel.layout import shard_and_owners, size_of, world_of
from forgekit.ranges import ranged
from forgekit.state import AgreedNames, TrainState
from forgekit.steps.audit.agreement import (
    Report,
    UnreducedError,
    agree,
    compare,
    coordinate_of,
    difference,
)
from forgekit.steps.losses import Loss, pair_of
from forgekit.tensors import HostCopy, full

LAG = 2
"""Steps after which an accelerator's host reads whether a rank had a problem, as a stop request."""


@attrs.frozen
class Checked:
    """Everything of a rank's step that is checked and never added up.

    Attributes:
        rows: Rows of this rank where ``samples`` assumes the same number on every rank, else 0.
        problem: Why a loss of this rank cannot be trained on; ``reduce_totals`` raises it, on all
            ranks together.
        unreduced: Names of parameters whose gradients FSDP holds back; refused in the same way.
        shares: Samples, and the size of the whole step, of each part of a step among replica
            groups; None once they were summed, or reduced over the ranks.
        agreed_names: What the ranks agreed to add up, once reduced; ``update`` keeps it in the
            state.
    """

    rows: int = 0
    problem: str | None = None
    unreduced: tuple[str, ...] = ()
    shares: tuple[tuple[int, tuple[int, int]], ...] | None = None
    agreed_names: AgreedNames | None = None


@attrs.frozen
class Totals:
    """Sums over a step's targets: this rank's until ``reduce_totals``, then everybody's.

    Attributes:
        sums: ``[]`` float64 by name: ``targets``, ``loss``, ``("metrics", name, "sum")`` and
            ``("metrics", name, "count")`` of each metric, votes such as ``stop``, and, once
            reduced, ``grad_sq``, the squared norm of the raw gradient. ``loss_scale`` is a power of
            two in float32. Of a model with experts also what its routers counted, as
            ``("experts", "counts")``, with a row for each layer.
        samples: Rows consumed globally in this step; padding does not count.
        checked: Everything that is not a sum.
    """

    sums: TensorDict
    samples: int = 0
    checked: Checked = attrs.field(factory=Checked, repr=False)

    @classmethod
    def of(cls, *, samples: int = 0, **sums: float | Tensor) -> Self:
        """Build totals from numbers, for tests and hand-written loops.

        Examples:
            >>> Totals.of(targets=8, loss=2.0)["targets"]
            tensor(8., dtype=torch.float64)
        """
        values = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in sums.items()}
        return cls(TensorDict(values, []), samples)

    def __getitem__(self, key: str | tuple[str, ...]) -> Tensor:
        """Read one sum; ``grad_sq`` comes with ``reduce_totals``."""
        return self.sums[key]

    def plus(self, **sums: Tensor) -> Self:
        """Return totals with further sums, such as a vote."""
        all_sums = TensorDict({**dict(self.sums.items()), **sums}, [])
        return type(self)(all_sums, self.samples, self.checked)


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
        """Replace the numbers so far by their sums; many long-lived scalars fragment memory."""
        self.losses, self.counts = [self._total(self.losses)], [self._targets()]
        for sums in (values for pair in self.metrics.values() for values in pair):
            sums[:] = [self._total(sums)]

    def totals(
        self, loss_scale: Tensor, samples: int, more: Mapping[str, Any] = {}, **checked: Any
    ) -> Totals:
        """Add everything up.

        Args:
            loss_scale: ``[]``.
            samples: Rows consumed globally.
            more: Further sums.
            **checked: Fields of ``Checked``.
        """
        values: dict[Any, Any] = {
            "targets": self._targets(),
            "loss": self._total(self.losses),
            "loss_scale": loss_scale,
            **more,
        }
        if self.metrics:
            values["metrics"] = {
                name: {"sum": self._total(each), "count": self._total(counts)}
                for name, (each, counts) in self.metrics.items()
            }
        return Totals(TensorDict(values, []), samples, Checked(problem=self.problem, **checked))

    def _targets(self) -> Tensor:
        """The number of targets; NaN if a count is negative, so that the step changes nothing."""
        return self._total(self.counts, are_counts=True)

    def _total(self, values: Iterable[Tensor | float], *, are_counts: bool = False) -> Tensor:
        """Add tensors up by dtype, since mixed ones might be rounded, and plain numbers apart."""
        numbers = 0.0
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for value in values:
            if not isinstance(value, Tensor):
                numbers += value
            elif value.ndim:
                rule = "loss sums, counts and metrics must be scalars (0-d)"
                raise ValueError(f"{rule}; got shape {tuple(value.shape)}. Sum it first.")
            else:
                by_dtype.setdefault(value.dtype, []).append(value)
        parts = []
        for same in by_dtype.values():
            stack = torch.stack(same) if same[1:] else same[0]
            if are_counts:
                stack = torch.threshold(stack.double(), -math.ulp(0.0), math.nan)
            parts.append(stack.sum(dtype=torch.float64))
        if numbers or not parts:
            parts.append(torch.full((), numbers, dtype=torch.float64, device=self.device))
        total = sum(parts[1:], parts[0])
        if total.device == self.device:
            return total
        # Added, not moved: adding a CPU scalar needs no synchronisation, `.to` would.
        return torch.zeros((), dtype=torch.float64, device=self.device) + total


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

    In the first step of a process the ranks first compare what they are about to add up, in one
    more collective. A problem of one rank at a later step is sent as a vote, so that no rank leaves
    alone: the step is a bad step (one that changes nothing) on all ranks, and all of them raise; on
    an accelerator, where no host waits for a step, at the end of the second step after it. Numbers
    of rows that differ between the ranks make a step a bad one.

    Args:
        totals: What ``accumulate`` returned, with votes added where there are any.
        state: The state whose gradients were accumulated; not changed.
        settings: Options by name that have to be the same on all ranks; compared as text in the
            first step of a process, ignored later.

    Returns:
        Totals that are the same on every rank, with ``grad_sq``.

    Raises:
        UnreducedError: If FSDP held gradients back.
        ValueError: If a loss cannot be trained on, ranks bring different names, rows or settings,
            or names change from one step to the next: the vector would be added up across
            different things. On the other ranks as ``RuntimeError``, with the rank that says so.
    """
    agreed_names, problem = state.agreed_names, None
    totals = with_gradient_square(totals, state)
    if agreed_names is None:
        agreed_names = agree(_report(totals, state), state, settings or {})
    else:
        problem = find_problem(totals, state)
    rows, world = totals.checked.rows, world_of(state.mesh)
    totals = Totals(totals.sums, totals.samples, Checked(agreed_names=agreed_names))
    if world == 1:
        if problem is not None:
            raise problem
        return totals
    if problem is not None:
        totals = totals.plus(grad_sq=torch.full_like(totals["grad_sq"], torch.nan))
    # All have the same number of rows if their sum squared is the world times the sum of squares.
    counted = torch.full_like(totals["loss"], rows)
    failed = torch.full_like(counted, problem is not None)
    votes = {"rows": counted, "rows_squared": counted.square(), "failed": failed}
    totals = _sum_over_ranks(totals.plus(**votes), state, (*agreed_names.sums, *votes))
    _raise_together(agreed_names, totals["failed"], problem)
    is_even = world * totals["rows_squared"] == totals["rows"].square()
    return totals.plus(grad_sq=torch.where(is_even, totals["grad_sq"], torch.nan))


def find_problem(totals: Totals, state: TrainState) -> Exception | None:
    """Return why this rank cannot take a step; sums' names are compared from the second step on."""
    if totals.checked.unreduced:
        return UnreducedError(totals.checked.unreduced)
    if totals.checked.problem is not None:
        return ValueError(totals.checked.problem)
    agreed_names = state.agreed_names
    if agreed_names is None or not state.layout.has_last:
        return None
    before, now = {*agreed_names.sums, "grad_sq"}, {*names_of(totals.sums), "grad_sq"}
    if before == now:
        return None
    return ValueError(
        f"the names of a step's sums changed: {difference(before, now)}. Report the same "
        "metrics in every step; use (0.0, 0) for a metric without observations."
    )


def _raise_together(agreed_names: AgreedNames, failed: Tensor, problem: Exception | None) -> None:
    """Raise on all ranks if one had a problem; on an accelerator, the problem of two steps ago."""
    agreed_names.waiting.append((HostCopy(failed), problem))
    if len(agreed_names.waiting) <= (0 if failed.device.type == "cpu" else LAG):
        return
    copy, problem = agreed_names.waiting.popleft()
    failed = copy.read()
    if isinstance(failed, FakeTensor) or failed.numpy() == 0:  # the first has no value
        return
    reports = exchange(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    rank, report = next((rank, one) for rank, one in enumerate(reports) if one is not None)
    raise RuntimeError(f"the step failed on rank {rank}; no state was changed: {report}")


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


def mean_metrics(sums: Mapping[str, Any]) -> dict[str, Tensor]:
    """Divide the sums of a loss function's own metrics by their counts.

    Args:
        sums: Reduced sums by name.

    Returns:
        ``[]`` float64 by name, and for each ``<name>/loss`` its count as ``<name>/targets``.
    """
    means: dict[str, Tensor] = {}
    for name, pair in sums.get("metrics", {}).items():
        means[name] = pair["sum"] / pair["count"]
        if name.endswith("/loss"):
            means[name.removesuffix("loss") + "targets"] = pair["count"]
    return means


def _sum_over_ranks(totals: Totals, state: TrainState, keys: Iterable[Any]) -> Totals:
    """All-reduce one vector; sums that this rank lacks (stages before the last) are zeros."""
    zero = torch.zeros_like(totals["loss"])
    owned = {key: totals.sums.get(key, zero) for key in keys}
    if not state.layout.owns_loss:
        owned = {key: value * 0.0 if _is_loss(key) else value for key, value in owned.items()}
    # Concatenated one by one: building one tensor from a Python list would copy synchronously.
    vector = torch.cat([value.reshape(-1) for value in owned.values()])
    dist.all_reduce(vector)
    parts = vector.split([value.numel() for value in owned.values()])
    pairs = zip(owned.items(), parts, strict=True)
    return with_sums(totals, {key: part.view(value.shape) for (key, value), part in pairs})


def with_sums(totals: Totals, sums: Mapping[Any, Tensor]) -> Totals:
    """Return totals with other values of sums, or further ones, by name."""
    changed = totals.sums.copy()
    for key, value in sums.items():
        changed[key] = value
    return attrs.evolve(totals, sums=changed)


def names_of(sums: TensorCollection, *above: str) -> list[Any]:
    """The names of sums but for the loss scale, in an order that is the same on all ranks."""
    names: list[Any] = []
    for name, value in sums.items():  # `keys(include_nested=True)` takes ten times as many calls
        if not isinstance(value, Tensor):
            names += names_of(value, *above, name)
        elif name != "loss_scale":
            names.append((*above, name) if above else name)
    return sorted(names, key=str)


def _report(totals: Totals, state: TrainState) -> Report:
    stated: dict[Any, Any] = {("samples", "", ()): totals.samples}
    if state.layout.has_last:  # in a pipeline only the last stage knows them
        stated["sums", "", ()] = names_of(totals.sums)
    checked = totals.checked
    return Report(
        stated, coordinate_of(state), unreduced=checked.unreduced, problem=checked.problem
    )


def _is_loss(key: str | tuple[str, ...]) -> bool:
    return key in ("targets", "loss") or key[0] == "metrics"


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters that an optimizer holds, in the order of its groups."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def _gradient_square(state: TrainState) -> Tensor:
    """This rank's share of the squared L2 norm of the raw gradient, ``[]`` float64."""
    # The ranks of other pipeline stages hold other parameters, never the same shard.
    world = world_of(state.mesh) // size_of(state.mesh, "pp")
    by_owners: dict[int, list[Tensor]] = {}
    for parameter in parameters_of(state.optimizer):
        if (gradient := parameter.grad) is not None:
            shard, owners = gradient, world
            if isinstance(gradient, DTensor):
                shard, owners = shard_and_owners(gradient, world)
            by_owners.setdefault(owners, []).append(shard)
    parts = []
    for owners, shards in by_owners.items():
        norms = torch.stack(torch._foreach_norm(shards, 2, dtype=torch.float64))
        square = norms.dot(norms)
        parts.append(square / owners if owners > 1 else square)
    device = state.targets.device
    if not parts or parts[0].device != device:  # shards on the host: added as a scalar
        parts.insert(0, torch.zeros((), dtype=torch.float64, device=device))
    return sum(parts[1:], parts[0])
