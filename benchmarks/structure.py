"""What a piece of code costs, counted where torch dispatches its operations: no clock, no noise.

Counts are the same on every machine, so they hold for a device that is not here: each operation
that is no view and no allocation is a kernel there. On fake tensors nothing is computed, so that
the bytes of a model of 7 B parameters are counted in seconds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["Counted", "Saved", "saving"]

NOTHING = {"aten::detach", "aten::promote_types", "aten::lift_fresh", "aten::_local_scalar_dense"}
"""Operations that launch no kernel, beside views, allocations and the marks of a profiler."""
LOCAL = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
"""Operations of collectives that move nothing."""
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


class Counted(TorchDispatchMode):
    """Counts within a block; ``with Counted() as counted``.

    Attributes:
        kernels: Kernels by name.
        reads: Operations for whose result the host waits, by name.
        collectives: Calls of collectives by name.
        moved: Bytes that a rank hands to collectives.
        allocated: Bytes of all new tensors.
        live: Bytes of those that are alive now.
        peak: The most that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.moved = self.allocated = self.live = self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # what it does with the tensors inside comes by as well
            return NotImplemented
        for tensor in _tensors((args, kwargs)):
            self._known.add(tensor.untyped_storage())
        result = func(*args, **(kwargs or {}))
        self._note(func, args)
        for tensor in _tensors(result):
            self._keep(tensor.untyped_storage())
        return result

    def hold(self, *tensors: Tensor) -> None:
        """Count tensors that were there before as alive."""
        for tensor in tensors:
            self._keep(tensor.untyped_storage())

    def _note(self, func: Any, args: Any) -> None:
        name = func.name().partition(".")[0]
        if func.overloadpacket.__name__ in READS:
            self.reads[name] += 1
        if "c10d" in func.namespace and name not in LOCAL:
            self.collectives[name] += 1
            self.moved += sum(_bytes(tensor) for tensor in _tensors(args))
        is_kernel = not (func.is_view or "empty" in name or name in NOTHING)
        if is_kernel and func.namespace == "aten":
            self.kernels[name.removeprefix("aten::")] += 1

    def _keep(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.allocated += size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size


@attrs.define
class Saved:
    """Bytes that autograd kept for backward: those of each tensor once, parameters left out."""

    bytes: int = 0


@contextmanager
def saving(model: nn.Module) -> Iterator[Saved]:
    """Count what a forward pass inside the block keeps for its backward.

    Args:
        model: Its parameters are there anyway and do not count.
    """
    saved, kept = Saved(), []
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.append(storage)  # or another would get its address
        if storage._cdata not in known:
            known.add(storage._cdata)
            saved.bytes += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_iter(values) if isinstance(value, Tensor))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
