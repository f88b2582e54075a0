"""Ring attention: keys and values rotate over the ranks; each attends from its own positions.

The next slice is on its way while one is attended to. In the backward pass the slices go round
once more and the gradients of keys and values follow them, summed in float32 or wider, until they
are home. What is saved in between stays with the rank's own slice.

References:
    Ring attention, https://arxiv.org/abs/2310.01889
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from forgekit.data.batch import slice_positions
from forgekit.model.attention import Attend, Documents
from forgekit.model.attention_kernels import AttentionChoice, Kernel, choose
from forgekit.parallel.context.attention_areas import Area, areas_of_step
from forgekit.parallel.context.block_attention import (
    Ids,
    attend_block,
    attend_block_backward,
    merge_block,
)
from forgekit.parallel.context.sequence_exchange import (
    Members,
    Transfer,
    check_slice,
    gathering_ids,
    members_named,
)
from forgekit.tensors import wide


def ring_attention(
    members: Members, attention: AttentionChoice = "auto", documents: Documents | None = None
) -> Attend:
    """Build the ``attend`` socket of a rank in a ring.

    Args:
        members: The ranks that share the sequence; each has a zigzag slice of it.
        attention: The kernel of the blocks.
        documents: Where ``doc_ids`` were noted on the host. Without it the device's flash kernel,
            which is called once per document, is not chosen automatically.

    Returns:
        ``attend(q, k, v, *, doc_ids)`` on local slices. It raises a ``ValueError`` for positions or
        documents that are no slice, before anything is sent.
    """
    gather = gathering_ids(members)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None) -> Tensor:
        check_slice(q, k, doc_ids)
        if q.shape[1] % 2:
            raise ValueError(
                f"a rank of the ring has {q.shape[1]} positions, an odd number. Use sequences "
                f"whose length is divisible by 2 * {members.size}."
            )
        # Checks by facts that all ranks share (device, dtype, head width), before anything is sent.
        kernel = choose("ring", q.device, q.dtype, q.shape[-1], attention)
        if doc_ids is None:
            return torch.ops.forgekit.attend_ring(q, k, v, None, members.name, kernel)[0]
        if kernel == "flash":
            host = None if documents is None else documents.host(doc_ids)
            if host is not None or attention == "flash":
                return attend_documents(q, k, v, doc_ids, host)
        return torch.ops.forgekit.attend_ring(q, k, v, gather(doc_ids), members.name)[0]

    @_disable_dynamo  # document lengths are not constants of a graph
    def attend_documents(
        q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, host: Tensor | None
    ) -> Tensor:
        # The host plans areas, so ids that were not noted are read from the device once.
        whole = gather(doc_ids).cpu() if host is None else _by_rank(host, members.size)
        # An operator's tensors are on one device, so the host's ids are passed as run lengths.
        ids, lengths = whole.flatten().unique_consecutive(return_counts=True)
        runs = [*ids.tolist(), *lengths.tolist()]
        return torch.ops.forgekit.attend_ring(q, k, v, None, members.name, "flash", runs)[0]

    return attend


def _by_rank(host: Tensor, size: int) -> Tensor:
    """Reorder whole rows to the order in which ranks hold positions: ``[b size*s]``."""
    return torch.cat([slice_positions(host, rank=r, world=size, dim=1) for r in range(size)], 1)


@torch.library.custom_op(
    "forgekit::attend_ring",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? ids, str name, "
    "str kernel='sdpa', int[]? runs=None) -> (Tensor, Tensor)",
)
def attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None,
    name: str,
    kernel: Kernel = "sdpa",
    runs: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from this rank's positions to those of all members.

    Args:
        q: ``[b s h c]`` queries of a zigzag slice.
        k: ``[b s k c]`` keys.
        v: ``[b s k c]`` values.
        ids: ``[b size*s]`` documents of all members' slices; None for one document a row.
        name: The members' name.
        kernel: The kernel of the blocks.
        runs: In place of ``ids``, for the host: ids of the runs of equal ones in all rows, then
            their lengths.

    Returns:
        ``[b s h c]`` output and ``[b h s]`` logarithm of the sum of exponentials, which only the
        backward pass needs.
    """
    members = members_named(name)
    areas = _planned(members, q, ids, kernel, runs)
    # Summed in float32 or wider, rounded once.
    out = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
    shape = q.shape[0], q.shape[2], q.shape[1]
    # -inf is a softmax over no keys; the first block, each position's own, makes it finite.
    lse = out.new_full(shape, float("-inf"))
    q, k, v, summed = map(_by_head, (_dense(q), k, v, out))

    def attend(step: int, keys: Tensor, values: Tensor) -> None:
        for area, documents in areas(q, step):
            here, there = _indices(area)
            how = area.offset, documents, kernel
            block = attend_block(q[here], keys[there], values[there], *how)
            merge_block(summed[here], lse[here], *block)

    _go_round(members, k, v, attend)
    return out.to(q.dtype), lse


