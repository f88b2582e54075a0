"""Ulysses: ranks exchange positions for heads, attend to whole sequences, and exchange them back.

Each rank has some of the query heads in between, so their number must divide by that of the ranks.
Key and value heads are repeated where that is needed for every rank to hold those of its queries;
the gradients of the copies add up.

References:
    DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor

from forgekit.inputs import divisors, nearest_multiples
from forgekit.model.attention import Attend, Documents, attend_causal
from forgekit.parallel.context.ring_attention import check_shapes
from forgekit.parallel.context.sequence_exchange import Members, gathering_ids


def ulysses_attention(
    members: Members, attend: Attend = attend_causal, documents: Documents | None = None
) -> Attend:
    """Make the ``attend`` socket of a rank that exchanges positions for heads.

    Args:
        members: The ranks that share the positions; each has a contiguous slice of them.
        attend: What then attends with some of the heads from all of these positions; that of a ring
            where they are a slice themselves.
        documents: Where ``doc_ids`` were noted on the host; what is gathered of them is noted too.

    Returns:
        ``attend(q, k, v, *, doc_ids)`` on local slices. It raises a ``ValueError`` for shapes that
        do not fit, before anything is sent.
    """
    gather = gathering_ids(members)

    def attend_ulysses(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None) -> Tensor:
        check_shapes(q, k, v, doc_ids)
        check_heads(q.shape[2], members.size)
        ids = None if doc_ids is None else gather(doc_ids)
        if doc_ids is not None and ids is not None and documents is not None:
            documents.note(ids, documents.host(doc_ids))
        out = attend(*_positions_for_heads(q, k, v, members), doc_ids=ids)
        return _heads_for_positions(out, members)

    return attend_ulysses


def check_heads(heads: int, ulysses: int) -> None:
    """Raise unless query heads divide by the ranks that share them.

    Args:
        heads: Query heads of a rank, after tensor parallelism.
        ulysses: Ranks that exchange positions for heads.

    Raises:
        ValueError: If they do not; names what would.
    """
    if heads % ulysses:
        nearest = nearest_multiples(heads, ulysses)
        raise ValueError(
            f"{heads} query heads (a tensor-parallel rank's) must be divisible by ulysses = "
            f"{ulysses}, the ranks that share them; with {heads} heads that can be one of "
            f"{divisors(heads)}, with {ulysses} ranks {nearest} heads. A ring "
            "takes any."
        )


def _positions_for_heads(q: Tensor, k: Tensor, v: Tensor, members: Members) -> list[Tensor]:
    """``[b s h c]``, twice ``[b s k c]`` -> the same with all positions and this rank's heads."""
    size = members.size
    repeats = size // math.gcd(k.shape[2], size)
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    by_rank = [rearrange(x, "b s (p h) c -> p b s h c", p=size) for x in (q, k, v)]
    exchanged = torch.ops.forgekit.exchange_heads(torch.cat(by_rank, dim=3), members.name)
    joined = rearrange(exchanged, "p b s h c -> b (p s) h c")
    return list(joined.split([x.shape[3] for x in by_rank], dim=2))


def _heads_for_positions(out: Tensor, members: Members) -> Tensor:
    by_rank = rearrange(out, "b (p s) h c -> p b s h c", p=members.size)
    exchanged = torch.ops.forgekit.exchange_heads(by_rank, members.name)
    return rearrange(exchanged, "p b s h c -> b s (p h) c")
