"""Cross-entropy of logits that ranks share by the vocabulary: each computes with its own columns.

A row's softmax needs three numbers of every rank: its largest logit, the sum of its exponentials
relative to that, and the label's logit where it has it. One all-gather brings them together; no
rank ever sees another's logits. All ranks add up in the same order, so they find the same loss.

References:
    Megatron-LM, section 3, https://arxiv.org/abs/1909.08053;
    online softmax, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forgekit.data.batch import IGNORED
from forgekit.inputs import nearest_multiples
from forgekit.parallel.layout import full
from forgekit.parallel.tensor.sharded_logits import SharedLogits, with_plain_gradient
from forgekit.parallel.tensor.styles import take_whole
from forgekit.tensors import wide

TENSOR = "tp"
"""The mesh dimension whose ranks share the vocabulary."""

# The newer name since torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@attrs.frozen(eq=False)
class Columns:
    """The part of the vocabulary whose logits this rank computes.

    Attributes:
        mesh: The ranks that share the vocabulary, a mesh of one dimension.
        first: Token id of the first column here.
        vocab_size: Columns on all ranks, ``v``.
    """

    mesh: DeviceMesh
    first: int
    vocab_size: int


def take_logits(logits: Tensor) -> tuple[Tensor, Columns | None]:
    """Take this rank's logits, a plain tensor, and which columns they are.

    Args:
        logits: ``[... v]``, a plain tensor, a DTensor, or what a sharded model returned.

    Returns:
        ``[... v/tp]`` and their columns where the vocabulary is shared; else ``[... v]`` and None.

    Raises:
        ValueError: If they are sharded over other mesh dimensions than ``tp``, or unevenly.
    """
    if isinstance(logits, SharedLogits):
        logits = logits.current()
    columns = _columns("logits", logits, logits.ndim - 1)
    if columns is not None and isinstance(logits, DTensor):
        return logits.to_local(), columns
    return full(logits), None


def take_projection(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Columns | None]:
    """Take hidden states and this rank's rows of the projection, plain tensors.

    Gradients find their way back by placements: each rank's columns give a part of the gradient
    of ``hidden``, and those parts are summed.

    Args:
        hidden: ``[... d]``; if it is plain, the same on all ranks.
        weight: ``[v d]``.

    Returns:
        ``[... d]``, and ``[v/tp d]`` with its columns where the vocabulary is shared; else
        ``[v d]`` and None.

    Raises:
        ValueError: If they are sharded over other mesh dimensions than ``tp``, or unevenly.
    """
    columns = _columns("weight", weight, 0)
    if columns is None or not isinstance(weight, DTensor):
        return full(hidden), full(weight), None
    return take_whole(hidden, columns.mesh), weight.to_local(), columns


@attrs.frozen(eq=False)
class Softmax:
    """What the ranks found together about the rows of their logits.

    Attributes:
        losses: ``[n]``, the same on all ranks; 0 in rows without a target.
        exponentials: ``[n v/tp]``; with ``slope`` the gradient of the losses but for the labels.
        slope: ``[n]``.
        column: ``[n 1]`` column of the label.
        is_here: ``[n 1]`` whether the label is one of this rank's columns.
    """

    losses: Tensor
    exponentials: Tensor
    slope: Tensor
    column: Tensor
    is_here: Tensor

    def gradient_(self) -> Tensor:
        """Gradient of the summed losses by this rank's logits, in place of the exponentials."""
        gradient = self.exponentials.mul_(self.slope[:, None])
        # Rows without a target may hold NaN, which their zero slope has not removed.
        gradient.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
        return gradient.scatter_add_(1, self.column, -self.is_here.to(gradient.dtype))


