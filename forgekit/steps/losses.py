"""Losses as sums with counts, so that any split of a batch adds up to the same gradient.

A loss function returns ``Loss(sum, count)``. Nothing is divided where it is computed: the number
of targets in the global batch is known only after the last micro-batch, and one factor per step
divides by it then. Masked positions contribute exactly nothing, whatever stands there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import Tensor, nn

from forgekit.data.batch import IGNORED
from forgekit.tensors import wide

Number = Tensor | float | int
Metric = Number | tuple[Number, Number]


BITS = MappingProxyType({2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Integer dtypes by number of bytes."""


# A stdlib dataclass: it may leave a module that FSDP2 wraps, and FSDP2 looks for tensors inside
# dataclasses, but not inside attrs classes or TensorDicts (their gradients would stay unreduced).
@dataclasses.dataclass(frozen=True)
class Loss:
    """A summed loss and its normalizing count; the step divides once, by the sum of all counts.

    Attributes:
        sum: ``[]`` differentiable sum over the targets of this micro-batch.
        count: Number of targets, an int or a ``[]`` tensor. Counts of all micro-batches on all
            ranks are added, and the step divides by the total.
        metrics: Further numbers to report, by name: ``(sum, count)`` pairs, added up over the
            step and divided then; a single number counts as one observation. For a metric named
            ``<name>/loss`` the step also reports its count, as ``<name>/targets``.
        rows: Optionally the sum and count of each row, ``([b], [b])``; see ``losses_by_source``.
            Those of this library's losses are computed when they are read.
        means: The part of the sum that ``with_mean`` added.
        is_nll: Whether the sum is the negative log-likelihood of the targets, in nats, so that its
            mean has a perplexity (``evaluate``). Set it for a cross-entropy of your own; a loss
            with a further term, such as a z-loss, does not qualify.
        problem: Why the loss cannot be trained on, where there are several ranks: the step raises
            it on all of them. If one rank raised alone, the others would hang.

    Examples:
        >>> loss = Loss(torch.tensor(6.0), 3)
        >>> (loss + loss).sum
        tensor(12.)
        >>> loss.with_mean(torch.tensor(0.5), weight=0.1).sum
        tensor(6.1500)
    """

    sum: Tensor
    count: Tensor | int
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict)
    rows: Sequence[Tensor] | None = None
    means: Number = dataclasses.field(default=0.0, repr=False)
    is_nll: bool = False
    problem: str | None = dataclasses.field(default=None, repr=False)

    def __add__(self, other: Loss) -> Loss:
        """Add a loss over the same targets.

        Counts are the same if they are one tensor, or equal ints; two different tensors are
        compared by value, which reads the host. Pass the first loss's ``count`` to avoid that.

        Raises:
            ValueError: If the counts differ: one factor per step cannot divide both. With several
                ranks the step raises it, on all of them.
        """
        problem = self.problem or other.problem
        if self.count is not other.count and self.count != other.count:
            problem = (
                f"cannot add losses with counts {int(self.count)} and {int(other.count)}. Use "
                "loss.with_mean(aux, weight) for a mean weighted by targets (token_weighted), or "
                "forgekit.count_ahead to rescale by the step's true counts."
            )
            if not dist.is_initialized() or dist.get_world_size() == 1:
                raise ValueError(problem)
        self._check_names(other.metrics)
        rows = None
        if self.rows is not None and other.rows is not None:
            rows = (self.rows[0] + other.rows[0], self.rows[1])
        metrics, means = {**self.metrics, **other.metrics}, self.means + other.means
        total = self.sum + other.sum
        if problem is not None:  # a bad step on ranks whose own counts are equal
            total = total * torch.nan
        return Loss(total, self.count, metrics, rows, means, problem=problem)

    def __radd__(self, other: int) -> Loss:
        """Let ``sum`` add losses, which starts from 0."""
        return self if other == 0 else NotImplemented

    def with_metrics(self, **metrics: Metric) -> Loss:
        """Report further numbers beside the loss, which stays what it is; see ``metrics``.

        Examples:
            >>> loss = Loss(torch.tensor(6.0), 3, is_nll=True)
            >>> loss.with_metrics(accuracy=(torch.tensor(2), 3)).is_nll
            True
        """
        self._check_names(metrics)
        return dataclasses.replace(self, metrics={**self.metrics, **metrics})

    def _check_names(self, others: Mapping[str, Metric]) -> None:
        if twice := self.metrics.keys() & others.keys():
            raise ValueError(f"both losses have metrics named {sorted(twice)}; rename them in one.")

    def with_mean(self, aux: Tensor, weight: float) -> Loss:
        """Add a mean over this micro-batch, weighted by its number of targets.

        The policy ``token_weighted``: over the step the auxiliary loss enters as the mean of
        micro-batch means, each weighted by its targets, whatever the split.

        Args:
            aux: ``[]`` differentiable mean, for example a balance loss.
            weight: Factor.

        Returns:
            A loss with the same count; its sum is float32 or wider.
        """
        # Widened before the count: float16 ends at 65,504, and bfloat16 rounds 257.
        term = weight * aux.to(wide(aux.dtype)) * self.count
        means = self.means + term.detach()
        return dataclasses.replace(self, sum=self.sum + term, means=means, is_nll=False)


