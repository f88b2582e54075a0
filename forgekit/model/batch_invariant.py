"""Batch invariance: a token's bits do not depend on the rest of the batch.

A matrix product adds up in an order that depends on its shape: a token decoded alone, in a batch
or in a training row gets other last bits. Here every product has one shape per matrix. Positions
are taken in tiles of a fixed number of rows, the last one padded; attention multiplies tiles of
queries by blocks of keys that begin where the document does, and adds the blocks up from the first
to the last, so that blocks behind a mask add an exact zero. Only the forward pass is bound to
that: backward computes the ordinary way, from the inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable

from forgekit.model.attention import Documents, attend_causal
from forgekit.model.lora import LoraLinear
from forgekit.model.moe import Experts
from forgekit.model.nf4 import is_packed
from forgekit.tensors import wide

QUERIES, KEYS = 16, 64
"""Tile sizes of queries, which one new token with its heads does not fill, and of keys."""


PART = 2**15
"""Elements of a part: with more of them torch shares a loop among threads, and on a CPU the last
elements of each thread's share get another exponential."""


def tile_rows(device: torch.device) -> int:
    """Return the rows of a tile: few on a CPU, where decoding computes padded rows too."""
    return 32 if device.type == "cpu" else 256


def by_tile(compute: Callable[[Tensor], Tensor], x: Tensor, *read: Tensor) -> Tensor:
    """Compute a row-wise function tile by tile.

    Args:
        compute: Maps ``[n ...]`` to ``[n ...]``, each row from its own.
        x: ``[n ...]``.
        *read: What else ``compute`` reads and may be trained, such as a module's parameters.

    Returns:
        ``[n ...]``, differentiable in ``x`` and ``read``.
    """
    if torch.compiler.is_compiling():
        _refuse_compiled()
    if torch.is_autocast_enabled(x.device.type):
        refuse_batch_invariant("it runs under autocast")

    def each_tile(x: Tensor) -> Tensor:
        size = tile_rows(x.device)
        tiles = F.pad(x, [0, 0] * (x.ndim - 1) + [0, -len(x) % size]).split(size)
        return torch.cat([compute(tile) for tile in tiles])[: len(x)]

    return _ByTile.apply(each_tile, compute, 1, x, *read)  # pyright: ignore[reportReturnType]


