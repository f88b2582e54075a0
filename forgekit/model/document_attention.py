"""Attention by documents on a CPU as one operator, for the compiler.

How many documents a row has and how long they are, is known only from the values of ``doc_ids``.
A compiled block that read them would break its graph and be compiled again for each packing, so
that it is one operator there, with a backward of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Split = Callable[[Tensor, Tensor], tuple[list[int] | None, Tensor | None]]
"""From ``doc_ids`` and queries to lengths of documents, or where those are None to a mask."""


def build_operator(name: str, split: Split) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Register an operator ``attend(q, k, v, doc_ids)`` under a name.

    Args:
        name: As in ``"forgekit::attend_documents"``.
        split: How documents are to be attended.

    Returns:
        A function of ``[b s h c]`` queries, ``[b s k c]`` keys and values, and ``[b s]`` ids.
    """

    @torch.library.custom_op(name, mutates_args=())
    def attend(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> tuple[Tensor, Tensor]:
        lengths, mask = split(doc_ids, q)
        out, lse = _empty(q, k, v, doc_ids)
        parts = (_by_head(x, lengths) for x in (q, k, v, out, lse[..., None]))
        for *inputs, part, sums in zip(*parts, strict=True):
            found, found_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *inputs, 0.0, mask is None, attn_mask=mask
            )
            part.copy_(found)
            sums.copy_(found_sums[..., None])
        return out, lse

    @torch.library.custom_op(f"{name}_backward", mutates_args=())
    def attend_backward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        lengths, mask = split(doc_ids, q)
        gradients = _like(gradient, q, k, v)
        given = (_by_head(x, lengths) for x in (gradient, q, k, v, out, lse[..., None]))
        targets = (_by_head(x, lengths) for x in gradients)
        for (*inputs, sums), *parts in zip(zip(*given, strict=True), *targets, strict=True):
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *inputs, sums[..., 0].contiguous(), 0.0, mask is None, attn_mask=mask
            )
            for part, values in zip(parts, found, strict=True):
                part.copy_(values)
        return gradients

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs, *output)

    def back(ctx: Any, gradient: Tensor, _lse: Any) -> tuple[Tensor | None, ...]:
        return *attend_backward(gradient, *ctx.saved_tensors), None

    attend.register_fake(_empty)
    attend_backward.register_fake(lambda gradient, q, k, v, *_: _like(gradient, q, k, v))
    attend.register_autograd(back, setup_context=keep)
    return lambda q, k, v, doc_ids: attend(q, k, v, doc_ids)[0]


def _empty(q: Tensor, _k: Tensor, _v: Tensor, _doc_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Output ``[b s h c]`` and logarithms of the sums of exponentials ``[b s h]``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=wide)


def _like(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _by_head(x: Tensor, lengths: list[int] | None) -> list[Tensor]:
    """``[b s h c]`` as one ``[1 h n c]`` for each document, or whole, ``[b h s c]``."""
    if lengths is None:
        return [x.transpose(1, 2)]
    return [part.transpose(1, 2) for part in x.reshape(1, -1, *x.shape[2:]).split(lengths, 1)]
