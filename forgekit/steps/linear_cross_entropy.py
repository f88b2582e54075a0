"""Cross-entropy from hidden states, without ever holding all logits.

It computes the numbers of ``cross_entropy``. Its gradient has a closed form, so that the forward
pass finds it while the logits are there, and masked positions contribute exactly nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from forgekit.data.batch import IGNORED
from forgekit.parallel.tensor.sharded_logits import with_plain_gradient
from forgekit.steps.losses import Loss, check_labels, check_shapes, loss_of_positions
from forgekit.steps.vocabulary_parallel import Columns, share_softmax, take_projection
from forgekit.tensors import wide

LOGITS, LOGITS_ON_CPU = 2**27, 2**21
"""Numbers of logits in a chunk, on an accelerator and on a CPU.

Tensors without values, as in ``forgekit plan``, stand for those of an accelerator.
"""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float = 0.0
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

    Returns:
        ``Loss``, as ``cross_entropy(hidden @ weight.T, labels, z_loss)``.

    Raises:
        ValueError: If the shapes do not fit.
        TypeError: If the dtype of the labels cannot hold -100 or every id of the vocabulary.
    """
    check_shapes("hidden", hidden, labels)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and hidden {tuple(hidden.shape)}; "
            "weight must be [v d] with the width d of hidden."
        )
    check_labels(labels, weight.shape[0])
    backward = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    hidden, weight, columns = take_projection(hidden, weight)
    flat = hidden.reshape(-1, hidden.shape[-1])
    weight, positions = weight.to(hidden.dtype), labels.reshape(-1).long()
    kind = hidden.device.type
    is_cast = torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if is_cast else nullcontext():
        found: Any = _LinearCrossEntropy.apply(flat, weight, positions, z_loss, backward, columns)
    total, losses = found
    return loss_of_positions(with_plain_gradient(total), losses, labels, is_nll=not z_loss)


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
    ) -> tuple[Tensor, Tensor]:
        losses = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if backward and needs_hidden else None
        grad_weight = _empty_sum(weight, hidden) if backward and needs_weight else None
        is_masked = (labels == IGNORED)[:, None]
        take = _take_chunk if columns is None else partial(_take_shared_chunk, columns=columns)
        size = _chunk_rows(weight)
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            part = hidden[rows]
            # Not bound to a name here: the chunk's logits are to be gone before its gradient.
            found, gradient = take(part @ weight.T, labels[rows], z_loss, backward)
            losses[rows] = found
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                part = part.masked_fill(is_masked[rows], 0.0)
                _add_product(grad_weight, gradient, part, is_first=start == 0)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

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
    logits: Tensor, labels: Tensor, z_loss: float, backward: bool
) -> tuple[Tensor, Tensor]:
    """Losses of some positions, ``[n]``, and the gradient of their sum by the logits, ``[n v]``."""
    dtype = logits.dtype
    log_p = F.log_softmax(logits, -1, dtype=wide(dtype))
    # A label outside the vocabulary fails here, instead of training class 0.
    losses = F.nll_loss(log_p, labels, ignore_index=IGNORED, reduction="none")
    log_z = _log_partition(logits, losses, labels) if z_loss else None
    if log_z is not None:
        losses = losses + z_loss * log_z.square()
    if not backward:
        return losses, log_p
    del logits
    return losses, _gradient(log_p, log_z, labels, z_loss).to(dtype)


def _take_shared_chunk(
    logits: Tensor, labels: Tensor, z_loss: float, backward: bool, *, columns: Columns
) -> tuple[Tensor, Tensor]:
    """The same of a rank's part of the vocabulary; all ranks find the same losses."""
    dtype = logits.dtype
    found = share_softmax(logits.to(wide(dtype)), labels, labels != IGNORED, z_loss, columns)
    if not backward:
        return found.losses, found.exponentials
    del logits
    return found.losses, found.gradient_().to(dtype)


def _log_partition(logits: Tensor, losses: Tensor, labels: Tensor) -> Tensor:
    """Logarithm of each position's sum of exponentials, ``[n]``; 0 without a target."""
    chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    # `where`, not a product: masked values may be NaN.
    return torch.where(labels != IGNORED, chosen.to(losses.dtype) + losses, 0.0)


def _gradient(log_p: Tensor, log_z: Tensor | None, labels: Tensor, z_loss: float) -> Tensor:
    """Gradient of the summed losses by the logits, ``[n v]``, in the memory of ``log_p``.

    That is ``slope * softmax - one_hot(label)`` with ``slope = 1 + 2 * z_loss * log_z``, and zero
    in rows without a target, whatever they hold.
    """
    is_masked = (labels == IGNORED)[:, None]
    gradient = log_p.exp_()
    if log_z is not None:
        gradient *= (1 + 2 * z_loss * log_z)[:, None]
    gradient.masked_fill_(is_masked, 0.0)
    at_label = is_masked.to(gradient.dtype).sub_(1)
    return gradient.scatter_add_(1, labels.clamp(min=0)[:, None], at_label)


def _empty_sum(weight: Tensor, hidden: Tensor) -> Tensor:
    """Memory for the gradient of the projection, which the first chunk fills."""
    make = torch.empty_like if hidden.shape[0] else torch.zeros_like
    return make(weight, dtype=wide(weight.dtype))


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor, *, is_first: bool) -> None:
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, hidden, beta=0 if is_first else 1)  # 0: what it holds is not read
    elif is_first:
        total.copy_(gradient.T @ hidden)
    else:
        total += gradient.T @ hidden


def _chunk_rows(weight: Tensor) -> int:
    """Rows whose logits are large enough to fill the device and small beside the weight."""
    is_on_cpu = weight.device.type == "cpu" and not isinstance(weight, FakeTensor)
    return max(16, (LOGITS_ON_CPU if is_on_cpu else LOGITS) // weight.shape[0])
