"""Losses as sums with counts, so that any split of a batch adds up to the same gradient.

A loss function returns ``Loss(sum, count)``. Nothing is divided where it is computed: the number
of targets in the global batch is known only after the last micro-batch, and one factor per step
divides by it then. ``cross_entropy`` and ``linear_cross_entropy`` compute the same numbers from
logits and from hidden states; both have their gradient in closed form, so that masked places
contribute exactly nothing, whatever stands there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from forgekit.steps.vocab import (
    Columns,
    share_softmax,
    sum_losses,
    take_logits,
    take_projection,
)

__all__ = ["IGNORE", "Loss", "cross_entropy", "linear_cross_entropy"]

IGNORE = -100
"""Label of a place that carries no loss."""

Number = Tensor | float | int
Metric = Number | tuple[Number, Number]


# A stdlib dataclass: it may leave a module that FSDP2 wraps, and FSDP2 looks for tensors inside
# dataclasses, but not inside attrs classes or TensorDicts (their gradients would stay unreduced).
@dataclasses.dataclass(frozen=True)
class Loss:
    """A summed loss and what it is to be divided by, once, for the whole step.

    Attributes:
        sum: ``[]`` differentiable sum over the targets of this micro-batch.
        count: Number of targets, an int or a ``[]`` tensor. Counts of all micro-batches on all
            ranks are added, and the step divides by the total.
        metrics: Further numbers to report, by name: ``(sum, count)`` pairs, added up over the
            step and divided then; a single number counts as one observation.
        rows: Optionally the sum and count of each row, ``([b], [b])``, for per-source losses.

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
    rows: tuple[Tensor, Tensor] | None = None

    def __add__(self, other: Loss) -> Loss:
        """Add a loss over the same targets.

        Counts are the same if they are one tensor, or equal ints; two different tensors are
        compared by value, which reads the host. Pass the first loss's ``count`` to avoid that.

        Raises:
            ValueError: If the counts differ: one factor per step cannot divide both.
        """
        if not _same_count(self.count, other.count):
            raise ValueError(
                f"cannot add losses with counts {_shown(self.count)} and {_shown(other.count)}: a "
                "step divides by one count. Use loss.with_mean(aux, weight) to weight a "
                "micro-batch mean by its targets (token_weighted), or forgekit.count_ahead to "
                "rescale by the step's true counts."
            )
        if twice := self.metrics.keys() & other.metrics.keys():
            raise ValueError(f"both losses report {sorted(twice)}; rename one of each.")
        rows = None
        if self.rows is not None and other.rows is not None:
            rows = (self.rows[0] + other.rows[0], self.rows[1])
        return Loss(self.sum + other.sum, self.count, {**self.metrics, **other.metrics}, rows)

    def __radd__(self, other: int) -> Loss:
        """Let ``sum`` add losses, which starts from 0."""
        return self if other == 0 else NotImplemented

    def with_mean(self, aux: Tensor, weight: float) -> Loss:
        """Add a mean over this micro-batch, weighted by its number of targets.

        The policy ``token_weighted``: over the step the auxiliary loss enters as the mean of
        micro-batch means, each weighted by its targets, whatever the split.

        Args:
            aux: ``[]`` differentiable mean, for example a balance loss.
            weight: Factor.

        Returns:
            A loss with the same count.
        """
        return dataclasses.replace(self, sum=self.sum + weight * aux * self.count)


