"""Counts of a step's allocations, collectives and FLOPs, by torch's dispatch.

Real tensors and stand-ins are counted alike, so that a plan can be held against a run. A tensor's
category follows from when it was made and how long it lives:

- *parameters*: those of the model, and its buffers;
- *gradients*: made in a backward pass and alive after it, those that await a reduction too;
- *optimizer*: what else is alive between two steps;
- *activations*: made before a backward pass and alive when it begins;
- *temporary*: all else, such as gathered parameters and what a backward pass computes again.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args
from unittest import mock

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from forgekit.mesh import expert_view

aten = torch.ops.aten
Category = Literal["parameters", "gradients", "optimizer", "activations", "temporary"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
FREE = frozenset(
    {"detach", "lift_fresh", "wait_tensor", "_local_scalar_dense", "_unsafe_view", "device"}
)
"""Operations without a kernel, besides views and allocations."""
NAMESPACES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "recv", "send")
"""Kinds of collectives; an operation has the first that its name contains, without underscores."""

_ATTENTION = MappingProxyType(
    {
        aten._scaled_dot_product_flash_attention_for_cpu: (2, 0, 4),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (4, 1, 7),
    }
)
"""Of attention operators: number of matmuls, index of queries, and index of ``is_causal``.

A backward has five: one is the forward's again and, like other recomputation, not a model's FLOPs.
"""
_IN_PLACE = MappingProxyType({aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm})
"""Matmuls that torch's FLOP registry has under another name."""


class Call(NamedTuple):
    """One collective.

    Attributes:
        op: Its kind.
        ranks: The global ranks that take part.
        size: Bytes of the whole gathered, scattered or sent tensor on this rank.
    """

    op: str
    ranks: tuple[int, ...]
    size: int


@attrs.define(eq=False)
class Allocation:
    """An allocated storage.

    Attributes:
        size: Bytes now.
        in_backward: Whether a backward pass made it.
        category: None until it is clear; what ends without one was temporary.
    """

    size: int
    in_backward: bool
    category: Category | None = None


@attrs.define
class Work:
    """A step's computation and communication.

    Attributes:
        calls: Collectives, and how many of each.
        flops: Of matrix products and attention by dtype, without what is computed again.
        repeated: Of what a backward pass computes again, by dtype.
        kernels: Their ``"count"``, and ``"bytes"`` that those without FLOPs read and write.
    """

    calls: Counter[Call] = attrs.field(factory=Counter)
    flops: Counter[torch.dtype] = attrs.field(factory=Counter)
    repeated: Counter[torch.dtype] = attrs.field(factory=Counter)
    kernels: Counter[str] = attrs.field(factory=Counter)

    def plus(self, other: Work, times: int) -> Work:
        """Return this and ``times`` another."""
        mine, others = (attrs.astuple(work, recurse=False) for work in (self, other))
        return Work(
            *(
                Counter({key: a[key] + times * b[key] for key in a | b})
                for a, b in zip(mine, others, strict=True)
            )
        )


