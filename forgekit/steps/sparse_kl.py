"""Divergence from a teacher's stored top-k distribution, without ever holding all logits.

A teacher's k most likely tokens and the mass of all others are a distribution over k + 1 outcomes.
The student's is summed up to the same outcomes, so no mass is lost on either side: the divergence
is at most that over the whole vocabulary, and is that where k is the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function, once_differentiable

from forgekit.data.batch import IGNORED
from forgekit.steps.cross_entropy import (
    Columns,
    add_product,
    all_gather,
    apply_to_rows,
    check_projection,
    mask_padding_,
    take_projection,
)
from forgekit.steps.log_probs import check_temperature, chunks_of
from forgekit.steps.losses import Loss, RowSums, keep_rows_
from forgekit.tensors import wide


def sparse_kl(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    reverse: bool = False,
    vocab_size: int | None = None,
) -> Loss:
    """Divergence of a student from a teacher's top-k log-probabilities, summed over positions.

    Forward, ``sum p (log p - log q)`` over the k tokens, plus the same term for the mass that is
    left over: the teacher's ``1 - sum p`` and the student's on all other tokens. Reverse is the
    same with ``p`` and ``q`` exchanged. Pass it as a head inside a model's forward:
    ``model(ids, head=partial(sparse_kl, ids=..., log_probs=...))``.

    Args:
        hidden: ``[b s d]`` of the student.
        weight: ``[v d]`` its output projection. With a DTensor that is sharded over the vocabulary
            ranks compute with their own rows of it.
        ids: ``[b s k]`` signed int, the teacher's tokens, each once; -100 at a position's first
            leaves the position out.
        log_probs: ``[b s k]`` the teacher's natural logarithms, at the same temperature. If they
            sum to 1, nothing is left over.
        mask: ``[b s]`` bool, positions that count; all by default.
        temperature: What the student's logits are divided by, from 1e-30. The gradient is not
            multiplied by its square.
        reverse: Whether the student's distribution weighs the terms. What the teacher leaves over
            counts as at least the rounding of its dtype then, else the divergence were infinite.
        vocab_size: Rows of the weight that are tokens, the first ones; all if None.

    Returns:
        ``Loss`` in nats with the number of positions that count.

    Raises:
        ValueError: If the shapes do not fit, the temperature is out of range, an id is outside the
            vocabulary or twice at a position, or a position's probabilities sum above 1. With
            several ranks the step raises what is found in values, on all of them; on an
            accelerator the values fail as a device-side assertion.
        TypeError: If the dtype of the ids cannot hold -100 or every id of the vocabulary.

    Examples:
        >>> ids = torch.tensor([[[0, 1]]])
        >>> half = torch.full((1, 1, 2), 0.5).log()
        >>> sparse_kl(torch.zeros(1, 1, 3), torch.ones(4, 3), ids, half).sum
        tensor(0.6931)

    References:
        Distillation, https://arxiv.org/abs/1503.02531; reverse, https://arxiv.org/abs/2306.08543
    """
    if ids.shape != log_probs.shape or ids.ndim < 2:
        raise ValueError(
            f"ids have shape {tuple(ids.shape)} and log_probs {tuple(log_probs.shape)}; both must "
            "be [b s k], the teacher's tokens and their log-probabilities."
        )
    check_projection(hidden, weight, ids[..., 0])
    check_temperature(temperature)
    if mask is not None and mask.shape != ids.shape[:-1]:  # it would be broadcast
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must be {tuple(ids.shape[:-1])}.")
    tokens = vocab_size or weight.shape[0]
    is_target = ids[..., 0] != IGNORED
    is_target = is_target if mask is None else is_target & mask
    teacher = log_probs.to(torch.promote_types(wide(hidden.dtype), wide(log_probs.dtype)))
    problem = _find_problem(ids, teacher, is_target, tokens, torch.finfo(log_probs.dtype).eps)
    hidden, weight, columns = take_projection(hidden, weight, vocab_size)
    count = is_target.sum()
    if problem is not None:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise ValueError(problem)
        return Loss((hidden * 0).sum() + (weight * 0).sum(), count, problem=problem)
    positions = torch.where(is_target[..., None], ids, 0).flatten(0, -2).long()
    options = (is_target.flatten(), temperature, columns)
    student, rest = apply_to_rows(_OutcomeLogProbs, hidden, weight, positions, *options)
    teacher = torch.where(is_target[..., None], teacher, -1.0).flatten(0, -2)
    terms = _terms(teacher, student, reverse)
    if ids.shape[-1] < tokens:
        left = -torch.expm1(teacher.logsumexp(-1))
        least = torch.finfo(log_probs.dtype).eps if reverse else 0.0
        terms = terms + _terms(left.clamp(min=least).log()[:, None], rest[:, None], reverse)
    # `where`, not a product: masked values may be NaN.
    losses = torch.where(is_target.flatten(), terms, 0.0)
    return Loss(losses.sum(), count, rows=RowSums(losses, is_target) if ids.ndim > 2 else None)


def _terms(teacher: Tensor, student: Tensor, reverse: bool) -> Tensor:
    """``sum p (log p - log q)`` of logarithms ``[n k]``, 0 where p is 0, ``[n]``."""
    p, q = (student, teacher) if reverse else (teacher, student)
    # Both sides of `where` get a gradient: infinite ones must not meet a zero.
    is_there = p != -math.inf
    p, q = torch.where(is_there, p, 0.0), torch.where(is_there, q, 0.0)
    return torch.where(is_there, p.exp() * (p - q), 0.0).sum(-1)


def _find_problem(
    ids: Tensor, teacher: Tensor, is_target: Tensor, tokens: int, eps: float
) -> str | None:
    """Say what is wrong with a teacher's rows; on an accelerator assert it there."""
    if isinstance(ids, FakeTensor):
        return None
    total, ranked = teacher.logsumexp(-1).exp(), ids.sort(-1).values
    checks = {
        f"ids hold ids outside the vocabulary of {tokens}": ((ids >= 0) & (ids < tokens)).all(-1),
        "ids hold a token twice at a position": (ranked[..., 1:] != ranked[..., :-1]).all(-1),
        "log_probs hold probabilities that sum above 1": total <= 1 + max(4 * eps, 1e-4),
    }
    for problem, is_right in checks.items():
        all_right = (is_right | ~is_target).all()
        if not all_right.is_cpu:
            torch._assert_async(all_right, problem)
        elif not all_right:
            return f"{problem}; give the teacher's own tokens and natural logarithms, [b s k]."
    return None


