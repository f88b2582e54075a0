"""Cross-entropy: of logits, and of hidden states without ever holding all logits.

The chunked one computes the same numbers. Its gradient has a closed form, so that the forward pass
finds it while a chunk's logits are there, and masked positions contribute exactly nothing.

Where ranks share the vocabulary each computes with its own columns. A row's softmax needs three
numbers of every rank: its largest logit, the sum of its exponentials relative to that, and the
label's logit where it has it. One all-gather brings them together; no rank ever sees another's
logits. All ranks add up in the same order, so they find the same loss.

References:
    Megatron-LM, section 3, https://arxiv.org/abs/1909.08053;
    online softmax, https://arxiv.org/abs/1805.02867
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forgekit.checks import nearest_multiples
from forgekit.data.batch import IGNORED
from forgekit.parallel.tensor.styles import take_whole
from forgekit.steps.losses import Loss, RowSums, check_labels, check_shapes, keep_rows_
from forgekit.tensors import full, wide

LOGITS, LOGITS_ON_CPU = 2**27, 2**21
"""Numbers of logits in a chunk, on an accelerator (or a tensor without values) and on a CPU."""

TENSOR = "tp"
"""The mesh dimension whose ranks share the vocabulary."""

# The newer name since torch 2.13.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def cross_entropy(logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Loss:
    """Cross-entropy of next-token logits, summed over the targets, in float32 or wider.

    Args:
        logits: ``[... v]``; masked positions may hold anything, NaN included. A DTensor is
            gathered: ``linear_cross_entropy`` computes with each rank's columns instead.
        labels: ``[...]`` signed int, already shifted; -100 where there is no target. Another
            label outside the vocabulary raises (on CUDA as a device-side assertion).
        z_loss: Weight of the squared log-partition, which keeps logits from drifting.

    Returns:
        ``Loss`` with the number of labels that are not -100.

    Raises:
        ValueError: If the shapes do not fit.
        TypeError: If the dtype of the labels cannot hold -100 or every id of the vocabulary.

    Examples:
        >>> cross_entropy(torch.zeros(1, 2, 4), torch.tensor([[3, -100]])).sum
        tensor(1.3863)

    References:
        z-loss: PaLM, section 5, https://arxiv.org/abs/2204.02311
    """
    is_target = labels != IGNORED
    losses = position_losses(logits, labels, z_loss, is_target=is_target)
    return _loss_of(losses.sum(), losses, is_target, is_nll=not z_loss)


def position_losses(
    logits: Tensor, labels: Tensor, z_loss: float = 0.0, *, is_target: Tensor | None = None
) -> Tensor:
    """``cross_entropy`` at each position, ``[n]``, differentiable; 0 where there is no target."""
    check_shapes("logits", logits, labels)
    check_labels(labels, logits.shape[-1])
    is_target = (labels != IGNORED if is_target is None else is_target).reshape(-1)
    _check_mesh("logits", logits)
    logits, positions = full(logits), labels.reshape(-1).long()
    flat = logits.reshape(-1, logits.shape[-1]).to(wide(logits.dtype))
    if flat.requires_grad:  # a hook costs a third of an autograd function in Python
        flat.register_hook(partial(_without_masked, is_target))
    losses = F.cross_entropy(flat, positions, ignore_index=IGNORED, reduction="none")
    if z_loss:
        # `where`, not a product: masked values may be NaN.
        log_z = torch.where(is_target, flat.logsumexp(-1), 0.0)
        losses = losses + z_loss * log_z.square()
    return losses


def _loss_of(total: Tensor, losses: Tensor, is_target: Tensor, *, is_nll: bool) -> Loss:
    """Build a loss from positions, with per-row sums if there is a dimension of rows."""
    rows = RowSums(losses, is_target) if is_target.ndim > 1 else None
    return Loss(total, is_target.sum(), rows=rows, is_nll=is_nll)


def _without_masked(is_target: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Set the gradient of masked rows to zero.

    torch gives a masked row ``softmax * 0``, which is NaN if the row holds one. NaN in a row with
    a target stays, whatever it comes from: it makes the step a bad one.
    """
    if gradient is None:  # of an output that nobody used
        return None
    if torch.is_grad_enabled():  # a graph of the backward is being built
        return gradient.masked_fill(~is_target.unsqueeze(-1), 0.0)
    return keep_rows_(gradient, is_target)  # in place: nobody else holds this gradient


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float = 0.0,
    *,
    vocab_size: int | None = None,
) -> Loss:
    """Cross-entropy of ``hidden @ weight.T`` without ever holding all logits.

    Rows are taken in chunks; each chunk's logits become a loss and a gradient at once and are
    dropped, so the backward pass only scales what the forward pass has found. Memory beyond the
    inputs is one gradient of each that is trained and two chunks of logits.

    Args:
        hidden: ``[... d]``.
        weight: ``[v d]`` output projection. With a DTensor that is sharded over the vocabulary
            ranks compute with their own rows of it.
        labels: ``[...]`` signed int, already shifted; -100 where there is no target.
        z_loss: Weight of the squared log-partition.
        vocab_size: Rows of the weight that are tokens, the first ones; all if None.

    Returns:
        ``Loss``, as ``cross_entropy(hidden @ weight.T, labels, z_loss)``.

    Raises:
        ValueError: If the shapes do not fit.
        TypeError: If the dtype of the labels cannot hold -100 or every id of the vocabulary.
    """
    check_projection(hidden, weight, labels)
    backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    hidden, weight, columns = take_projection(hidden, weight, vocab_size)
    function = _LinearCrossEntropy
    total, losses = apply_to_rows(function, hidden, weight, labels, z_loss, backward, columns)
    return _loss_of(total, losses, labels != IGNORED, is_nll=not z_loss)