class StepWatch(TorchDispatchMode):
    """Counts the operations of its block; ``with StepWatch() as watch``.

    Attributes:
        work: What was computed and sent since ``begin``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._allocations = weakref.WeakKeyDictionary[Any, Allocation]()
        self._alive: dict[int, Allocation] = {}
        self._in_backward = False
        self._patches: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Start counting; live allocations keep their category."""
        self.work = Work()
        self._events = [(allocation, allocation.size) for allocation in self._alive.values()]

    def __enter__(self) -> StepWatch:
        resize = torch.UntypedStorage.resize_

        def noted(storage: Any, size: int) -> Any:
            resize(storage, size)
            self._note_size(storage)
            return storage

        # FSDP frees gathered parameters by resizing storages, which is not an operation.
        self._patches.append(mock.patch.object(torch.UntypedStorage, "resize_", noted))
        self._patches[-1].start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patches.pop().stop()  # nested: operators enter again
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run and record an operation."""
        if DTensor in types:  # operations on its local tensors are dispatched too
            return NotImplemented
        kwargs = kwargs or {}
        if is_inferring_shapes():
            return func(*args, **kwargs)
        self._follow()
        if func.namespace == "forgekit" and (opdef := OPDEFS.get(func._schema.name)) is not None:
            with self:  # its inner collectives and allocations count
                return opdef._init_fn(*args, **kwargs)
        for tensor in tensors_in(args):
            self._allocations.setdefault(tensor.untyped_storage(), Allocation(0, self._in_backward))
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        for tensor in tensors_in(result):
            self._keep(tensor.untyped_storage())
        return result

    def label(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Set the category of tensors, whatever their lifetime suggests."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (allocation := self._allocations.get(local.untyped_storage())) is not None:
                allocation.category = category

    def end_step(self) -> None:
        """Mark live allocations as alive between two steps."""
        self._follow()
        self._label_alive("optimizer", {False, True})

    def memory(self) -> dict[str, int]:
        """Return bytes since ``begin``: each category's maximum, and the ``peak`` of their sum."""
        now: Counter[str] = Counter()
        highest: Counter[str] = Counter()
        for allocation, change in self._events:
            for name in (allocation.category or "temporary", "peak"):
                now[name] += change
                highest[name] = max(highest[name], now[name])
        return {name: highest[name] for name in (*CATEGORIES, "peak")}

    def _follow(self) -> None:
        """Detect where backward passes begin and end, and label earlier allocations."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward != self._in_backward:
            self._label_alive("activations" if in_backward else "gradients", {self._in_backward})
            self._in_backward = in_backward

    def _label_alive(self, category: Category, in_backward: set[bool]) -> None:
        for allocation in self._alive.values():
            if allocation.category is None and allocation.in_backward in in_backward:
                allocation.category = category

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        if (call := collective_of(func, args, result)) is not None:
            self.work.calls[call] += 1
        elif not (func.is_view or "empty" in name or name in FREE):
            self.work.kernels["count"] += 1
            if count := flops_of(func, args, kwargs, result):
                # Only recomputation builds a graph during a backward pass.
                again = self._in_backward and torch.is_grad_enabled()
                flops = self.work.repeated if again else self.work.flops
                flops[tensors_in(args)[0].dtype] += count
            else:
                sizes = map(size_of, [*tensors_in(args), *tensors_in(result)])
                self.work.kernels["bytes"] += sum(sizes)

    def _keep(self, storage: torch.UntypedStorage) -> None:
        if storage in self._allocations:
            return
        allocation = self._allocations[storage] = Allocation(storage.nbytes(), self._in_backward)
        self._alive[id(allocation)] = allocation
        self._events.append((allocation, allocation.size))
        weakref.finalize(storage, partial(self._free, allocation))

    def _free(self, allocation: Allocation) -> None:
        self._events.append((allocation, -allocation.size))
        del self._alive[id(allocation)]

    def _note_size(self, storage: torch.UntypedStorage) -> None:
        if (allocation := self._allocations.get(storage)) is None:
            return
        self._events.append((allocation, storage.nbytes() - allocation.size))
        allocation.size, allocation.category = storage.nbytes(), "temporary"


def is_inferring_shapes() -> bool:
    """Whether torch runs operations on its own fake tensors, which are discarded."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def collective_of(func: Any, args: Any, result: Any) -> Call | None:
    """Return an operation's collective, or None."""
    if func.namespace not in NAMESPACES:
        return None
    name = func.name().partition("::")[2].replace("_", "")
    kind = next((kind for kind in KINDS if kind.replace("_", "") in name), None)
    if kind is None:
        return None
    sizes = [sum(map(size_of, tensors_in(value))) for value in (*args, result)]
    return Call(kind, tuple(dist.get_process_group_ranks(group_of(func, args))), max(sizes))


def group_of(func: Any, args: Any) -> dist.ProcessGroup:
    """Return the group of a collective, given as an object or by name."""
    for value, argument in zip(args, func._schema.arguments, strict=False):
        if "ProcessGroup" in str(argument.type):
            return dist.ProcessGroup.unbox(value)
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value)
    raise ValueError(f"{func} does not name a process group.")


def dimension_of(call: Call, mesh: DeviceMesh) -> str:
    """Return the mesh dimensions along which a collective's ranks differ, joined by ``+``."""
    names = mesh.mesh_dim_names or ()
    groups = {name: mesh.get_group(name) for name in names}
    if (view := expert_view(mesh)) is not None:
        groups |= {name: view.get_group(name) for name in ("fsdp_ep", "ep")}
    # Tokens travel along ep, even if its ranks are also all of another dimension.
    first = ("cp", "ep") if call.op == "all_to_all" else ()
    for name in (*first, *groups):
        if name in groups and tuple(dist.get_process_group_ranks(groups[name])) == call.ranks:
            return name
    positions = np.isin(mesh.mesh.numpy(), call.ranks).nonzero()  # without torch, which is watched
    named = zip(names, positions, strict=True)
    return "+".join(name for name, position in named if np.ptp(position)) or "none"


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in an operation's arguments or outputs; lists are the only containers."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in tensors_in(one)]
    return []


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of an operation; 0 unless it is a matmul or attention.

    Attention that is causal counts half. Torch's own registry lacks the attention of the CPU and
    grouped products.
    """
    packet = func.overloadpacket
    if packet in _ATTENTION:
        products, first, causal = _ATTENTION[packet]
        q, k = args[first], args[first + 1]
        is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
        full = 2 * products * math.prod(q.shape) * k.shape[2]
        return full // 2 if is_causal else full
    if packet is aten._grouped_mm:
        a, b = args[:2]
        if a.ndim == b.ndim == 2:  # a weight gradient: groups divide the columns
            return 2 * a.shape[0] * a.shape[1] * b.shape[1]
        return 2 * math.prod(a.shape) * b.shape[-1]
    formula = flop_registry.get(_IN_PLACE.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