class _OutcomeLogProbs(Function):
    """Logarithms of the student's probabilities of k ids, ``[n k]``, and of the rest, ``[n]``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        is_target: Tensor,
        temperature: float,
        columns: Columns | None,
    ) -> tuple[Tensor, Tensor]:
        ids = ids.view(len(hidden), -1)
        # Largest logit, sum of the other ids' exponentials relative to it, logits of the ids.
        parts = hidden.new_empty(2 + ids.shape[1], len(hidden), dtype=wide(hidden.dtype))
        for rows in chunks_of(hidden, weight):
            logits = _logits(hidden[rows], weight, temperature, columns)
            column, is_here = _columns_of(ids[rows], logits.shape[1], columns)
            parts[2:, rows] = torch.where(is_here, logits.gather(1, column), 0.0).T
            parts[0, rows] = logits.amax(1)
            # A rank may have nothing but padding, whose logits are -inf.
            least = torch.finfo(logits.dtype).min
            exponentials = logits.sub_(parts[0, rows, None].clamp(min=least)).exp_()
            parts[1, rows] = _without(exponentials, column, is_here).sum(1)
        top, rest, at_ids = parts[0], parts[1], parts[2:]
        if columns is not None:  # all ranks add up in the same order
            every = parts.new_empty(columns.mesh.size() * len(parts), parts.shape[1])
            all_gather(every, parts, group=columns.mesh.get_group())
            every = every.unflatten(0, (-1, len(parts)))
            top, at_ids = every[:, 0].amax(0), every[:, 2:].sum(0)
            rest = ((every[:, 0] - top).exp() * every[:, 1]).sum(0)
        # What underflows keeps a finite logarithm, and a slope that does not overflow.
        rest = rest.clamp(min=torch.finfo(rest.dtype).eps ** 4)
        log_z = top + (rest + (at_ids - top).exp().sum(0)).log()
        log_rest = top + rest.log()
        log_q, log_q_rest = (at_ids - log_z).T.contiguous(), log_rest - log_z
        ctx.save_for_backward(hidden, weight, ids, is_target, log_q, log_q_rest, log_z)
        ctx.temperature, ctx.columns = temperature, columns
        return log_q, log_q_rest

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: Tensor, upstream_rest: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, is_target, log_q, log_q_rest, log_z = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if needs_weight else None
        total = upstream.sum(1) + upstream_rest
        # By the logits: of an id ``upstream - total q``; of all others ``slope q``.
        at_ids = (upstream - total[:, None] * log_q.exp()) / ctx.temperature
        slope = (upstream_rest * (-log_q_rest).exp() - total) / ctx.temperature
        for rows in chunks_of(hidden, weight):
            logits = _logits(hidden[rows], weight, ctx.temperature, ctx.columns)
            column, is_here = _columns_of(ids[rows], logits.shape[1], ctx.columns)
            q = _without(logits.sub_(log_z[rows, None]).exp_(), column, is_here)
            gradient = q.mul_(slope[rows, None])
            gradient.scatter_add_(1, column, at_ids[rows] * is_here)
            gradient = keep_rows_(gradient, is_target[rows]).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                part = keep_rows_(hidden[rows].clone(), is_target[rows])
                add_product(grad_weight, gradient, part)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, columns: Columns | None) -> Tensor:
    """``[n v]`` in float32 or wider, of a rank's columns; padding is -inf."""
    logits = (hidden @ weight.T).to(wide(hidden.dtype)).div_(temperature)
    mask_padding_(logits, columns)
    return logits


def _columns_of(ids: Tensor, width: int, columns: Columns | None) -> tuple[Tensor, Tensor]:
    """A rank's columns of ids, ``[n k]``, and whether they are its own, ``[n k]``."""
    column = ids if columns is None else ids - columns.first
    is_here = (column >= 0) & (column < width)
    return torch.where(is_here, column, 0), is_here


def _without(values: Tensor, column: Tensor, is_here: Tensor) -> Tensor:
    """Set positive values ``[n v]`` at columns ``[n k]`` that are here to zero, in place."""
    # Exactly zero: what is left may be smaller than the rounding of what goes.
    return values.scatter_reduce_(1, column, torch.where(is_here, 0.0, math.inf).to(values), "amin")
