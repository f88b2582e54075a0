"""Ring attention: keys and values go round the ranks while each attends from its own positions.

The next slice is on its way while one is attended to. In the backward pass the slices go round
once more and the gradients of keys and values follow them, summed in float32 or wider, until they
are home. What is saved in between stays with the rank's own slice. A slice goes round in several
turns, each with some of the heads, so that what is on the way stays small beside it.

References:
    Ring attention, https://arxiv.org/abs/2310.01889
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from forgekit.data.batch import slice_positions
from forgekit.model.attention import Attend, Documents, wide
from forgekit.model.attention_kernels import AttentionChoice, Kernel, choose
from forgekit.parallel.context.attention_areas import Area, Route
from forgekit.parallel.context.block_attention import (
    attend_block,
    attend_block_backward,
    merge_block,
)
from forgekit.parallel.context.sequence_exchange import (
    Members,
    Transfer,
    gathering_ids,
    members_named,
)

MOST_TURNS = 4
"""In how many parts, by heads, a slice goes round at most."""

TURN_BYTES = 2**18
"""Bytes of keys and values that one of several turns carries at least."""


def ring_attention(
    members: Members, attention: AttentionChoice = "auto", documents: Documents | None = None
) -> Attend:
    """Make the ``attend`` socket of a rank in a ring.

    Args:
        members: The ranks that share the sequence; each has a zigzag slice of it.
        attention: The kernel of the blocks.
        documents: Where ``doc_ids`` were noted on the host. Without it the device's flash kernel,
            which is called once for each document, is not taken by itself.

    Returns:
        ``attend(q, k, v, *, doc_ids)`` on local slices. It raises a ``ValueError`` for shapes that
        do not fit, before anything is sent.
    """
    gather = gathering_ids(members)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None) -> Tensor:
        check_shapes(q, k, v, doc_ids)
        if q.shape[1] % 2:
            raise ValueError(
                f"a rank of the ring holds {q.shape[1]} positions; a zigzag slice is two chunks of "
                f"one size. Take sequences whose length 2 * {members.size} divides."
            )
        kernel = choose("ring", q.device, q.dtype, q.shape[-1], attention)
        if doc_ids is None:
            return torch.ops.forgekit.attend_ring(q, k, v, None, members.name, kernel)[0]
        if kernel == "flash":
            host = None if documents is None else documents.host(doc_ids)
            if host is not None or attention == "flash":
                return attend_documents(q, k, v, doc_ids, host)
        return torch.ops.forgekit.attend_ring(q, k, v, gather(doc_ids), members.name)[0]

    @_disable_dynamo  # lengths of documents are no constants of a graph
    def attend_documents(
        q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor, host: Tensor | None
    ) -> Tensor:
        whole = gather(doc_ids).cpu() if host is None else _by_rank(host, members.size)
        runs = torch.stack(_runs(whole)).flatten().tolist()
        return torch.ops.forgekit.attend_ring(q, k, v, None, members.name, "flash", runs)[0]

    return attend


def _by_rank(host: Tensor, size: int) -> Tensor:
    """Whole rows' positions in the order in which ranks hold them: ``[b size*s]``."""
    return torch.cat([slice_positions(host, rank=r, world=size, dim=1) for r in range(size)], 1)


def _runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and lengths of the runs in rows laid end to end, as an operator can take them."""
    found, lengths = ids.flatten().unique_consecutive(return_counts=True)
    return found, lengths


def _ids(runs: list[int] | None, rows: int) -> Tensor | None:
    """``[b size*s]`` on the CPU, of what ``_runs`` found."""
    if runs is None:
        return None
    found, lengths = torch.tensor(runs, device="cpu").chunk(2)
    return found.repeat_interleave(lengths).unflatten(0, (rows, -1))


def check_shapes(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None) -> None:
    """Raise unless queries, keys, values and documents belong together."""
    fits = q.ndim == k.ndim == 4 and k.shape == v.shape
    fits = fits and (*q.shape[:2], q.shape[3]) == (*k.shape[:2], k.shape[3])
    if not fits or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} must be [b s h c], "
            "[b s k c] and [b s k c] with k a divisor of h."
        )
    if doc_ids is not None and doc_ids.shape != q.shape[:2]:
        raise ValueError(
            f"doc_ids has shape {tuple(doc_ids.shape)}; it must be [b s], here "
            f"{tuple(q.shape[:2])}: this rank's slice, as forgekit.shard_sequence splits it."
        )


@torch.library.custom_op(
    "forgekit::attend_ring",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? ids, str name, str kernel='sdpa', "
    "int[]? runs=None) -> (Tensor, Tensor)",
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
    route = _route(members, q, ids, kernel, runs)
    q, out = _dense(q), _like(q)
    shape = q.shape[0], q.shape[2], q.shape[1]
    # Minus infinity: a softmax over no keys. The first block, each position's own, makes it finite.
    lse = q.new_full(shape, float("-inf"), dtype=wide(q.dtype))
    for own, shared in _turns(q, k):
        queries, keys, values = _by_head(q, own), _by_head(k, shared), _by_head(v, shared)
        summed = _zeros(_by_head(out, own), lse.dtype)
        _attend(members, route, queries, keys, values, summed, lse[:, own])
        _by_head(out, own).copy_(summed)
        del summed  # before the next turn needs the room
    return out, lse


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
    """Gradients of this rank's queries, and of its keys and values from all members' queries.

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
    route = _route(members, q, ids, kernel, runs)
    gradient, q = _dense(gradient), _dense(q)
    dq, shared_gradients = _like(q), []
    for own, shared in _turns(q, k):
        summed = _zeros(_by_head(dq, own), lse.dtype)
        behind = _attend_back(
            members,
            route,
            *(_by_head(x, own) for x in (gradient, q, out)),
            lse=lse[:, own],
            k=_by_head(k, shared),
            v=_by_head(v, shared),
            dq=summed,
        )
        _by_head(dq, own).copy_(summed)
        # Not before a first turn is over: where it is the only one, its room is free now.
        shared_gradients = shared_gradients or [_like(k), _like(v)]
        for whole, part in zip(shared_gradients, behind, strict=True):
            _by_head(whole, shared).copy_(part)
        del summed, behind  # before the next turn needs the room
    dk, dv = shared_gradients
    return dq, dk, dv


