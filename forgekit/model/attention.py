"""Causal attention within documents, as a callable for a model's ``attend`` socket.

Attention never crosses from one document of a packed row into another. On a CPU, where
``scaled_dot_product_attention`` computes masked pairs as well, the documents are attended one by
one when that is less work, and many short ones under a boolean mask. Elsewhere a kernel that never
holds a mask of all pairs is used where there is one; see ``attention_kernels``.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Protocol

import attrs
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakTensorKeyDictionary

from forgekit.model.attention_kernels import AttentionChoice, choose

CALL_COST = 30_000
"""Query-key pairs that cost as much as one call, forward and backward (one CPU core)."""


class Attend(Protocol):
    """Interface of the ``attend`` socket, which ``parallelize`` may replace."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, doc_ids: Tensor | None) -> Tensor:
        """Attend from each position to itself and those before it in its document."""
        ...


class Bounds(NamedTuple):
    """Document boundaries in rows laid end to end.

    Attributes:
        starts: ``[n+1]`` int32, and last the end, on the device.
        longest: Positions of the longest document.
    """

    starts: Tensor
    longest: int


@attrs.define(eq=False)
class Documents:
    """The documents of current micro-batches, computed once for all layers.

    Kernels are launched with the number of documents and the longest one, which a step must not
    ask the device for. Whoever moves ids to a device notes what they were on the host. Ids are
    known as long as they live and are not changed: by their identity and version.
    """

    _by_ids: WeakTensorKeyDictionary = attrs.field(factory=WeakTensorKeyDictionary, init=False)

    def note(self, ids: Tensor, host: Tensor | None) -> None:
        """Remember the host copy of ``ids``, ``[b s]``, whole rows, as long as ``ids`` live."""
        if host is not None and host is not ids:  # a value that held its key would keep it
            self._kept_of(ids).setdefault("host", host)

    def host(self, ids: Tensor) -> Tensor | None:
        """Return the host copy of whole rows' ids; None if they were not noted."""
        return self._kept_of(ids).get("host")

    @_disable_dynamo
    def bounds(self, ids: Tensor, *, may_read: bool = False) -> Bounds | None:
        """Return the document boundaries.

        Args:
            ids: ``[b s]``.
            may_read: Whether ids that were not noted are read from the device.

        Returns:
            The bounds; None if they are not known, or an id comes back after another in a row.
        """
        kept = self._kept_of(ids)
        if "bounds" not in kept:
            if "host" not in kept and not may_read and ids.device.type != "cpu":
                return None
            kept["bounds"] = _bounds(kept["host"] if "host" in kept else ids.cpu(), ids.device)
        return kept["bounds"]

    @_disable_dynamo
    def block_mask(self, ids: Tensor) -> Any:
        """Return the ``BlockMask`` of ids, made once."""
        kept = self._kept_of(ids)
        if "mask" not in kept:
            # Detached: a mask that refers to the ids would keep them alive forever.
            rows, positions = ids.shape
            kept["mask"] = _block_mask(ids.device, rows, positions, ids.detach())
        return kept["mask"]

    def _kept_of(self, ids: Tensor) -> dict[str, Any]:
        """Return the cache of ids at their version: host copy, bounds and mask."""
        if ids.is_inference():  # without a version changes cannot be noticed
            return {}
        kept = self._by_ids.get(ids)
        if kept is None or kept["version"] != ids._version:
            kept = self._by_ids[ids] = {"version": ids._version}
        return kept

    def __reduce__(self) -> Any:
        return Documents, ()


def attend_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    doc_ids: Tensor | None = None,
    attention: AttentionChoice = "auto",
    documents: Documents | None = None,
) -> Tensor:
    """Causal grouped-query attention on one device.

    Args:
        q: ``[b s h c]`` queries.
        k: ``[b s k c]`` keys; ``k`` divides ``h``.
        v: ``[b s k c]`` values.
        doc_ids: ``[b s]`` document of each position, -1 on padding; None for one document a row.
        attention: The kernel; ``"auto"`` takes the best that the device has for these queries.
        documents: Where ``doc_ids`` were noted on the host; without it ``"auto"`` does not take
            ``"varlen"``, which would make the host wait for the device.

    Returns:
        ``[b s h c]``.

    Raises:
        ValueError: If the requested kernel cannot run here, or takes no documents, or an
            id comes back after another, and the kernel is ``"varlen"``.
    """
    if torch.is_autocast_enabled(q.device.type):  # which covers torch's own attention only
        q, k, v = (_autocast(x) for x in (q, k, v))
    here = q.device, q.dtype, q.shape[-1], attention
    if doc_ids is None:
        return _attend_rows(choose("rows", *here), q, k, v)
    kernel = choose("documents", *here)
    if kernel == "varlen":
        bounds = (documents or Documents()).bounds(doc_ids, may_read=attention == "varlen")
        if bounds is not None:
            return _flash(q, k, v, bounds)
        if attention == "varlen":
            raise ValueError(
                "attention is 'varlen', but a document in doc_ids is interrupted by another one; "
                "the kernel needs documents in one piece. Pass 'flex', 'sdpa' or 'auto'."
            )
        kernel = choose("scattered", *here)
    if kernel == "flex":
        return _flex(q, k, v, (documents or Documents()).block_mask(doc_ids))
    return _attend_sdpa(q, k, v, doc_ids)