def rows_by_tile(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module on ``[b s ...]`` by tiles of positions; a model's ``rows`` socket."""
    return by_tile(module, x.flatten(0, 1), *module.parameters()).unflatten(0, x.shape[:2])


def linear_by_tile(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``[... d]`` by ``weight``, ``[v d]``, by tiles of rows -> ``[... v]``."""
    flat = x.reshape(-1, x.shape[-1])
    out = by_tile(lambda rows: F.linear(rows, weight), flat, weight)
    return out.view(*x.shape[:-1], out.shape[-1])


def silu_in_parts(x: Tensor) -> Tensor:
    """Compute SiLU of ``[t f]`` in parts that torch does not divide among threads."""
    return torch.cat([F.silu(part) for part in x.flatten().split(PART)]).view_as(x)


def telling(head: Callable[..., Any]) -> Callable[..., Any]:
    """Pass ``batch_invariant=True`` to a head that accepts it."""
    is_asking = "batch_invariant" in inspect.signature(head).parameters
    return partial(head, batch_invariant=True) if is_asking else head


def log_probs_of(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute log-probabilities of all tokens, ``[... v]``, in float32 or wider.

    Sampling and training both call it: another formula for the same number has other last bits.

    Args:
        logits: ``[... v]``.
        temperature: Divides them, above 0.
    """
    return (logits.to(wide(logits.dtype)) / temperature).log_softmax(-1)


def attend_by_tile(q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None = None) -> Tensor:
    """Attend within documents as ``attend_causal`` does; an ``attend`` socket.

    Args:
        q: ``[b s h c]`` queries.
        k: ``[b s k c]`` keys; ``k`` divides ``h``.
        v: ``[b s k c]`` values.
        doc_ids: ``[b s]``, read by the host; None for one document a row.

    Returns:
        ``[b s h c]``.

    Raises:
        ValueError: If an id comes back after another in a row.
    """
    by_tile = partial(_attend_documents, starts=_starts(q, doc_ids))
    plainly = partial(attend_causal, doc_ids=doc_ids)
    return _ByTile.apply(by_tile, plainly, 3, q, k, v)  # pyright: ignore[reportReturnType]


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend from tiles of queries to blocks of keys, summed in the order of blocks.

    Args:
        q: ``[m k r t c]``: of each key head, ``r`` tiles of ``t`` queries.
        k: ``[j m k s c]``: ``j`` blocks of ``s`` keys, from the document's first one on.
        v: ``[j m k s c]`` values.
        mask: Of ``[j m k r t s]`` bool, True where a query sees a key; all see the first one.

    Returns:
        ``[m k r t c]`` in the dtype of ``q``.
    """
    given, dtype = q.dtype, wide(q.dtype)
    q = (q.to(dtype) * q.shape[-1] ** -0.5).contiguous()
    # Contiguous: the memory layout of a matrix may change the order of sums too.
    k, v = (x.to(dtype).contiguous().unsqueeze(3) for x in (k.mT, v))
    scores = q @ k
    scores = scores.masked_fill(~mask, float("-inf"))
    # Maxima are exact in any order, unlike the sums below.
    weights = (scores - scores.amax((0, -1), keepdim=True)).exp()
    parts, sums = weights @ v, weights.sum(-1, keepdim=True)
    out, total = parts[0], sums[0]
    for part, more in zip(parts[1:], sums[1:], strict=True):
        out, total = out + part, total + more
    return (out / total).to(given)


def attend_cached(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attend from one new position to the cached ones, as ``attend_by_tile`` would.

    Args:
        q: ``[b k g c]``, the query heads that share keys.
        k: ``[b k s c]`` keys from a row's first position on.
        v: ``[b k s c]`` values.
        mask: ``[b 1 1 s]`` bool, which positions a row has.

    Returns:
        ``[b k g c]``.
    """
    count, missing = q.shape[2], -k.shape[2] % KEYS
    tiles = F.pad(q, (0, 0, 0, -count % QUERIES)).unflatten(2, (-1, QUERIES))
    k, v = (F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, KEYS)) for x in (k, v))
    mask = F.pad(mask, (0, missing)).unflatten(-1, (-1, KEYS))
    k, v = (rearrange(x, "b k j s c -> j b k s c") for x in (k, v))
    out = attend_blocks(tiles, k, v, rearrange(mask, "b k r j s -> j b k r 1 s"))
    return out.flatten(2, 3)[:, :, :count]


def restarting_positions(doc_ids: Tensor) -> Tensor:
    """Return positions within documents, ``[b s]``: rotations by others differ in last bits.

    Examples:
        >>> restarting_positions(torch.tensor([[4, 4, 7, 7, 7]]))
        tensor([[0, 1, 0, 1, 2]])
    """
    each = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    is_first = doc_ids != doc_ids.roll(1, 1)
    return each - torch.where(is_first, each, 0).cummax(1).values


def check_parts(model: nn.Module) -> None:
    """Raise if a model has parts whose bits depend on other rows or on random numbers.

    Raises:
        ValueError: If it has experts, weights packed into NF4 or dropout.
    """
    for name, module in model.named_modules():
        adapters = module.adapters.values() if isinstance(module, LoraLinear) else ()
        if isinstance(module, Experts):
            refuse_batch_invariant(f"{name!r} has experts")
        if any(is_packed(parameter) for parameter in module.parameters(recurse=False)):
            refuse_batch_invariant(f"{name!r} is packed into NF4")
        if (isinstance(module, nn.Dropout) and module.p) or any(a.dropout for a in adapters):
            refuse_batch_invariant(f"{name!r} has dropout")


