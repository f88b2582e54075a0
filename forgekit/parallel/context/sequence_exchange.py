"""Exchanges of ranks that share a sequence: slices, heads (Ulysses) and document ids.

Communication runs inside operators of torch (``torch.library``), which recomputation, compilation
and dry runs on fake tensors see as one piece.

In Ulysses ranks exchange positions for heads, attend to whole sequences, and exchange them back.
Each has some of the query heads in between, so their number must divide by that of the ranks. Key
and value heads are repeated where that is needed for every rank to hold those of its queries; the
gradients of the copies add up.

References:
    DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from forgekit.checks import divisors, nearest_multiples
from forgekit.model.attention import Attend, Documents, attend_causal


@attrs.define(eq=False)
class Transfer:
    """A pending receive from the previous rank and send to the next.

    Attributes:
        arriving: Filled when the wait is over.
        sent: Kept until it has left.
        works: What to wait for.
    """

    arriving: Tensor
    sent: Tensor | None = None
    works: list[Any] = attrs.field(factory=list)

    def wait(self) -> Tensor:
        """Wait for the received tensor and release the sent one."""
        while self.works:
            self.works.pop().wait()
        self.sent = None
        return self.arriving


@attrs.frozen(eq=False)
class Members:
    """A group of ranks as seen from one of them.

    Attributes:
        group: Their process group.
        rank: This rank among them.
        size: How many they are.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Members:
        """Build from a process group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def name(self) -> str:
        """Name of the group, by which operators find it."""
        return self.group.group_name

    def pass_on(self, tensor: Tensor) -> Transfer:
        """Start sending a contiguous tensor to the next rank and receiving the previous rank's."""
        following, previous = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        arriving = torch.empty_like(tensor)
        # In one batch: if all ranks of a ring sent first, they would wait forever.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, following, self.group),
                dist.P2POp(dist.irecv, arriving, previous, self.group),
            ]
        )
        return Transfer(arriving, tensor, works)


def members_named(name: str) -> Members:
    """Build from the name of a group, as passed to an operator."""
    return Members.of(_resolve_process_group(name))  # pyright: ignore[reportArgumentType]


def check_slice(q: Tensor, k: Tensor, doc_ids: Tensor | None) -> None:
    """Raise for inputs that would crash a kernel, or document ids not of this rank's slice."""
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k {tuple(k.shape)} is [b s k c] and q {tuple(q.shape)} [b s h c]; k must divide h."
        )
    if doc_ids is not None and doc_ids.shape != q.shape[:2]:
        raise ValueError(
            f"doc_ids is {tuple(doc_ids.shape)}; this rank's slice is [b s], {tuple(q.shape[:2])}."
        )


def gathering_ids(members: Members) -> Callable[[Tensor], Tensor]:
    """Build the function that gathers the document ids of all members.

    Every layer of a forward pass brings the same tensor, so the function remembers the last one:
    ids are sent once, and all layers share one result.

    Args:
        members: The ranks that share the rows.

    Returns:
        ``gather(ids)``: of ``[b s]`` ids of this rank ``[b size*s]``, in rank order; not to be
        written to.
    """
    last: tuple[Tensor, int | None, Tensor] | None = None

    def gather(ids: Tensor) -> Tensor:
        nonlocal last
        if torch.compiler.is_compiling():
            return _gather(members, ids)
        # In inference mode tensors have no version, so changes cannot be noticed.
        version = None if ids.is_inference() else ids._version
        if last is None or last[0] is not ids or last[1] != version:
            last = ids, version, _gather(members, ids)
        return last[2]

    return gather


def _gather(members: Members, ids: Tensor) -> Tensor:
    # torch's own operators, opaque to the compiler and to dry runs on fake tensors.
    torch_ops = torch.ops._c10d_functional
    gathered = torch_ops.all_gather_into_tensor(ids.contiguous(), members.size, members.name)
    return torch.cat(torch_ops.wait_tensor(gathered).chunk(members.size), dim=1)


@torch.library.custom_op(
    "forgekit::exchange_heads", mutates_args=(), schema="(Tensor x, str name) -> Tensor"
)
def exchange_heads(x: Tensor, name: str) -> Tensor:
    """All-to-all: send part ``p`` to member ``p``, receive this rank's part of each.

    Args:
        x: ``[p ...]``, one part for each member.
        name: The members' name.

    Returns:
        ``[p ...]``, one part from each member.
    """
    members = members_named(name)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=members.group)
    return received


@exchange_heads.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _remember(ctx: Any, inputs: Any, **_: Any) -> None:
    ctx.name = inputs[1]


def _exchange_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return exchange_heads(gradient, ctx.name), None


exchange_heads.register_autograd(_exchange_back, setup_context=_remember)


def ulysses_attention(
    members: Members, attend: Attend = attend_causal, documents: Documents | None = None
) -> Attend:
    """Build the ``attend`` socket of Ulysses, which exchanges positions for heads.

    Args:
        members: The ranks that share the positions; each has a contiguous slice of them.
        attend: What then attends with some of the heads from all of these positions; that of a ring
            where they are a slice themselves.
        documents: Where ``doc_ids`` were noted on the host; what is gathered of them is noted too.

    Returns:
        ``attend(q, k, v, *, doc_ids)`` on local slices. It raises a ``ValueError`` for heads that
        do not divide and for documents of another slice, before anything is sent.
    """
    gather = gathering_ids(members)

    def attend_ulysses(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None) -> Tensor:
        check_slice(q, k, doc_ids)
        check_heads(q.shape[2], members.size)
        ids = None if doc_ids is None else gather(doc_ids)
        if doc_ids is not None and ids is not None and documents is not None:
            documents.note(ids, documents.host(doc_ids))
        out = attend(*_positions_for_heads(q, k, v, members), doc_ids=ids)
        return _heads_for_positions(out, members)

    return attend_ulysses


def check_heads(heads: int, ulysses: int) -> None:
    """Raise unless the ranks that share query heads divide their number.

    Args:
        heads: Query heads of a rank, after tensor parallelism.
        ulysses: Ranks that exchange positions for heads.

    Raises:
        ValueError: If they do not; names what would.
    """
    if heads % ulysses:
        raise ValueError(
            f"{heads} query heads of a rank are not divisible by ulysses = {ulysses}. Use one of "
            f"{divisors(heads)} ranks ({nearest_multiples(heads, ulysses)} heads), or a ring."
        )


def _positions_for_heads(q: Tensor, k: Tensor, v: Tensor, members: Members) -> list[Tensor]:
    """``[b s h c]``, twice ``[b s k c]`` -> the same with all positions and this rank's heads."""
    size = members.size
    # Repeated until the ranks divide their number; autograd sums the copies' gradients.
    repeats = size // math.gcd(k.shape[2], size)
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    by_rank = [rearrange(x, "b s (p h) c -> p b s h c", p=size) for x in (q, k, v)]
    # Queries, keys and values concatenated as heads: one all-to-all for three tensors.
    exchanged = torch.ops.forgekit.exchange_heads(torch.cat(by_rank, dim=3), members.name)
    joined = rearrange(exchanged, "p b s h c -> b (p s) h c")
    return list(joined.split([x.shape[3] for x in by_rank], dim=2))


def _heads_for_positions(out: Tensor, members: Members) -> Tensor:
    by_rank = rearrange(out, "b (p s) h c -> p b s h c", p=members.size)
    exchanged = torch.ops.forgekit.exchange_heads(by_rank, members.name)
    return rearrange(exchanged, "p b s h c -> b s (p h) c")