def check_projection(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    """Raise unless ``hidden @ weight.T`` has a row for each label, and a column for every id."""
    check_shapes("hidden", hidden, labels)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and hidden {tuple(hidden.shape)}; "
            "weight must be [v d] with the width d of hidden."
        )
    check_labels(labels, weight.shape[0])


def apply_to_rows(
    function: type[Function], hidden: Tensor, weight: Tensor, labels: Tensor, *options: Any
) -> Any:
    """Apply a function to ``[n d]``, ``[v d]``, ``[n]`` and its options, without autocast."""
    flat, positions = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    kind = hidden.device.type
    is_cast = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if is_cast else nullcontext():
        return function.apply(flat, weight.to(hidden.dtype), positions, *options)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss: float,
        backward: bool,
        columns: Columns | None,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if backward and needs_hidden else None
        grad_weight = None
        if backward and needs_weight:
            grad_weight = torch.empty_like(weight, dtype=wide(weight.dtype))
        take = _take_chunk if columns is None else partial(_take_shared_chunk, columns=columns)
        size = chunk_rows(weight)
        chunks = zip(hidden.split(size), labels.split(size), strict=True)
        losses: list[Tensor] = []
        for number, (part, targets) in enumerate(chunks):
            is_target = targets != IGNORED
            # Not bound to a name here: the chunk's logits are to be gone before its gradient.
            of_rows, gradient = take(part @ weight.T, targets, is_target, z_loss, backward)
            losses.append(of_rows)
            if grad_hidden is not None:
                start = number * size
                torch.mm(gradient, weight, out=grad_hidden[start : start + size])
            if grad_weight is not None:
                part = keep_rows_(part.clone(), is_target)
                add_product(grad_weight, gradient, part, is_first=number == 0)
        each = torch.cat(losses) if losses[1:] else losses[0]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(each)
        ctx.set_materialize_grads(False)
        return each.sum(), each

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: Tensor, _losses: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * upstream.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * upstream).to(ctx.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _take_chunk(
    logits: Tensor, labels: Tensor, is_target: Tensor, z_loss: float, backward: bool
) -> tuple[Tensor, Tensor]:
    """Losses of some positions, ``[n]``, and the gradient of their sum by the logits, ``[n v]``."""
    dtype = logits.dtype
    log_p = torch.log_softmax(logits, -1, dtype=wide(dtype))
    # A label outside the vocabulary fails here, instead of training class 0.
    losses = F.nll_loss(log_p, labels, ignore_index=IGNORED, reduction="none")
    log_z = _log_partition(logits, losses, labels) if z_loss else None
    if log_z is not None:
        losses = losses + z_loss * log_z.square()
    if not backward:
        return losses, log_p
    # On a CPU cheaper than the exponentials of `log_p`, whose memory it takes.
    p = torch.softmax(logits, -1, wide(dtype), out=log_p)
    del logits
    return losses, _gradient(p, log_z, labels, is_target, z_loss).to(dtype)


def _take_shared_chunk(
    logits: Tensor,
    labels: Tensor,
    is_target: Tensor,
    z_loss: float,
    backward: bool,
    *,
    columns: Columns,
) -> tuple[Tensor, Tensor]:
    """The same of a rank's part of the vocabulary, in one collective; all find the same losses."""
    dtype = logits.dtype
    mask_padding_(logits, columns)
    column, is_here = find_columns(labels, is_target, logits.shape[1], columns)
    rows, exponentials = measure_rows(logits.to(wide(dtype)), column, is_here)
    del logits
    top, scales, sums = combine_rows(rows, columns)
    log_total = sums[0].log()
    losses = log_total - (sums[1] - top)
    # Of the losses by the logits, but for the labels: the exponentials times this.
    slope = scales[columns.mesh.get_local_rank()] / sums[0]
    if z_loss:
        log_z = top + log_total
        losses = losses + z_loss * log_z.square()
        slope = slope * (1 + 2 * z_loss * log_z)
    # `where`, not a product: masked values may be NaN.
    losses = torch.where(is_target, losses, 0.0)
    if not backward:
        return losses, exponentials
    gradient = exponentials.mul_(slope[:, None])
    gradient.scatter_add_(1, column, -is_here[:, None].to(gradient.dtype))
    return losses, keep_rows_(gradient, is_target).to(dtype)


def _log_partition(logits: Tensor, losses: Tensor, labels: Tensor) -> Tensor:
    """Logarithm of each position's sum of exponentials, ``[n]``; 0 without a target."""
    chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    # `where`, not a product: masked values may be NaN.
    return torch.where(labels != IGNORED, chosen.to(losses.dtype) + losses, 0.0)


def _gradient(
    p: Tensor, log_z: Tensor | None, labels: Tensor, is_target: Tensor, z_loss: float
) -> Tensor:
    """Gradient of the summed losses by the logits, ``[n v]``, in the memory of ``p``.

    That is ``slope * softmax - one_hot(label)`` with ``slope = 1 + 2 * z_loss * log_z``, and zero
    in rows without a target, whatever they hold.
    """
    if log_z is not None:
        p *= (1 + 2 * z_loss * log_z)[:, None]
    column = labels.clamp(min=0)[:, None]
    p.scatter_add_(1, column, p.new_full((), -1.0).expand(column.shape))
    return keep_rows_(p, is_target)


def add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool = False) -> None:
    """Add ``a.T @ b`` to a total in place; as the first, what the total holds is not read."""
    if total.dtype == a.dtype:
        total.addmm_(a.T, b, beta=0 if is_first else 1)
    elif is_first:
        total.copy_(a.T @ b)
    else:
        total += a.T @ b


