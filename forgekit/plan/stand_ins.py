"""Tensors without values in place of numbers, and one process in place of all ranks.

A plan must never use a number that no rank has computed. What would hold weights, activations or
gradients is a stand-in, which has a shape and no values: reading one raises. Whole numbers (token
ids, counts, sizes of what is sent) are real; where ranks exchange them, each is taken to bring what
this one brings, which is so for settings and votes, and for experts that take turns. What one rank
tells another, as pipeline stages do, is remembered from the plan of that rank.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from forgekit.plan.collectives import NAMESPACES, group_of, tensors_in

LARGEST_REAL = 2**24
"""Elements from which whole numbers have no values either."""
c10d = torch.ops.c10d
_SEND = dist.ProcessGroup.send

KNOWN = frozenset({"send", "barrier", "wait_tensor", "all_gather_into_tensor"})
"""Collectives that bring nothing else than what this rank has, beside ``_EXCHANGES``."""


class PlanError(Exception):
    """What a plan cannot find out, though the run may be right."""


class NotToldError(BaseException):  # no `except Exception` of what is planned holds it
    """What another rank tells is not known yet: plan that one first.

    Attributes:
        rank: The other rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has not been planned so far")
        self.rank = rank


@attrs.define
class Told:
    """What ranks have told others, by the ranks that listen, the one that tells, and a number."""

    values: dict[tuple[tuple[int, ...], int, int], Tensor] = attrs.field(factory=dict)


class StandIns(TorchDispatchMode):
    """Makes stand-ins within the block, as rank ``rank``."""

    def __init__(self, rank: int, told: Told) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._rank, self._told = rank, told
        self._turns: Counter[tuple[tuple[int, ...], int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on stand-ins, or on whole numbers."""
        if DTensor in types:
            return NotImplemented
        kwargs = kwargs or {}
        if finds_shapes():
            return func(*args, **kwargs)
        tensors = tensors_in(args)
        if any(isinstance(x, FakeTensor) for x in tensors):
            if func is torch.ops.aten._grouped_mm.default:
                return _grouped(*args, **kwargs)
            return func(*args, **kwargs)
        if func.namespace == "c10d" and func in _EXCHANGES:
            result = func(*args, **kwargs)
            _EXCHANGES[func](self, group_of(func, args), args)
            return result
        if tensors and func.namespace in NAMESPACES and func.overloadpacket.__name__ not in KNOWN:
            raise PlanError(
                f"{func} exchanges numbers that have values ({tensors[0].dtype} of shape "
                f"{tuple(tensors[0].shape)}), and forgekit plan does not know what other ranks "
                "bring. Use all_gather, all_reduce, broadcast or all_to_all_single for them."
            )
        if _allocates(func, tensors, kwargs):
            with self._fake:
                made = func(*args, **kwargs)
            if made.is_floating_point() or made.numel() > LARGEST_REAL:
                return made
        return func(*args, **kwargs)

    def _gather(self, _group: dist.ProcessGroup, args: Any) -> None:
        for outputs, mine in zip(args[0], args[1], strict=True):
            for output in outputs:
                output.copy_(mine)

    def _gather_one(self, group: dist.ProcessGroup, args: Any) -> None:
        output, mine = args[:2]
        output.view(group.size(), -1).copy_(mine.reshape(1, -1))

    def _exchange(self, group: dist.ProcessGroup, args: Any) -> None:
        """Receive from each rank what this one has for itself."""
        output, mine = args[:2]
        parts = mine.view(group.size(), -1)
        output.view(group.size(), -1).copy_(parts[group.rank()])

    def _sum(self, group: dist.ProcessGroup, args: Any) -> None:
        for tensor in args[0]:
            tensor.mul_(group.size())

    def _receive(self, _group: dist.ProcessGroup, args: Any) -> None:
        """Receive ones: torch's pipeline stages vote on whether shapes are given, and they are."""
        for tensor in args[0]:
            tensor.fill_(1)

    def _tell(self, group: dist.ProcessGroup, args: Any) -> None:
        ranks = tuple(dist.get_process_group_ranks(group))
        source = ranks[args[2]]
        turn = self._turns[ranks, source]
        self._turns[ranks, source] += 1
        for tensor in args[0]:
            if source == self._rank:
                self._told.values[ranks, source, turn] = tensor.clone()
            elif (told := self._told.values.get((ranks, source, turn))) is None:
                raise NotToldError(source)
            else:
                tensor.copy_(told)


_EXCHANGES: Mapping[Any, Any] = MappingProxyType(
    {
        c10d.allgather_.default: StandIns._gather,
        c10d._allgather_base_.default: StandIns._gather_one,
        c10d.alltoall_base_.default: StandIns._exchange,
        c10d.allreduce_.default: StandIns._sum,
        c10d.broadcast_.default: StandIns._tell,
        c10d.recv_.default: StandIns._receive,
    }
)


def finds_shapes() -> bool:
    """Whether torch is finding out shapes on stand-ins of its own, of which nothing is kept."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def pretending(rank: int, world: int, told: Told) -> Iterator[None]:
    """Be one rank of a world within the block; no other is there.

    Args:
        rank: Which rank.
        world: How many there are.
        told: What ranks that were planned before have told; added to.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from forgekit.huggingface import load
    from forgekit.mesh import shutdown

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with (
            StandIns(rank, told),
            mock.patch.object(dist.ProcessGroup, "send", _send),
            # A base's files are checked, and their values not read: nothing could hold them.
            mock.patch.object(load, "read_into", return_value=None),
        ):
            yield
    finally:
        shutdown()


def _send(group: dist.ProcessGroup, tensors: list[Tensor], to: int, tag: int) -> dist.Work:
    """Send; what is sent lives as long as the request for it, as it does with gloo."""
    work = _SEND(group, tensors, to, tag)
    weakref.finalize(work, list, tensors)
    return work


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Shape of a grouped product: torch knows those of bfloat16 alone."""
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim == b.ndim == 2 and offs is not None:
        return a.new_empty((len(offs), rows, columns))
    shape = (rows, columns) if 2 in (a.ndim, b.ndim) else (len(a), rows, columns)
    return a.new_empty(shape)


def _allocates(func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether an operation allocates a tensor off meta and reads no tensor that has values."""
    device = kwargs.get("device")
    is_here = device is not None and torch.device(device).type != "meta"
    return func.namespace == "aten" and is_here and all(x.is_meta for x in tensors)
