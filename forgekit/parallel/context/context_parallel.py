"""Context parallelism: how the ranks are split, and what a model's sockets get.

``context_parallel`` ranks are ``ring * ulysses``, numbered ``ring_rank * ulysses + ulysses_rank``.
A ring goes round zigzag slices, and inside one, ranks of a Ulysses group hold contiguous slices.
Attention and position ids are sockets, so a model needs nothing but to have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from forgekit.checks import divisors
from forgekit.data.batch import slice_positions
from forgekit.mesh import group_of
from forgekit.model.attention import Attend, Documents, attend_causal
from forgekit.model.attention_kernels import ORDER, AttentionChoice, AttentionUse, choose
from forgekit.model.transformer import locate_all
from forgekit.parallel.layout import size_of

ContextParallel = Literal["ring", "ulysses", "both"]

Sockets = Mapping[str, Mapping[str, Any]]
"""Callables by module name and socket name."""


class Context(NamedTuple):
    """How a sequence is shared, as seen from one rank.

    Attributes:
        ring: Ranks in a ring.
        ulysses: Ranks that exchange positions for heads.
        context_rank: This rank's position among those that share its sequences.
        sockets: The model's own sockets, which run whole sequences.
    """

    ring: int
    ulysses: int
    context_rank: int
    sockets: Sockets


class ChosenAttention(NamedTuple):
    """The chosen attention kernels.

    Attributes:
        requested: The requested kernel.
        kernels: The kernel for each use in this layout, chosen at set-up.
        documents: Where batches note the document ids that they move to a device; None where no
            kernel needs them on the host.
    """

    requested: AttentionChoice = "auto"
    kernels: Mapping[str, str] = MappingProxyType({})
    documents: Documents | None = None

    @property
    def attend(self) -> Attend:
        """Build the ``attend`` socket of a rank with whole rows."""
        if self.requested == "auto" and self.documents is None:
            return attend_causal
        return partial(attend_causal, attention=self.requested, documents=self.documents)


def choose_attention(
    model: nn.Module,
    mesh: DeviceMesh,
    compute: torch.dtype | None,
    attention: AttentionChoice,
    method: ContextParallel,
) -> ChosenAttention:
    """Choose the kernels of a model's attention at set-up.

    Args:
        model: Modules with an ``attend`` socket and ``channels`` say how wide a head is; of others
            it is not known before they run.
        mesh: Where the model will be.
        compute: What it computes in; that of its parameters if None.
        attention: ``"auto"``, or the requested kernel.
        method: How ranks share a sequence, where they do.

    Raises:
        ValueError: If the requested kernel cannot run there, or nothing would use it.
    """
    attending = [m for m in model.modules() if hasattr(m, "attend")]
    if attention != "auto" and not any(m.attend is attend_causal for m in attending):
        raise ValueError(
            f"attention is {attention!r}, but no module of {type(model).__name__} has an 'attend' "
            "socket with forgekit.model.attend_causal. Pass attention='auto'."
        )
    floating = (p.dtype for p in model.parameters() if p.is_floating_point())
    dtype = compute or next(floating, torch.float32)
    is_ring = size_of(mesh, "cp") > 1 and method != "ulysses"
    channels = [getattr(m, "channels", None) for m in attending]
    widths = [width if isinstance(width, int) else None for width in channels]
    uses: tuple[AttentionUse, ...] = ("ring",) if is_ring else ("rows", "documents")
    device = torch.device(mesh.device_type)
    kernels = {  # the one for documents raises when documents come
        use: sorted({choose(use, device, dtype, width, attention) for width in widths})
        for use in uses
        if use != "documents" or attention in ("auto", *ORDER[use])
    }
    needing = {"varlen", *(("flash",) if is_ring else ())}
    is_needed = any(needing.intersection(names) for names in kernels.values())
    shown = {use: "/".join(names) for use, names in kernels.items() if names}
    return ChosenAttention(attention, shown, Documents() if is_needed else None)


def apply_context(
    model: nn.Module,
    mesh: DeviceMesh,
    method: ContextParallel,
    *,
    kernels: ChosenAttention | None = None,
) -> Context:
    """Set a model's attention sockets, and those of context parallelism, in place.

    Every rank of the mesh calls it with the same arguments: it makes process groups.

    Args:
        model: Has modules with an ``attend`` socket; ``locate`` (position ids) and ``sum_slices``
            (counts of rows) are replaced where there are such.
        mesh: What ``build_mesh`` returned.
        method: ``"ring"``, ``"ulysses"``, or ``"both"``.
        kernels: What computes attention; chosen at each call if None.

    Returns:
        How the ranks were split, and the sockets that were there before.

    Raises:
        ValueError: If the ranks cannot be split so, query heads do not divide, or nothing in the
            model has an ``attend`` socket.

    References:
        Unified sequence parallelism, https://arxiv.org/abs/2405.07719
    """
    context, kernels = size_of(mesh, "cp"), kernels or ChosenAttention()
    attending = {name: m for name, m in model.named_modules() if hasattr(m, "attend")}
    if context == 1:
        causal = [name for name, m in attending.items() if m.attend is attend_causal]
        _put(model, {name: {"attend": kernels.attend} for name in causal})
        return Context(1, 1, 0, {})
    if not attending:
        raise ValueError(
            f"no module of {type(model).__name__} has an 'attend' socket for cp {context}. Set "
            "self.attend = forgekit.model.attend_causal and call it, or use cp=1."
        )
    # The common divisor if modules differ.
    heads = math.gcd(*(_local_heads(m, size_of(mesh, "tp")) for m in attending.values()))
    ring, ulysses = split_context(context, method, heads or None)
    rank = mesh.get_local_rank("cp")
    shared = {
        "attend": _build_attend(mesh, ring, ulysses, kernels),
        "locate": locate_slice(ring, ulysses, rank),
        "sum_slices": partial(_sum_slices, mesh.get_group("cp")),
    }
    replaced = {
        name: {socket: function for socket, function in shared.items() if hasattr(module, socket)}
        for name, module in model.named_modules()
    }
    before = _put(model, {name: sockets for name, sockets in replaced.items() if sockets})
    return Context(ring, ulysses, rank, before)


def split_context(
    context: int, method: ContextParallel, heads: int | None = None
) -> tuple[int, int]:
    """Split the ranks that share a sequence into rings and Ulysses groups.

    Exchanging heads moves less than a ring, so with ``"both"`` Ulysses gets the most ranks that
    divide the heads and leave a ring of two.

    Args:
        context: Ranks that share a sequence, ``cp``.
        method: ``"ring"``, ``"ulysses"``, or ``"both"``.
        heads: Query heads of a rank, after tensor parallelism; None if unknown.

    Returns:
        ``(ring, ulysses)``, whose product is ``context``.

    Raises:
        ValueError: If there is no such split.

    Examples:
        >>> split_context(8, "both", heads=6)
        (4, 2)
    """
    if method == "ring":
        return context, 1
    if method == "ulysses":
        if heads is not None:
            from forgekit.parallel.context.sequence_exchange import check_heads

            check_heads(heads, context)
        return 1, context
    # Neither 1 nor all: that would be a ring, or Ulysses, alone.
    splits = divisors(context)[1:-1]
    fitting = [u for u in splits if heads is None or heads % u == 0]
    if not fitting:
        raise ValueError(
            f"context_parallel 'both' with cp {context} needs ulysses to be one of {splits} and to "
            f"divide the {heads or 'query'} heads of a rank. Use 'ring', or other sizes."
        )
    return context // fitting[-1], fitting[-1]


def locate_slice(ring: int, ulysses: int, rank: int) -> Callable[[int, torch.device], Tensor]:
    """Build the ``locate`` socket of a rank that holds a slice of each sequence.

    Args:
        ring: Ranks in a ring.
        ulysses: Ranks that exchange heads.
        rank: ``ring_rank * ulysses + ulysses_rank``.

    Returns:
        ``locate(s, device)``: the position ids ``[s]``, int64, of this rank's ``s`` positions.

    Examples:
        >>> locate_slice(ring=2, ulysses=1, rank=0)(4, torch.device("cpu"))
        tensor([0, 1, 6, 7])
    """
    # The ring's zigzag slice, and within it the contiguous one of Ulysses.
    ring_rank, ulysses_rank = divmod(rank, ulysses)

    def locate(s: int, device: torch.device) -> Tensor:
        everywhere = locate_all(s * ring * ulysses, device)
        of_ring = slice_positions(everywhere, rank=ring_rank, world=ring, method="zigzag")
        return slice_positions(of_ring, rank=ulysses_rank, world=ulysses, method="contiguous")

    return locate


@contextmanager
def with_sockets(model: nn.Module, sockets: Sockets) -> Iterator[None]:
    """Replace a model's sockets within the block.

    With ``Layout.sockets`` every rank runs whole sequences, as one device does.

    Args:
        model: Any model; has its present callables back afterwards. Modules of other pipeline
            stages are passed over.
        sockets: What its modules call within the block.
    """
    present = _put(model, sockets)
    try:
        yield
    finally:
        _put(model, present)


def _put(model: nn.Module, sockets: Sockets) -> Sockets:
    """Set a model's sockets, in place; return the previous ones."""
    modules = {name: m for name, m in model.named_modules() if not getattr(m, "is_absent", False)}
    # Sockets are instance attributes: the model's code and parameter names stay.
    before: dict[str, dict[str, Any]] = {}
    for name, functions in sockets.items():
        if name in modules:
            before[name] = {socket: getattr(modules[name], socket) for socket in functions}
            vars(modules[name]).update(functions)  # precedes a method or child of that name
    return before