def chunk_rows(weight: Tensor) -> int:
    """Rows whose logits are large enough to fill the device and small beside the weight."""
    is_on_cpu = weight.device.type == "cpu" and not isinstance(weight, FakeTensor)
    return max(16, (LOGITS_ON_CPU if is_on_cpu else LOGITS) // weight.shape[0])


@attrs.frozen(eq=False)
class Columns:
    """The part of the vocabulary whose logits this rank computes.

    Attributes:
        mesh: The ranks that share the vocabulary, a mesh of one dimension.
        first: Token id of the first column here.
        vocab_size: Tokens on all ranks; columns above are padding.
    """

    mesh: DeviceMesh
    first: int
    vocab_size: int


def take_projection(
    hidden: Tensor, weight: Tensor, vocab_size: int | None = None
) -> tuple[Tensor, Tensor, Columns | None]:
    """Take hidden states and this rank's rows of the projection, plain tensors.

    Gradients find their way back by placements: each rank's columns give a part of the gradient
    of ``hidden``, and those parts are summed.

    Args:
        hidden: ``[... d]``; if it is plain, the same on all ranks.
        weight: ``[v d]``.
        vocab_size: Rows that are tokens, the first ones; all if None.

    Returns:
        ``[... d]``, and ``[v/tp d]`` with its columns where the vocabulary is shared; else
        ``[v d]`` and None.

    Raises:
        ValueError: If they are sharded over other mesh dimensions than ``tp``, or unevenly.
    """
    columns = _columns(weight)
    if columns is None or not isinstance(weight, DTensor):
        weight = full(weight)
        return full(hidden), weight if vocab_size is None else weight[:vocab_size], None
    if vocab_size is not None:
        columns = attrs.evolve(columns, vocab_size=vocab_size)
    return take_whole(hidden, columns.mesh), weight.to_local(), columns


def mask_padding_(logits: Tensor, columns: Columns | None) -> None:
    """Take columns of padding out of a rank's logits, ``[n v]``, in place."""
    width = logits.shape[1]
    tokens = width if columns is None else columns.vocab_size - columns.first
    if tokens < width:
        logits[:, max(tokens, 0) :] = -math.inf


def measure_rows(logits: Tensor, column: Tensor, is_here: Tensor) -> tuple[Tensor, Tensor]:
    """Measure what a softmax needs of each row of a rank's columns.

    Args:
        logits: ``[n v]`` float32 or wider; consumed: their memory gets the exponentials.
        column: ``[n 1]`` column of the label.
        is_here: ``[n]`` whether the label is one of these columns.

    Returns:
        ``[3 n]``: the largest logit, the sum of exponentials relative to it, and the label's logit
        or 0; and the exponentials, ``[n v]``.
    """
    at_label = torch.where(is_here, logits.gather(1, column)[:, 0], 0.0)
    largest = logits.amax(1)
    # A rank may have nothing but -inf in a row: padded vocabularies are masked that way.
    base = torch.where(largest == -math.inf, 0.0, largest)
    exponentials = logits.sub_(base[:, None]).exp_()
    return torch.stack([largest, exponentials.sum(1), at_label]), exponentials


def combine_rows(rows: Tensor, columns: Columns | None) -> tuple[Tensor, Tensor, Tensor]:
    """Combine what all ranks measured of the same rows, in one collective.

    Args:
        rows: ``[k n]``: the largest logit, the sum of exponentials relative to it, the label's
            logit; what follows is relative like the second.
        columns: Of which columns; None for all of them.

    Returns:
        The largest logit of each row, ``[n]``; each rank's scale relative to it, ``[tp n]``; and
        the other sums over the ranks, ``[k-1 n]``: all add up alike, in the order of the ranks.
    """
    every = rows[None]
    if columns is not None:
        every = rows.new_empty(columns.mesh.size() * len(rows), rows.shape[1])
        all_gather(every, rows, group=columns.mesh.get_group())
        every = every.unflatten(0, (-1, len(rows)))  # [tp k n]
    top = every[:, 0].amax(0)
    scales = (every[:, 0] - top).exp()
    sums = [every[:, 2] if k == 2 else scales * every[:, k] for k in range(1, len(rows))]
    return top, scales, torch.stack(sums).sum(1)


def find_columns(
    labels: Tensor, is_target: Tensor, width: int, columns: Columns | None
) -> tuple[Tensor, Tensor]:
    """Column of each row's label, ``[n 1]``, and whether it is this rank's, ``[n]``."""
    first, vocab_size = (0, width) if columns is None else (columns.first, columns.vocab_size)
    token = torch.where(is_target, labels, 0)
    column = token - first
    is_here = is_target & (column >= 0) & (column < width)
    # A label outside the vocabulary must fail in gather, on all ranks.
    is_known = (token >= 0) & (token < vocab_size)
    return torch.where(is_known & ~is_here, 0, column)[:, None], is_here


def _check_mesh(name: str, values: Tensor) -> None:
    """Raise for a DTensor over other mesh dimensions than that of tensor parallelism."""
    # By name: over FSDP's dimensions each rank has another gradient for the same rows.
    if isinstance(values, DTensor) and values.device_mesh.mesh_dim_names != (TENSOR,):
        raise ValueError(
            f"{name} is a DTensor over the mesh dimensions {values.device_mesh.mesh_dim_names}, "
            f"not {TENSOR!r} alone: FSDP has not gathered it. Read it inside forward, "
            "model(ids, head=partial(forgekit.linear_cross_entropy, labels=labels))."
        )


def _columns(weight: Tensor) -> Columns | None:
    """This rank's part of the vocabulary, if the projection is a DTensor that is sharded by it."""
    _check_mesh("weight", weight)
    if not isinstance(weight, DTensor) or not weight.placements[0].is_shard(0):
        return None
    mesh, size = weight.device_mesh, weight.shape[0]
    if size % mesh.size():  # the last rank would take its columns for others
        raise ValueError(
            f"weight has a vocabulary of {size}, which {mesh.size()} ranks share; "
            f"{nearest_multiples(size, mesh.size())}."
        )
    return Columns(mesh, mesh.get_local_rank() * (size // mesh.size()), size)