def refuse_batch_invariant(why: str) -> NoReturn:
    """Raise because a token's bits would depend on the rest of the batch.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"the model cannot be batch_invariant, since {why}: log-probabilities of generate would "
        "not be bit for bit those of a training forward. Leave one of the two out."
    )


@_disable_dynamo
def _refuse_compiled() -> None:
    # Not traced: the compiler would leave a function that raises to eager code.
    refuse_batch_invariant("it is compiled")


class _ByTile(torch.autograd.Function):
    """Forward by tiles; backward recomputes from the inputs, without tiles."""

    @staticmethod
    def forward(
        ctx: Any,
        by_tile: Callable[..., Tensor],
        plainly: Callable[..., Tensor],
        inputs: int,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*tensors[:inputs])
        # Parameters are not saved: FSDP gathers into the same ones again.
        ctx.plainly, ctx.read = plainly, tensors[inputs:]
        return by_tile(*tensors[:inputs])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.plainly(*inputs)
        needs = ctx.needs_input_grad[3:]
        wanted = [x for x, is_needed in zip([*inputs, *ctx.read], needs, strict=True) if is_needed]
        gradients = iter(torch.autograd.grad(out, wanted, upstream))
        return None, None, None, *(next(gradients) if is_needed else None for is_needed in needs)


def _starts(q: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Return document boundaries in rows laid end to end, ``[n+1]`` on the host."""
    rows, positions = q.shape[:2]
    if doc_ids is None:
        return torch.arange(rows + 1) * positions
    bounds = Documents().bounds(doc_ids, may_read=True)
    if bounds is None:
        raise ValueError(
            "the model is batch_invariant, but a document in doc_ids is interrupted by another "
            "one. Give each contiguous run of positions its own id."
        )
    return bounds.starts.cpu().long()


def _attend_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Attend within documents: the n-th query blocks of all documents at a time."""
    blocks = -(-starts.diff() // KEYS)
    first = blocks.cumsum(0) - blocks
    document = torch.arange(len(blocks)).repeat_interleave(starts.diff())
    slots = first[document] * KEYS + torch.arange(len(document)) - starts[document]
    slots, count = slots.to(q.device), int(blocks.sum())
    q_blocks, k_blocks, v_blocks = (_in_blocks(x, slots, count) for x in (q, k, v))
    out, groups = torch.empty_like(q_blocks), q.shape[2] // k.shape[2]
    columns = torch.arange(int(blocks.max()) * KEYS, device=q.device).view(-1, 1, 1, 1, 1, KEYS)
    for number in range(int(blocks.max())):
        here = first[blocks > number].to(q.device)
        before = here + torch.arange(number + 1, device=q.device)[:, None]  # [j m]
        tiles = rearrange(
            q_blocks[here + number], "m (u t) (k g) c -> m k (g u) t c", t=QUERIES, g=groups
        )
        keys, values = (
            rearrange(x[before], "j m s k c -> j m k s c") for x in (k_blocks, v_blocks)
        )
        rows = number * KEYS + torch.arange(KEYS, device=q.device).view(-1, QUERIES)
        mask = columns[: number + 1] <= rows.repeat(groups, 1)[:, :, None]
        attended = attend_blocks(tiles, keys, values, mask)
        out[here + number] = rearrange(attended, "m k (g u) t c -> m (u t) (k g) c", g=groups)
    return out.flatten(0, 1)[slots].view_as(q)


def _in_blocks(x: Tensor, slots: Tensor, count: int) -> Tensor:
    """Scatter rows, ``[b s ...]``, to their slots in blocks of keys, ``[n s ...]``."""
    blocks = x.new_zeros(count * KEYS, *x.shape[2:])  # a NaN in memory would pass a mask
    blocks[slots] = x.flatten(0, 1)
    return blocks.unflatten(0, (count, KEYS))