def document_mask(doc_ids: Tensor) -> Tensor:
    """Return the pairs that may attend: ``mask[b, 0, i, j]`` is ``j <= i`` in one document.

    Args:
        doc_ids: ``[b s]``.

    Returns:
        ``[b 1 s s]`` bool, True where attention is allowed.

    Examples:
        >>> document_mask(torch.tensor([[4, 4, 7]]))[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    same = doc_ids[:, None, :, None] == doc_ids[:, None, None, :]
    return same.tril_()


def _autocast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _attend_rows(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if kernel in ("flash", "varlen"):
        return _flash(q, k, v)
    if kernel == "flex":
        return _flex(q, k, v, _block_mask(q.device, None, q.shape[1]))
    return _sdpa(q, k, v)


def _attend_sdpa(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor) -> Tensor:
    # Nothing is read while tracing: other packings would need another graph.
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        lengths = _document_lengths(doc_ids)
        if lengths is not None and _is_cheaper(lengths, q):
            return _attend_documents(q, k, v, lengths)
    return _sdpa(q, k, v, mask=document_mask(doc_ids))


def _flash(q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None = None) -> Tensor:
    """Call torch's flash kernel; with bounds, as ``torch.nn.attention.varlen`` does.

    The operator itself, which the blocks of a ring need too, has been the same for longer than the
    function around it.
    """
    flash = torch.ops.aten._flash_attention_forward
    fixed = (0.0, True, False)  # dropout, is_causal, return_debug_mask
    if bounds is None:
        return flash(q, k, v, None, None, q.shape[1], k.shape[1], *fixed)[0]
    starts, longest = bounds  # of queries and of keys, the same positions
    flat = (x.flatten(0, 1) for x in (q, k, v))
    return flash(*flat, starts, starts, longest, longest, *fixed)[0].unflatten(0, q.shape[:2])


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    is_eager = q.device.type == "cpu" or torch.compiler.is_compiling()
    attend: Any = flex_attention if is_eager else torch.compile(flex_attention)
    q, k, v = (rearrange(x, "b s h c -> b h s c") for x in (q, k, v))
    out = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return rearrange(out, "b h s c -> b s h c")


def _block_mask(
    device: torch.device, rows: int | None, positions: int, doc_ids: Tensor | None = None
) -> Any:
    """Build the block mask, of 1 / 128**2 of the elements of a mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    def may_attend(b: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j if doc_ids is None else (i >= j) & (doc_ids[b, i] == doc_ids[b, j])

    # Uncompiled it would materialise all pairs.
    compiled = device.type != "cpu"
    return create_block_mask(
        may_attend, rows, None, positions, positions, device, _compile=compiled
    )


def _bounds(host: Tensor, device: torch.device) -> Bounds | None:
    lengths = _document_lengths(host)
    if lengths is None:
        return None
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    starts = starts.pin_memory() if host.is_pinned() else starts
    return Bounds(starts.to(device, non_blocking=True), max(lengths))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None) -> Tensor:
    q, k, v = (rearrange(x, "b s h c -> b h s c") for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return rearrange(out, "b h s c -> b s h c")


def _attend_documents(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    # One split of all rows: its backward is one concatenation; that of slices would add
    # a full-size gradient for each.
    split = (rearrange(x, "b s h c -> 1 (b s) h c").split(lengths, 1) for x in (q, k, v))
    out = torch.cat([_sdpa(*part) for part in zip(*split, strict=True)], dim=1)
    return rearrange(out, "1 (b s) h c -> b s h c", b=q.shape[0])


def _document_lengths(doc_ids: Tensor) -> list[int] | None:
    """Return the lengths of runs of equal ids, row after row; None if an id returns later.

    On a CPU tensor the values are at hand: reading them waits for no device.
    """
    lengths: list[int] = []
    for row in doc_ids.tolist():
        runs = [(document, len(list(run))) for document, run in itertools.groupby(row)]
        documents = [document for document, _ in runs if document != -1]
        if len(set(documents)) != len(documents):
            return None
        lengths += [length for _, length in runs]
    return lengths


def _is_cheaper(lengths: list[int], q: Tensor) -> bool:
    rows, positions, heads, _ = q.shape
    one_by_one = sum(heads * length * (length + 1) // 2 + CALL_COST for length in lengths)
    return one_by_one < rows * heads * positions**2