def _route(
    members: Members, q: Tensor, ids: Tensor | None, kernel: Kernel, runs: list[int] | None
) -> Route:
    ids = ids if runs is None else _ids(runs, q.shape[0])
    return Route.plan(q, ids, rank=members.rank, size=members.size, kernel=kernel)


def _attend(
    members: Members, route: Route, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    """Sum one turn's softmax in ``out`` ``[b h s c]`` and ``lse`` ``[b h s]``, in place."""

    def add(area: Area, step: int, keys: Tensor, values: Tensor) -> None:
        here, there = _indices(area)
        ids = route.documents(area, step)
        options = {"offset": area.offset, "ids": ids, "kernel": route.kernel}
        block = attend_block(q[here], keys[there], values[there], **options)
        merge_block(out[here], lse[here], *block)

    def visit(step: int, keys: Tensor, values: Tensor) -> None:
        for area in route.steps[step]:
            add(area, step, keys, values)

    _go_round(members, k, v, visit)


def _attend_back(
    members: Members,
    route: Route,
    gradient: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    dq: Tensor,
) -> Tensor:
    """Sum one turn's gradients of ``q`` in ``dq``; return those of ``k`` and ``v``, wide."""
    # [2 b k s c] gradients of the slice that is being visited. They follow it by one exchange: each
    # rank adds its share, and after size exchanges they are home, one more than the slice itself.
    behind = Transfer(torch.zeros((2, *k.shape), dtype=lse.dtype, device=q.device))

    def add(area: Area, step: int, keys: Tensor, values: Tensor) -> None:
        here, there = _indices(area)
        shares = attend_block_backward(
            gradient[here],
            q[here],
            keys[there],
            values[there],
            out[here],
            lse[here],
            offset=area.offset,
            ids=route.documents(area, step),
            kernel=route.kernel,
        )
        dq[here] += shares[0]
        # Only now: what others found of these keys may arrive while this rank computes.
        for whole, share in zip(behind.wait(), shares[1:], strict=True):
            whole[there] += share

    def visit(step: int, keys: Tensor, values: Tensor) -> None:
        nonlocal behind
        for area in route.steps[step]:
            add(area, step, keys, values)
        behind = members.pass_on(behind.wait())

    _go_round(members, k, v, visit)
    return behind.wait()


def _go_round(
    members: Members, k: Tensor, v: Tensor, visit: Callable[[int, Tensor, Tensor], None]
) -> None:
    """Visit the keys and values of every member, own ones first, the next ones on their way.

    A function is called, rather than a generator looped over, so that nothing keeps a slice
    longer than its visit.
    """
    # [2 b k s c], one message. In step n it holds the slice of the rank n before this one, so that
    # after size - 1 exchanges each rank has seen every slice and none is sent home again.
    block = torch.stack((k, v)).contiguous()  # stack keeps the order of strides
    for step in range(members.size):
        is_last = step == members.size - 1
        coming = Transfer(block) if is_last else members.pass_on(block)
        visit(step, *block)
        block = coming.wait()


def _turns(q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Query heads, and key and value heads, of each turn."""
    heads, shared = q.shape[2], k.shape[2]
    most = max(1, min(MOST_TURNS, 2 * k.nbytes // TURN_BYTES))
    turns = max(count for count in range(1, most + 1) if shared % count == 0)
    for turn in range(turns):
        own, their = (slice(turn * n // turns, (turn + 1) * n // turns) for n in (heads, shared))
        yield own, their


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros to sum in: the tensor itself, in place, where it is wide enough."""
    if like.dtype == dtype:
        return like.zero_()
    return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _dense(x: Tensor) -> Tensor:
    """Kernels read channels that lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_head(x: Tensor, heads: slice) -> Tensor:
    return x.transpose(1, 2)[:, heads]


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