def cross_entropy(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Loss:
    """Cross-entropy of next-token logits, summed over the targets, in float32 or wider.

    Args:
        logits: ``[... v]``; what stands at masked places may be anything, NaN included. A DTensor
            that is sharded over the vocabulary stays so: ranks compute with their own columns.
        labels: ``[...]`` int, already shifted; -100 where there is no target.
        z_loss: Weight of the squared log-partition, which keeps logits from drifting.

    Returns:
        ``Loss`` with the number of labels that are not -100.

    Raises:
        ValueError: If the shapes do not fit.

    Examples:
        >>> cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]])).sum
        tensor(1.3863)

    References:
        z-loss: PaLM, section 5, https://arxiv.org/abs/2204.02311
    """
    _check_shapes("logits", logits, labels)
    labels = labels.reshape(-1).long()
    logits, columns = take_logits(logits)
    flat = logits.reshape(-1, logits.shape[-1])
    if columns is not None:
        return Loss(sum_losses(flat, labels, labels != IGNORE, z_loss, columns), _count(labels))
    flat = flat.to(_wide(logits.dtype))
    flat: Tensor = _DropNan.apply(flat)  # pyright: ignore[reportAssignmentType]
    total = F.cross_entropy(flat, labels, ignore_index=IGNORE, reduction="sum")
    if z_loss:
        # `where`, not a product: masked values may be NaN.
        log_z = torch.where(labels != IGNORE, flat.logsumexp(-1), 0.0)
        total = total + z_loss * log_z.square().sum()
    return Loss(total, _count(labels))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0
) -> Loss:
    """Cross-entropy of ``hidden @ weight.T`` without ever holding all logits.

    Rows are taken in chunks; each chunk's logits become a loss and a gradient at once and are
    dropped, so the backward pass only scales what the forward pass has found. Memory beyond the
    inputs is one gradient of each and two chunks of logits.

    Args:
        hidden: ``[... d]``.
        weight: ``[v d]`` output projection. With a DTensor that is sharded over the vocabulary
            ranks compute with their own rows of it.
        labels: ``[...]`` int, already shifted; -100 where there is no target.
        z_loss: Weight of the squared log-partition.

    Returns:
        ``Loss``, as ``cross_entropy(hidden @ weight.T, labels, z_loss)``.

    Raises:
        ValueError: If the shapes do not fit.
    """
    _check_shapes("hidden", hidden, labels)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and hidden {tuple(hidden.shape)}; "
            "weight must be [v d] with the width d of hidden."
        )
    backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    hidden, weight, columns = take_projection(hidden, weight)
    flat = rearrange(hidden, "... d -> (...) d")
    weight, labels = weight.to(hidden.dtype), labels.reshape(-1).long()
    with torch.autocast(hidden.device.type, enabled=False):
        total = _LinearCrossEntropy.apply(flat, weight, labels, z_loss, backward, columns)
    return Loss(total, _count(labels))  # pyright: ignore[reportArgumentType]


class _DropNan(torch.autograd.Function):
    """Identity whose backward replaces NaN by zero, for the sake of masked rows.

    torch gives a masked row the gradient ``softmax * 0``, which is NaN if the row holds one. A
    row with a target loses nothing by this: its loss is NaN, and that makes the step a bad one.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:  # noqa: ARG004
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG004
        # In place: nobody else holds this gradient, unless a graph of the backward is being built.
        clean = gradient.nan_to_num if torch.is_grad_enabled() else gradient.nan_to_num_
        return clean(nan=0.0, posinf=math.inf, neginf=-math.inf)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss: float,
        backward: bool,
        columns: Columns | None,
    ) -> Tensor:
        total = hidden.new_zeros((), dtype=_wide(hidden.dtype))
        grad_hidden = torch.empty_like(hidden) if backward else None
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if backward else None
        take = _take_chunk if columns is None else partial(_take_shared_chunk, columns=columns)
        size = _chunk_rows(weight)
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            # Not bound to a name here: the chunk's logits are to be gone before its gradient.
            loss, gradient = take(hidden[rows] @ weight.T, labels[rows], z_loss, backward)
            total += loss
            if grad_hidden is not None and grad_weight is not None:
                torch.mm(gradient, weight, out=grad_hidden[rows])
                is_target = (labels[rows] != IGNORE)[:, None]
                _add_product(grad_weight, gradient, torch.where(is_target, hidden[rows], 0.0))
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = (grad_weight * upstream).to(ctx.dtype)
        return grad_hidden * upstream.to(grad_hidden.dtype), scaled, None, None, None, None


def _take_chunk(
    logits: Tensor, labels: Tensor, z_loss: float, backward: bool
) -> tuple[Tensor, Tensor]:
    """Summed loss of some rows, ``[]``, and its gradient by their logits, ``[n v]``."""
    dtype = logits.dtype
    log_p = F.log_softmax(logits, -1, dtype=_wide(dtype))
    losses, log_z = _row_losses(logits, log_p, labels, z_loss)
    if not backward:
        return losses.sum(), log_p
    del logits
    return losses.sum(), _gradient(log_p, log_z, labels, z_loss).to(dtype)


def _take_shared_chunk(
    logits: Tensor, labels: Tensor, z_loss: float, backward: bool, *, columns: Columns
) -> tuple[Tensor, Tensor]:
    """The same of a rank's part of the vocabulary; all ranks find the same loss."""
    dtype = logits.dtype
    found = share_softmax(logits.to(_wide(dtype)), labels, labels != IGNORE, z_loss, columns)
    if not backward:
        return found.losses.sum(), found.exponentials
    del logits
    return found.losses.sum(), found.gradient_().to(dtype)


