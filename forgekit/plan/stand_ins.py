"""Dry runs: fake tensors without values, and one process that acts as any rank.

A plan must never use a number that no rank has computed. What would hold weights, activations or
gradients is a stand-in, a fake tensor without values: reading one raises. Integers (token ids,
counts, sizes of what is sent) are real; where ranks exchange them, each is taken to send what this
one sends, which is so for settings and votes, and for balanced experts. What another rank
broadcasts, as pipeline stages do, is recorded in the plan of that rank.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from forgekit.plan.watch import NAMESPACES, group_of, is_inferring_shapes, tensors_in

LARGEST_REAL = 2**24
"""Number of elements from which integers have no values either."""
_SEND = dist.ProcessGroup.send
Broadcasts = dict[tuple[tuple[int, ...], int, int], Tensor]
"""Broadcast values by the group's ranks, the source, and the number of the call."""

EXCHANGES = frozenset(
    {"allgather_", "_allgather_base_", "alltoall_base_", "allreduce_", "broadcast_", "recv_"}
)
"""Collectives of integers whose result follows from this rank's input; see ``_exchange``."""
LOCAL = frozenset({"send", "barrier", "wait_tensor", "all_gather_into_tensor"})
"""Collectives whose result equals this rank's input."""


class PlanError(Exception):
    """A step cannot be planned, though the run may be right."""


class MissingBroadcastError(BaseException):  # passes through `except Exception` of planned code
    """A broadcast's source rank, the argument, has not been planned yet: plan it first."""


class StandIns(TorchDispatchMode):
    """Makes fake tensors within the block, as rank ``rank``."""

    def __init__(self, rank: int, broadcasts: Broadcasts) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._rank, self._broadcasts = rank, broadcasts
        self._numbers: Counter[tuple[tuple[int, ...], int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on fake tensors or integers."""
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        if is_inferring_shapes():
            return func(*args, **kwargs)
        tensors = tensors_in(args)
        if any(isinstance(x, FakeTensor) for x in tensors):
            if func is torch.ops.aten._grouped_mm.default:
                return _grouped(*args, **kwargs)
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in EXCHANGES:
            result = func(*args, **kwargs)
            self._exchange(name, group_of(func, args), args)
            return result
        if tensors and func.namespace in NAMESPACES and name not in LOCAL:
            raise PlanError(
                f"{func} exchanges numbers that have values ({tensors[0].dtype} of shape "
                f"{tuple(tensors[0].shape)}), but forgekit plan cannot know what other ranks "
                "send. Use all_gather, all_reduce, broadcast or all_to_all_single for them."
            )
        if _allocates(func, tensors, kwargs):
            with self._fake:
                made = func(*args, **kwargs)
            if made.is_floating_point() or made.numel() > LARGEST_REAL:
                return made
        return func(*args, **kwargs)

    def _exchange(self, name: str, group: dist.ProcessGroup, args: Any) -> None:
        """Receive this rank's own input from all ranks, and a broadcast's recorded values."""
        received, size = args[0], group.size()
        if name == "allgather_":
            for outputs, mine in zip(received, args[1], strict=True):
                for output in outputs:
                    output.copy_(mine)
        elif name == "_allgather_base_":
            received.view(size, -1).copy_(args[1].reshape(1, -1))
        elif name == "alltoall_base_":
            received.view(size, -1).copy_(args[1].view(size, -1)[group.rank()])
        elif name == "broadcast_":
            self._broadcast(group, received, args[2])
        else:
            for tensor in received:
                # Ones: torch's pipeline stages vote on whether shapes are known; they are.
                tensor.mul_(size) if name == "allreduce_" else tensor.fill_(1)

    def _broadcast(self, group: dist.ProcessGroup, tensors: list[Tensor], source: int) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        key = ranks, ranks[source], self._numbers[ranks, source]
        self._numbers[ranks, source] += 1
        for tensor in tensors:
            if ranks[source] == self._rank:
                self._broadcasts[key] = tensor.clone()
            elif key not in self._broadcasts:
                raise MissingBroadcastError(ranks[source])
            else:
                tensor.copy_(self._broadcasts[key])


@contextmanager
def pretending(rank: int, world: int, broadcasts: Broadcasts) -> Iterator[None]:
    """Act as one rank of a world within the block, without the others.

    Args:
        rank: Which rank.
        world: How many there are.
        broadcasts: Of the ranks that were planned before; this one's are added.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from forgekit.huggingface import load
    from forgekit.mesh import shutdown

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with (
            StandIns(rank, broadcasts),
            mock.patch.object(dist.ProcessGroup, "send", _send),
            # Torch's structures of a world, for this rank alone.
            mock.patch.object(_fsdp_param, "_chunk_with_empty", _chunks),
            mock.patch.object(dist, "new_subgroups_by_enumeration", _subgroup),
            mock.patch.object(dist, "all_gather_object", _gather),
            # A base's files are checked, but fake tensors cannot hold their values.
            mock.patch.object(load, "read_into", return_value=None),
            # Pipeline stages hold different parameters, unknown to one rank.
            mock.patch.object(load, "check_held", return_value=None),
        ):
            yield
    finally:
        shutdown()


def _send(group: dist.ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
    """Send; the tensor lives as long as the request, as with gloo."""
    work = _SEND(group, tensors, to, tag)
    weakref.finalize(work, list, tensors)
    return work


def _chunks(tensor: Tensor, count: int, dim: int) -> Mapping[int, Tensor]:
    """Split as FSDP does; empty shards are made on request."""
    chunks = torch.chunk(tensor, count, dim)
    return defaultdict(lambda: chunks[0].new_empty(0), enumerate(chunks))


def _subgroup(rows: list[list[int]], **options: Any) -> tuple[Any, list[Any]]:
    """Make the group of this rank only."""
    group = dist.new_group(next(row for row in rows if dist.get_rank() in row), **options)
    return group, [group]


def _gather(objects: list[Any], mine: Any, group: Any = None) -> None:
    """Gather this rank's value for all; for the whole world, once."""
    objects[:] = [mine] * (1 if group is None else len(objects))


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the shape of a grouped product; torch knows those of bfloat16 only."""
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim == b.ndim == 2 and offs is not None:
        return a.new_empty((len(offs), rows, columns))
    shape = (rows, columns) if 2 in (a.ndim, b.ndim) else (len(a), rows, columns)
    return a.new_empty(shape)


def _allocates(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation allocates a tensor off meta without reading a real tensor."""
    device = kwargs.get("device")
    is_here = device is not None and torch.device(device).type != "meta"
    return func.namespace == "aten" and is_here and all(x.is_meta for x in tensors)