@torch.library.custom_op(
    "forgekit::attend_ring_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor? ids, Tensor out, Tensor lse, "
    "str name, str kernel='sdpa', int[]? runs=None) -> (Tensor, Tensor, Tensor)",
)
def attend_ring_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: Tensor | None,
    out: Tensor,
    lse: Tensor,
    name: str,
    kernel: Kernel = "sdpa",
    runs: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of this rank's queries, and of its keys and values from all queries.

    Args:
        gradient: ``[b s h c]`` gradient of the output.
        q: As for ``attend_ring``.
        k: As for ``attend_ring``.
        v: As for ``attend_ring``.
        ids: As for ``attend_ring``.
        out: What ``attend_ring`` returned.
        lse: What ``attend_ring`` returned.
        name: The members' name.
        kernel: As for ``attend_ring``.
        runs: As for ``attend_ring``.

    Returns:
        Gradients of ``q``, ``k`` and ``v``, shaped like them.
    """
    members = members_named(name)
    areas = _planned(members, q, ids, kernel, runs)
    wide_dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
    dq, dk, dv = _like(q), _like(k), _like(v)
    gradient, q, out = map(_by_head, (_dense(gradient), _dense(q), out))
    k, v, summed = map(_by_head, (k, v, wide_dq))
    # [2 b k s c] gradients of the present slice. They follow it by one exchange: each rank
    # adds its share, and after `size` exchanges, one more than the slice, they are home.
    following = Transfer(torch.zeros((2, *k.shape), dtype=lse.dtype, device=q.device))

    def attend_back(step: int, keys: Tensor, values: Tensor) -> None:
        nonlocal following
        for area, documents in areas(q, step):
            here, there = _indices(area)
            given = gradient[here], q[here], keys[there], values[there], out[here], lse[here]
            shares = attend_block_backward(*given, area.offset, documents, kernel)
            summed[here].add_(shares[0])
            # Not earlier: the others' share may arrive while this rank computes.
            for whole, share in zip(following.wait(), shares[1:], strict=True):
                whole[there] += share
        following = members.pass_on(following.wait())

    _go_round(members, k, v, attend_back)
    for result, whole in zip((dq, dk, dv), (summed, *following.wait()), strict=True):
        _by_head(result).copy_(whole)
    return dq, dk, dv


def _planned(
    members: Members, q: Tensor, ids: Tensor | None, kernel: Kernel, runs: list[int] | None
) -> Callable[[Tensor, int], list[tuple[Area, Ids | None]]]:
    if runs is not None:
        values, lengths = torch.tensor(runs, device="cpu").chunk(2)
        ids = values.repeat_interleave(lengths).unflatten(0, (len(q), -1))
    return partial(areas_of_step, members.rank, members.size, ids, kernel)


def _go_round(
    members: Members, k: Tensor, v: Tensor, visit: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Yield the keys and values of every member, this rank's first, prefetching the next.

    A function is called, rather than a generator looped over, so that nothing keeps a slice
    longer than its visit.
    """
    # [2 b k s c], one message. In step n it holds the slice of the rank n before this one, so
    # after size - 1 exchanges each rank has seen every slice, and none is sent home.
    block = torch.stack((k, v)).contiguous()  # stack preserves stride order
    for step in range(members.size):
        is_last = step == members.size - 1
        coming = Transfer(block) if is_last else members.pass_on(block)
        visit(step, *block)
        block = coming.wait()


def _dense(x: Tensor) -> Tensor:
    """Make channels contiguous, as kernels need."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _indices(area: Area) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    return (area.rows, slice(None), area.queries), (area.rows, slice(None), area.keys)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ids, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, ids, *output)


def _back(ctx: Any, gradient: Tensor, _lse: Any) -> tuple[Tensor | None, ...]:
    q, k, v, ids, out, lse = ctx.saved_tensors
    back = torch.ops.forgekit.attend_ring_backward
    return *back(gradient, q, k, v, ids, out, lse, *ctx.rest), None, None, None, None


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@attend_ring.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows, positions, heads, _channels = q.shape
    return _like(q), q.new_empty((rows, heads, positions), dtype=wide(q.dtype))


@attend_ring_backward.register_fake
def _(_gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _like(q), _like(k), _like(v)


attend_ring.register_autograd(_back, setup_context=_remember)
