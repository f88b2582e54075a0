"""What ranks that share a sequence tell each other: slices, heads and documents.

Communication runs inside operators of torch (``torch.library``), which recomputation, compilation
and dry runs on fake tensors see as one piece.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Members", "Transfer", "exchange_heads", "gather_ids", "members_named"]


@attrs.define(eq=False)
class Transfer:
    """A tensor on its way from the previous rank, and the one sent to the next.

    Attributes:
        arriving: Filled when the wait is over.
        sent: Kept until it has left.
        works: What to wait for.
    """

    arriving: Tensor
    sent: Tensor | None = None
    works: list[Any] = attrs.field(factory=list)

    def wait(self) -> Tensor:
        """Return the tensor when it has arrived, and let go of the other."""
        while self.works:
            self.works.pop().wait()
        self.sent = None
        return self.arriving


@attrs.frozen(eq=False)
class Members:
    """The ranks of a group that share something, as seen from one of them.

    Attributes:
        group: Their process group.
        rank: This rank among them.
        size: How many they are.
        known_ids: Documents that were gathered, as long as the rank's own tensor lives.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    known_ids: WeakTensorKeyDictionary = attrs.field(factory=WeakTensorKeyDictionary, repr=False)

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Members:
        """Describe a group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def name(self) -> str:
        """The name of their group, by which torch finds it for operators."""
        return self.group.group_name

    def pass_on(self, tensor: Tensor) -> Transfer:
        """Send a contiguous tensor to the next rank and receive the previous rank's."""
        following, previous = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        arriving = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, following, self.group),
                dist.P2POp(dist.irecv, arriving, previous, self.group),
            ]
        )
        return Transfer(arriving, tensor, works)


def members_named(name: str) -> Members:
    """Describe the group that an operator was given by name."""
    return Members.of(_resolve_process_group(name))  # pyright: ignore[reportArgumentType]


def gather_ids(members: Members, ids: Tensor) -> Tensor:
    """Put the document ids of all members side by side.

    Every layer of a forward pass and of its recomputation brings the same tensor, so it is sent
    once, and the very same result is returned as long as the tensor lives unchanged.

    Args:
        members: The ranks that share the rows.
        ids: ``[b s]`` of this rank.

    Returns:
        ``[b size*s]``, in rank order; not to be written to.
    """
    if torch.compiler.is_compiling():
        return torch.ops.forgekit.gather_ids(ids, members.name)
    version = None if ids.is_inference() else ids._version
    known = members.known_ids.get(ids)
    if known is None or known[0] != version:
        gathered = [torch.empty_like(ids.contiguous()) for _ in range(members.size)]
        dist.all_gather(gathered, ids.contiguous(), group=members.group)
        known = version, torch.cat(gathered, dim=1)
        members.known_ids[ids] = known
    return known[1]


@torch.library.custom_op(
    "forgekit::gather_ids", mutates_args=(), schema="(Tensor ids, str name) -> Tensor"
)
def gather_ids_compiled(ids: Tensor, name: str) -> Tensor:
    """Gather ids where a compiler may write to the result when it is used up."""
    return gather_ids(members_named(name), ids).clone()


@gather_ids_compiled.register_fake
def _(ids: Tensor, name: str) -> Tensor:
    return ids.new_empty((ids.shape[0], members_named(name).size * ids.shape[1]))


@torch.library.custom_op(
    "forgekit::exchange_heads", mutates_args=(), schema="(Tensor x, str name) -> Tensor"
)
def exchange_heads(x: Tensor, name: str) -> Tensor:
    """Give part ``p`` of a tensor to member ``p`` and get this rank's part of each.

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