def _row_losses(
    logits: Tensor, log_p: Tensor, labels: Tensor, z_loss: float
) -> tuple[Tensor, Tensor | None]:
    """Each row's loss, and its log-partition where the z-loss needs it; ``[n]`` each."""
    is_target, picked = _picked(labels)
    chosen = log_p.gather(1, picked)[:, 0]
    losses, log_z = -chosen, None
    if z_loss:
        log_z = logits.gather(1, picked)[:, 0].to(chosen.dtype) - chosen
        losses = losses + z_loss * log_z.square()
    # `where`, not a product: masked values may be NaN.
    return torch.where(is_target, losses, 0.0), log_z


def _gradient(log_p: Tensor, log_z: Tensor | None, labels: Tensor, z_loss: float) -> Tensor:
    """Gradient of the summed losses by the logits, ``[n v]``.

    That is ``slope * softmax - one_hot(label)`` with ``slope = 1 + 2 * z_loss * log_z``, through
    torch's fused backward of log-softmax: it needs one pass where ``exp``, a product and a mask
    need three.
    """
    is_target, picked = _picked(labels)
    one = torch.where(is_target, torch.ones_like(log_p[:, 0]), 0.0)
    slope = one if log_z is None else torch.where(is_target, 1 + 2 * z_loss * log_z, 0.0)
    at_label = torch.zeros_like(log_p).scatter_(1, picked, -slope[:, None])
    gradient = torch._log_softmax_backward_data(at_label, log_p, 1, log_p.dtype)
    gradient.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)  # as in _DropNan
    return gradient if log_z is None else gradient.scatter_add_(1, picked, (slope - one)[:, None])


def _picked(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows have a target, ``[n]``, and the column to read, ``[n 1]``."""
    is_target = labels != IGNORE
    # Not clamped: a label outside the vocabulary must fail in gather instead of training class 0.
    return is_target, torch.where(is_target, labels, 0)[:, None]


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, hidden)
    else:
        total += gradient.T @ hidden


def _chunk_rows(weight: Tensor) -> int:
    """Rows whose logits are large enough to fill the device and small beside the weight."""
    places = 2**21 if weight.device.type == "cpu" else 2**27
    return max(16, places // weight.shape[0])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _count(labels: Tensor) -> Tensor:
    return (labels != IGNORE).sum()


def _check_shapes(name: str, values: Tensor, labels: Tensor) -> None:
    if values.shape[:-1] != labels.shape:
        raise ValueError(
            f"{name} has shape {tuple(values.shape)} and labels {tuple(labels.shape)}; labels "
            f"must have the shape of {name} without its last dimension."
        )


def _same_count(a: Tensor | int, b: Tensor | int) -> bool:
    if a is b:
        return True
    return bool(a == b)


def _shown(count: Tensor | int) -> int:
    return int(count)
