"""What a step allocates, sends and computes, counted where torch dispatches its operations.

Real tensors and stand-ins are counted alike, so that a plan can be held against a run. A tensor's
category follows from when it was made and how long it lives:

- *parameters*: those of the model, and its buffers;
- *gradients*: made in a backward pass and alive after it, those that await a reduction too;
- *optimizer*: what else is alive between two steps;
- *activations*: made before a backward pass and alive when it begins;
- *temporary*: all else, such as gathered parameters and what a backward pass computes again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal
from unittest import mock

import attrs
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from forgekit.plan.collectives import Call, collective_of, size_of, tensors_in
from forgekit.plan.operation_flops import flops_of

Category = Literal["parameters", "gradients", "optimizer", "activations", "temporary"]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "temporary",
)
FREE = frozenset(
    {"detach", "lift_fresh", "wait_tensor", "_local_scalar_dense", "_unsafe_view", "device"}
)
"""Operations that launch no kernel, beside views and allocations."""


@attrs.define(eq=False)
class Allocation:
    """One storage: its bytes now, and what it turned out to be.

    Attributes:
        size: Bytes.
        in_backward: Whether a backward pass made it.
        category: None until it is known; what ends without one was temporary.
    """

    size: int
    in_backward: bool
    category: Category | None = None


@attrs.define
class Work:
    """What a step computes.

    Attributes:
        flops: Of matrix products and attention by dtype, without what is computed again.
        repeated: Of what a backward pass computes again, by dtype.
        moved: Bytes that other kernels read and write.
        kernels: How many kernels there are.
    """

    flops: Counter[torch.dtype] = attrs.field(factory=Counter)
    repeated: Counter[torch.dtype] = attrs.field(factory=Counter)
    moved: int = 0
    kernels: int = 0

    def plus(self, other: Work, times: int) -> Work:
        """This and ``times`` another."""
        flops, repeated = Counter(self.flops), Counter(self.repeated)
        for mine, theirs in ((flops, other.flops), (repeated, other.repeated)):
            for dtype, count in theirs.items():
                mine[dtype] += times * count
        moved, kernels = self.moved + times * other.moved, self.kernels + times * other.kernels
        return Work(flops, repeated, moved, kernels)


class StepWatch(TorchDispatchMode):
    """Counts what happens inside; ``with StepWatch() as watch``.

    Attributes:
        calls: Collectives since ``begin``, and how many of each.
        work: Computation since ``begin``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: weakref.WeakKeyDictionary[Any, Allocation] = weakref.WeakKeyDictionary()
        self._alive: dict[int, Allocation] = {}
        self._in_backward = False
        self._patches: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Count from here on; what is alive stays known."""
        self.calls: Counter[Call] = Counter()
        self.work = Work()
        self._events = [(allocation, allocation.size) for allocation in self._alive.values()]

    def __enter__(self) -> StepWatch:
        resize = torch.UntypedStorage.resize_

        def noted(storage: Any, size: int) -> Any:
            resize(storage, size)
            self._note_size(storage)
            return storage

        # FSDP lets gathered parameters go by their storage's size, which no operation shows.
        self._patches.append(mock.patch.object(torch.UntypedStorage, "resize_", noted))
        self._patches[-1].start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.pop().stop()  # one of several: operators enter once more
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        if DTensor in types:  # what it does with the tensors inside comes by as well
            return NotImplemented
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # torch finds out shapes, of which nothing is kept
        self._follow()
        if func.namespace == "forgekit" and (opdef := OPDEFS.get(func._schema.name)) is not None:
            with self:  # what it sends and allocates inside counts
                return opdef._init_fn(*args, **kwargs)
        for tensor in tensors_in(args):
            self._known.setdefault(tensor.untyped_storage(), Allocation(0, self._in_backward))
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        for tensor in tensors_in(result):
            self._keep(tensor.untyped_storage())
        return result

    def label(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Say what tensors are, whatever their lives say."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (allocation := self._known.get(local.untyped_storage())) is not None:
                allocation.category = category

    def end_step(self) -> None:
        """Note that what is alive now is alive between two steps."""
        self._follow()
        self._label_alive("optimizer")

    def memory(self) -> dict[str, int]:
        """Bytes since ``begin``: of each category its own highest, and the ``peak`` of all."""
        now: Counter[str] = Counter()
        highest: Counter[str] = Counter()
        for allocation, change in self._events:
            for name in (allocation.category or "temporary", "peak"):
                now[name] += change
                highest[name] = max(highest[name], now[name])
        return {name: highest[name] for name in (*CATEGORIES, "peak")}

    def _follow(self) -> None:
        """Notice where a backward pass begins and ends."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward != self._in_backward:
            self._label_alive("activations" if in_backward else "gradients")
            self._in_backward = in_backward

    def _label_alive(self, category: Category) -> None:
        is_here = category == "optimizer"
        for allocation in self._alive.values():
            if allocation.category is None and is_here | (
                allocation.in_backward == self._in_backward
            ):
                allocation.category = category

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        call = collective_of(func, args, result)
        name = func.overloadpacket.__name__
        if call is not None:
            self.calls[call] += 1
        elif not (func.is_view or "empty" in name or name in FREE):
            self._note_kernel(func, args, kwargs, result)

    def _note_kernel(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self.work.kernels += 1
        if not (count := flops_of(func, args, kwargs, result)):
            self.work.moved += sum(map(size_of, [*tensors_in(args), *tensors_in(result)]))
            return
        # Only what is computed again builds a graph during a backward pass.
        again = self._in_backward and torch.is_grad_enabled()
        dtype = tensors_in(args)[0].dtype
        (self.work.repeated if again else self.work.flops)[dtype] += count

    def _keep(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        allocation = self._known[storage] = Allocation(storage.nbytes(), self._in_backward)
        self._alive[id(allocation)] = allocation
        self._events.append((allocation, allocation.size))
        weakref.finalize(storage, partial(self._free, allocation))

    def _free(self, allocation: Allocation) -> None:
        self._events.append((allocation, -allocation.size))
        del self._alive[id(allocation)]

    def _note_size(self, storage: torch.UntypedStorage) -> None:
        if (allocation := self._known.get(storage)) is None:
            return
        self._events.append((allocation, storage.nbytes() - allocation.size))
        allocation.size, allocation.category = storage.nbytes(), "temporary"