def _build_attend(mesh: DeviceMesh, ring: int, ulysses: int, kernels: ChosenAttention) -> Attend:
    # Imported here: registering operators with torch is slow.
    from forgekit.parallel.context.ring_attention import ring_attention
    from forgekit.parallel.context.sequence_exchange import Members, ulysses_attention

    cp, documents = mesh.get_group("cp"), kernels.documents
    if ulysses == 1:
        return ring_attention(Members.of(cp), kernels.requested, documents)
    if ring == 1:
        return ulysses_attention(Members.of(cp), kernels.attend, documents)
    dim = (mesh.mesh_dim_names or ()).index("cp")
    # Ranks of cp as [ring, ulysses]: neighbours exchange heads, which moves less than a ring.
    shared = mesh.mesh.movedim(dim, -1).reshape(-1, ring, ulysses)
    rings = Members.of(group_of("ring", shared.mT.reshape(-1, ring).tolist()))
    neighbours = Members.of(group_of("ulysses", shared.reshape(-1, ulysses).tolist()))
    attend = ring_attention(rings, kernels.requested, documents)
    return ulysses_attention(neighbours, attend, documents)


@torch.compiler.disable()
def _sum_slices(group: dist.ProcessGroup, counts: Tensor) -> Tensor:
    """Sum counts over the ranks that share rows, without a gradient."""
    whole = counts.clone()
    dist.all_reduce(whole, group=group)
    return whole


def _local_heads(module: nn.Module, tensor: int) -> int:
    """Return a module's query heads on this rank; 0 if unknown before it runs."""
    weight = getattr(getattr(module, "query", None), "weight", None)
    channels = getattr(module, "channels", None)
    if not isinstance(weight, Tensor) or not isinstance(channels, int):
        return 0
    return weight.shape[0] // channels // tensor
