"""Log-probabilities of labels, one for each position, without ever holding all logits.

What a policy's loss is made of: ratios, divergences and preferences need the log-probability of
each token that was sampled. The slope of each position is known only in the backward pass, so it
finds a chunk's logits again, where ``linear_cross_entropy`` has its gradient ready.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from forgekit.data.batch import IGNORED
from forgekit.model.batch_invariant import (
    linear_by_tile,
    log_probs_of,
    refuse_batch_invariant,
)
from forgekit.steps.cross_entropy import (
    Columns,
    add_product,
    apply_to_rows,
    check_projection,
    chunk_rows,
    combine_rows,
    find_columns,
    mask_padding_,
    measure_rows,
    take_projection,
)
from forgekit.steps.losses import keep_rows_
from forgekit.tensors import wide

LEAST_TEMPERATURE = 1e-30
"""Below it logits of float32 that are divided may overflow; a softmax there is an argmax."""


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = False,
    batch_invariant: bool = False,
    vocab_size: int | None = None,
) -> Any:
    """Log-probabilities of labels under ``softmax(hidden @ weight.T / temperature)``.

    Differentiable, in chunks of rows. Pass it as a head inside a model's forward:
    ``model(ids, head=partial(linear_log_probs, labels=labels))``.

    Args:
        hidden: ``[... d]``.
        weight: ``[v d]`` output projection. With a DTensor that is sharded over the vocabulary
            ranks compute with their own rows of it.
        labels: ``[...]`` signed int, already shifted; -100 where nothing is asked.
        temperature: What logits are divided by, from 1e-30: that of the sampling. Below it
            ``generate`` takes the most likely token, and there is no gradient.
        entropy: Whether to return the entropy of each position too.
        batch_invariant: Whether log-probabilities are to be bit for bit those that ``generate``
            returns of a model that is ``batch_invariant``; as a head of such a model it is told.
        vocab_size: Rows of the weight that are tokens, the first ones; all if None.

    Returns:
        ``[...]`` natural logarithms in float32 or wider, 0 where the label is -100. With
        ``entropy`` also the entropies in nats, ``[...]``, 0 there too; both are differentiable.

    Raises:
        ValueError: If the shapes do not fit, the temperature is below 1e-30 or not finite, or
            ``batch_invariant`` is asked for where ranks share the vocabulary.
        TypeError: If the dtype of the labels cannot hold -100 or every id of the vocabulary.

    Examples:
        >>> hidden, labels = torch.zeros(1, 2, 3), torch.tensor([[3, -100]])
        >>> linear_log_probs(hidden, torch.ones(4, 3), labels)
        tensor([[-1.3863,  0.0000]])
    """
    check_projection(hidden, weight, labels)
    check_temperature(temperature)
    hidden, weight, columns = take_projection(hidden, weight, vocab_size)
    if batch_invariant and columns is not None:
        refuse_batch_invariant("ranks share its vocabulary")
    options = (temperature, columns, entropy, batch_invariant)
    log_probs, entropies = apply_to_rows(_LinearLogProbs, hidden, weight, labels, *options)
    # Clones: FSDP warns of a model's output that is a view.
    log_probs = log_probs.view(labels.shape).clone()
    return (log_probs, entropies.view(labels.shape).clone()) if entropy else log_probs


class _LinearLogProbs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        columns: Columns | None,
        entropy: bool,
        batch_invariant: bool,
    ) -> tuple[Tensor, Tensor | None]:
        is_target = labels != IGNORED
        # See `measure_rows`; with the entropy also the logits weighed by the exponentials.
        parts = hidden.new_empty(4 if entropy else 3, len(hidden), dtype=wide(hidden.dtype))
        sampled = hidden.new_empty(len(hidden), dtype=parts.dtype) if batch_invariant else None
        for rows in chunks_of(hidden, weight):
            logits = _logits(hidden[rows], weight, temperature, by_tile=batch_invariant)
            mask_padding_(logits, columns)
            column, is_here = find_columns(labels[rows], is_target[rows], logits.shape[1], columns)
            if sampled is not None:
                sampled[rows] = log_probs_of(logits).gather(1, column)[:, 0]
            parts[:3, rows], exponentials = measure_rows(logits, column, is_here)
            if entropy:  # a logit is the logarithm of its exponential, plus the largest of the row
                weighed = torch.xlogy(exponentials, exponentials).sum(1)
                largest = parts[0, rows].clamp(min=torch.finfo(parts.dtype).min)  # 0 * -inf is NaN
                parts[3, rows] = weighed + largest * parts[1, rows]
        top, _, sums = combine_rows(parts, columns)
        log_total = sums[0].log()
        # `where`, not a product: masked positions may be NaN.
        log_probs = sums[1] - top - log_total if sampled is None else sampled
        log_probs = torch.where(is_target, log_probs, 0.0)
        entropies = None
        if entropy:
            entropies = torch.where(is_target, top - sums[2] / sums[0] + log_total, 0.0)
        ctx.save_for_backward(hidden, weight, labels, top + log_total, entropies)
        ctx.temperature, ctx.columns = temperature, columns
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: Tensor, upstream_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_z, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        is_target = labels != IGNORED
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide(weight.dtype)) if needs_weight else None
        for rows in chunks_of(hidden, weight):
            log_p = _logits(hidden[rows], weight, ctx.temperature).sub_(log_z[rows, None])
            mask_padding_(log_p, ctx.columns)
            column, is_here = find_columns(
                labels[rows], is_target[rows], log_p.shape[1], ctx.columns
            )
            slope = upstream[rows, None] / ctx.temperature
            if entropies is None or upstream_entropy is None:
                gradient = log_p.exp_().mul_(-slope)
            else:  # of log p: one_hot - p; of the entropy: -p (log p + entropy)
                spread = upstream_entropy[rows, None] / ctx.temperature
                p = log_p.exp_()
                gradient = torch.xlogy(p, p).add_(p * entropies[rows, None]).mul_(-spread)
                gradient.sub_(p.mul_(slope))
            gradient.scatter_add_(1, column, slope * is_here[:, None])
            gradient = keep_rows_(gradient, is_target[rows]).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                part = keep_rows_(hidden[rows].clone(), is_target[rows])
                add_product(grad_weight, gradient, part)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def check_temperature(temperature: float) -> None:
    """Raise for what logits cannot be divided by."""
    if not LEAST_TEMPERATURE <= temperature < math.inf:
        rule = f"it must be finite and at least {LEAST_TEMPERATURE}"
        raise ValueError(f"temperature is {temperature}; {rule}.")


def chunks_of(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Divide rows, so that those of one part have a chunk of logits."""
    size = chunk_rows(weight)
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float, *, by_tile: bool = False) -> Tensor:
    """``[n v]`` in float32 or wider; whoever asks may write into them."""
    product = linear_by_tile(hidden, weight) if by_tile else hidden @ weight.T
    logits = product.to(wide(hidden.dtype))
    return logits if temperature == 1 else logits.div_(temperature)