def share_softmax(
    logits: Tensor, labels: Tensor, is_target: Tensor, z_loss: float, columns: Columns
) -> Softmax:
    """Find each row's loss together with the other ranks, in one collective.

    Args:
        logits: ``[n v/tp]`` float32 or wider; consumed: its memory is used again.
        labels: ``[n]`` int; anything where there is no target.
        is_target: ``[n]`` bool.
        z_loss: Weight of the squared log-partition.
        columns: Which columns the logits are.

    Returns:
        The losses, and what their gradient is made of.
    """
    column, is_here = _find(labels, is_target, logits.shape[1], columns)
    picked = torch.where(is_here, logits.gather(1, column)[:, 0], 0.0)
    largest = logits.amax(1)
    # A rank may have nothing but -inf in a row: padded vocabularies are masked that way.
    base = torch.where(largest == -math.inf, 0.0, largest)
    exponentials = logits.sub_(base[:, None]).exp_()
    own = torch.stack([largest, exponentials.sum(1), picked])
    everyone = own.new_empty(columns.mesh.size() * own.shape[0], own.shape[1])
    all_gather(everyone, own, group=columns.mesh.get_group())
    everyone = everyone.unflatten(0, (-1, own.shape[0]))  # [tp 3 n]
    top = everyone[:, 0].amax(0)
    scales = (everyone[:, 0] - top).exp()
    total = (scales * everyone[:, 1]).sum(0)
    log_total, slope = total.log(), scales[columns.mesh.get_local_rank()] / total
    losses = log_total - (everyone[:, 2].sum(0) - top)
    if z_loss:
        log_z = top + log_total
        losses = losses + z_loss * log_z.square()
        slope = slope * (1 + 2 * z_loss * log_z)
    # `where`, not a product: masked values may be NaN.
    losses, slope = torch.where(is_target, losses, 0.0), torch.where(is_target, slope, 0.0)
    return Softmax(losses, exponentials, slope, column, is_here[:, None])


def shared_losses(logits: Tensor, labels: Tensor, z_loss: float, columns: Columns) -> Tensor:
    """Compute the cross-entropies of shared logits, differentiably.

    Args:
        logits: ``[n v/tp]``, left as they are.
        labels: ``[n]`` int; -100 where there is no target.
        z_loss: Weight of the squared log-partition.
        columns: Which columns the logits are.

    Returns:
        ``[n]`` float32 or wider, the same on all ranks; 0 where there is no target.
    """
    losses: Any = _SharedCrossEntropy.apply(logits, labels, labels != IGNORED, z_loss, columns)
    return with_plain_gradient(losses)


class _SharedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        is_target: Tensor,
        z_loss: float,
        columns: Columns,
    ) -> Tensor:
        copied = logits.to(wide(logits.dtype), copy=True)
        found = share_softmax(copied, labels, is_target, z_loss, columns)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(found.gradient_())
        ctx.dtype = logits.dtype
        return found.losses

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream[:, None]).to(ctx.dtype), None, None, None, None


def _find(labels: Tensor, is_target: Tensor, width: int, columns: Columns) -> tuple[Tensor, Tensor]:
    """Column of each row's label, ``[n 1]``, and whether it is this rank's, ``[n]``."""
    token = torch.where(is_target, labels, 0)
    column = token - columns.first
    is_here = is_target & (column >= 0) & (column < width)
    # A label outside the vocabulary must fail in gather, on all ranks alike.
    is_known = (token >= 0) & (token < columns.vocab_size)
    return torch.where(is_known & ~is_here, 0, column)[:, None], is_here


def _columns(name: str, values: Tensor, dim: int) -> Columns | None:
    """This rank's part of the vocabulary, if ``values`` is a DTensor that is sharded over it."""
    if not isinstance(values, DTensor):
        return None
    mesh, size = values.device_mesh, values.shape[dim]
    # By name: over FSDP's dimensions each rank has another gradient for the same rows.
    if mesh.mesh_dim_names != (TENSOR,):
        shown = ", ".join(map(repr, mesh.mesh_dim_names or ("unnamed",)))
        raise ValueError(
            f"{name} is a DTensor over the mesh dimensions {shown}; a loss takes shards over "
            f"{TENSOR!r} alone. A parameter looks like that while FSDP has not gathered it: read "
            "it inside forward, model(ids, head=partial(forgekit.linear_cross_entropy, "
            "labels=labels))."
        )
    if not values.placements[0].is_shard(dim):
        return None
    if size % mesh.size():
        nearest = nearest_multiples(size, mesh.size())
        raise ValueError(
            f"{name} has a vocabulary of {size}, which {mesh.size()} ranks share; their number "
            f"must divide it; {nearest}."
        )
    return Columns(mesh, mesh.get_local_rank() * (size // mesh.size()), size)