LossFn = Callable[[nn.Module, TensorDictBase], Loss]


class RowSums(Sequence[Tensor]):
    """Sum and count of each row, ``([b], [b])``, computed only when they are read."""

    def __init__(self, losses: Tensor, is_target: Tensor) -> None:
        self._losses, self._is_target = losses, is_target

    def __getitem__(self, index: Any) -> Any:
        values = self._losses.detach().view(self._is_target.shape), self._is_target
        return [value.flatten(1).sum(1) for value in values][index]

    def __len__(self) -> int:
        return 2


def losses_by_source(loss_fn: LossFn, sources: Sequence[str]) -> LossFn:
    """Let a loss function report the loss and the targets of each source as well.

    They travel as metrics in the step's one collective, so they are exact and global whatever the
    layout, and nothing is read by the host.

    Args:
        loss_fn: Returns a ``Loss`` with ``rows``, as those of this library have.
        sources: Names of the sources; ``source`` in a micro-batch, ``[b]``, is an index into them.
            Of a mixture: ``order.sources``.

    Returns:
        A loss function with the further metrics ``source/<name>/loss``, the mean over the targets
        of rows of this source (NaN without any), and ``source/<name>/targets``.

    Raises:
        ValueError: If a source is named twice; when called, if the loss has no rows.

    Examples:
        >>> def loss_fn(model, batch):
        ...     rows = torch.tensor([2.0, 4.0]), torch.tensor([4, 1])
        ...     return Loss(torch.tensor(6.0), 5, rows=rows)
        >>> batch = {"source": torch.tensor([1, 0])}
        >>> loss = losses_by_source(loss_fn, ("code", "prose"))(None, batch)
        >>> loss.metrics["source/prose/loss"]
        (tensor(2., dtype=torch.float64), tensor(4., dtype=torch.float64))
    """
    names = tuple(sources)
    if len(set(names)) < len(names):
        raise ValueError(f"source names must be unique; got {list(names)}. Pass order.sources.")

    def by_source(model: Any, batch: TensorDictBase) -> Loss:
        loss = loss_fn(model, batch)
        sums, counts = _split(loss, batch, len(names))
        pairs = zip(sums, counts, strict=True)
        return loss.with_metrics(
            **{f"source/{n}/loss": pair for n, pair in zip(names, pairs, strict=True)}
        )

    return by_source


def _split(loss: Loss, batch: TensorDictBase, sources: int) -> Tensor:
    """Sums and counts of each source, ``[2 sources]`` float64."""
    if loss.rows is None:
        raise ValueError(
            "the loss has no per-row values, needed to split it by source; return Loss(sum, count, "
            "rows=(sums, counts)), [b] each, as forgekit.cross_entropy does."
        )
    rows = torch.stack([part.detach().double() for part in loss.rows])
    return rows.new_zeros(2, sources).index_add_(1, batch["source"].to(rows.device), rows)


def pair_of(metric: Metric) -> tuple[Number, Number]:
    """Sum and count of a metric; a single number counts as one observation."""
    return tuple(metric) if isinstance(metric, tuple | list) else (metric, 1)  # pyright: ignore[reportReturnType]


def values_of(loss: Loss) -> list[Any]:
    """All tensors and numbers of a loss, but for its means and rows."""
    return [loss.sum, loss.count, *itertools.chain(*map(pair_of, loss.metrics.values()))]


def keep_rows_(values: Tensor, is_kept: Tensor) -> Tensor:
    """Set all rows of ``[n v]`` but those that are kept, ``[n]``, to zero in place.

    As integers: zero times NaN is NaN, and on a CPU ``masked_fill_`` with a column as its mask
    takes several times as long.
    """
    values.view(BITS[values.element_size()]).mul_(is_kept[:, None])
    return values


def check_shapes(name: str, values: Tensor, labels: Tensor) -> None:
    """Raise unless there is a label for each position."""
    if values.shape[:-1] != labels.shape:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and labels {tuple(labels.shape)}; labels "
            f"must have the shape of {name} without its last dimension."
        )


def check_labels(labels: Tensor, vocab_size: int) -> None:
    """Raise unless the labels' dtype holds -100 and every id of the vocabulary.

    Args:
        labels: ``[...]``.
        vocab_size: ``v``.

    Raises:
        TypeError: If it does not: what wraps around would train on wrong targets, silently.
    """
    dtype = labels.dtype
    if dtype == torch.int64:  # as nearly always
        return
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    limits = torch.iinfo(dtype) if is_integer else None
    if limits is None or limits.min > IGNORED or limits.max < vocab_size - 1:
        raise TypeError(
            f"labels are {dtype}, which cannot hold {IGNORED} and every id up to {vocab_size - 1}. "
            "Make them labels.long() before masking, and move a batch with .to(device) only."
        )
