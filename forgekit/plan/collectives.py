"""Collectives as torch dispatches them: which kind, of how many bytes, among which ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from forgekit.mesh import expert_view

KINDS = (
    ("all_gather", "allgather"),
    ("reduce_scatter", "reduce_scatter"),
    ("all_reduce", "allreduce"),
    ("all_to_all", "alltoall"),
    ("broadcast", "broadcast"),
    ("receive", "recv"),
    ("send", "send"),
    ("gather", "gather"),
    ("scatter", "scatter"),
)
"""Our names, and by what torch's are known once their underscores are gone where they may be."""
NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})


class Call(NamedTuple):
    """One collective.

    Attributes:
        op: Its kind.
        ranks: The global ranks that take part.
        size: Bytes of the whole tensor on this rank: of what is gathered, scattered or sent.
    """

    op: str
    ranks: tuple[int, ...]
    size: int


def collective_of(func: Any, args: Any, result: Any) -> Call | None:
    """What an operation sends; None if it is no collective."""
    if func.namespace not in NAMESPACES or (kind := _kind(func)) is None:
        return None
    group = group_of(func, args)
    sizes = [sum(map(size_of, tensors_in(value))) for value in (*args, result)]
    ranks = tuple(dist.get_process_group_ranks(group))
    return Call(kind, ranks, max(sizes))


def group_of(func: Any, args: Any) -> dist.ProcessGroup:
    """The group that a collective was given, as an object or by name."""
    at, is_named = _position(func)
    if is_named:
        return dist.distributed_c10d._resolve_process_group(args[at])
    return dist.ProcessGroup.unbox(args[at])


def dimension_of(call: Call, mesh: DeviceMesh) -> str:
    """The mesh dimension along which a collective's ranks differ, several joined by ``+``."""
    own = {name: _neighbours(mesh, name) for name in mesh.mesh_dim_names or ()}
    if (view := expert_view(mesh)) is not None:
        own |= {name: _neighbours(view, name) for name in ("fsdp_ep", "ep")}
    # Tokens travel along ep, where its ranks are all of another dimension too.
    first = ("cp", "ep") if call.op == "all_to_all" else ()
    for name in (*first, *own):
        if own.get(name) == call.ranks:
            return name
    where = zip(*((mesh.mesh == rank).nonzero()[0].tolist() for rank in call.ranks), strict=True)
    named = zip(mesh.mesh_dim_names or (), where, strict=True)
    return "+".join(name for name, at in named if len(set(at)) > 1) or "none"


def _neighbours(mesh: DeviceMesh, name: str) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(mesh.get_group(name)))


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what an operation takes or returns: lists are the only containers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def _kind(func: Any) -> str | None:
    name = func.name().partition("::")[2].partition(".")[0]
    plain = name.replace("all_", "all").replace("to_all", "toall")
    return next((ours for ours, theirs in KINDS if theirs in plain), None)


def _position(func: Any) -> tuple[int, bool]:
    for at, argument in enumerate(func._schema.arguments):
        if "ProcessGroup" in str(argument.type):
            return at, False
        if argument.name == "group_name":
            return at, True
    raise ValueError(f"{func} names no process group.")
