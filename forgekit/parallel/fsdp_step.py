"""FSDP in one step: the calls one step makes, in order.

FSDP reduces gradients during a backward and keeps unreduced ones outside ``.grad``. Each function
below the class closes one gap between that and a step whose micro-batches come one at a time; where
torch has no public way, its comment says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from forgekit.checks import check_choice
from forgekit.parallel.fsdp import (
    Sync,
    groups_of,
    release,
    reset_iteration,
    sum_gradients,
    walk,
)

SYNCS = get_args(Sync)


class FsdpStep:
    """Four verbs in the order of a step; they do nothing where nothing is sharded.

    ``begin``, then ``before_forward`` and ``before_backward`` for each micro-batch, then ``end``.
    An exception anywhere in between is followed by ``begin`` again.

    Args:
        roots: A model, or its ``Layout.roots``; read at each step, as users may change a model
            between two steps.
        sync: When gradients are reduced; see ``accumulate``.

    Attributes:
        all_modules: All modules in the roots.
        modules: The FSDP modules among them, each root before its parts.
    """

    def __init__(self, roots: Iterable[nn.Module], sync: Sync = "last") -> None:
        check_choice("sync", sync, SYNCS)
        self.all_modules = walk(roots)
        self.modules: list[Any] = [one for one in self.all_modules if isinstance(one, FSDPModule)]
        self._groups: list[Any] = []
        self._records: list[Any] = []  # FSDP's, of the parameters that it shards
        for module in self.modules:
            for group in groups_of(module):
                self._groups.append(group)
                self._records += group.fsdp_params
        self._sync: Sync = sync
        self._is_set_for: bool | None = None  # the last `is_last` that FSDP was told; None: none

    def begin(self) -> None:
        """Reset FSDP and clear all gradients, in place, whatever ran before."""
        if self.modules:
            reset_iteration(self.modules)
            release(self.modules)
        for module in self.modules:
            sum_gradients(module)
        self._is_set_for = None
        _clear(self.all_modules, self._records)
        for group in self._groups:
            group._partial_reduce_output = None  # `reset_iteration` keeps it

    def before_forward(self, is_last: bool) -> None:
        """Tell FSDP whether the coming backward is a step's last, which reduces all gradients."""
        if self.modules and is_last is not self._is_set_for:
            self._is_set_for = is_last
            _set_sync(self.modules, self._sync, is_last)

    def before_backward(self, number: int, is_last: bool) -> None:
        """Make up for blocks that a forward did not use, which FSDP's backward would stumble over.

        In the step's first micro-batch, gather parameters that were never gathered; in its last
        one, if another, give those without a gradient a zero where the reduction needs it.

        Args:
            number: Number of the micro-batch in its step, from 0.
            is_last: As in ``before_forward``.
        """
        if not self.modules:
            return
        if number == 0:
            if any("_unsharded_param" not in vars(record) for record in self._records):
                _gather_skipped(self.modules)
        elif is_last:
            _add_zeros(self._records)

    def end(self, model: nn.Module, *, is_reduced: bool) -> list[str]:
        """Reduce what no backward has reduced; clear all gradients if some never can be.

        Args:
            model: Model used to look up parameter names.
            is_reduced: Whether the last backward reduced all gradients.

        Returns:
            Names of parameters whose gradients FSDP still holds back.
        """
        if not self.modules:
            return []
        if not is_reduced:
            _add_zeros(self._records, to_all=self._sync == "hsdp_last")
            _set_sync(self.modules, self._sync, is_last=True)
            _reduce_without_backward(self.modules)
        release(self.modules)  # sampling after the last backward leaves some gathered
        if names := self._unreduced(model):
            self.begin()
        return names

    def hooked(self, model: nn.Module) -> list[str]:
        """Name the parameters with a gradient hook: FSDP sets gradients of shards and calls none.

        Args:
            model: Model used to look up parameter names.
        """
        return _names(model, [one for one in self._records if one.sharded_param._backward_hooks])

    @contextmanager
    def watching_shards(self, model: nn.Module) -> Iterator[set[str]]:
        """Name the shards that autograd, not FSDP, gives a gradient within the block.

        That happens to a parameter that is read while it is not gathered, as by ``full_tensor()``
        in a loss. Its gradient is this rank's alone: FSDP reduces only gradients of parameters that
        the model's forward gathered.

        Args:
            model: Model used to look up parameter names.
        """
        added: set[str] = set()
        records = [one for one in self._records if one.sharded_param.requires_grad]
        with ExitStack() as stack:
            for name, record in zip(_names(model, records), records, strict=True):
                hook = record.sharded_param.register_hook(lambda _, name=name: added.add(name))
                stack.enter_context(hook)
            yield added

    def _unreduced(self, model: nn.Module) -> list[str]:
        # FSDP reduces a module's gradients when backward passes through tensors that it found in
        # the module's output: in tensors, dicts, lists, tuples and dataclasses, nothing else.
        left = [
            record
            for record in self._records
            if record.unsharded_accumulated_grad is not None
            or getattr(vars(record).get("_unsharded_param"), "grad", None) is not None
        ]
        # What is summed over shards and not yet over replicas waits here.
        waiting = [group for group in self._groups if group._partial_reduce_output is not None]
        more = [p for group in waiting for p in group.fsdp_params if p not in left]
        return _names(model, left + more)


def clear_gradients(*roots: nn.Module) -> None:
    """Clear a model's gradients in place, including those that FSDP holds outside ``.grad``."""
    FsdpStep(roots).begin()


def _clear(walked: Iterable[nn.Module], records: list[Any]) -> None:
    # `zero_grad` knows `.grad` alone.
    for module in walked:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad = None
    for record in records:
        # While a module is gathered, its sharded parameters are not those of the module.
        record.sharded_param.grad = None
        record.unsharded_accumulated_grad = None
        if hasattr(record, "_unsharded_param"):
            record._unsharded_param.grad = None


def _set_sync(modules: list[Any], sync: Sync, is_last: bool) -> None:
    # The setters' own recursion sets a flag for all parts again at each root.
    reduces = is_last or sync != "last"
    for module in modules:
        # Without it gradients stay whole on each rank and are added up there, in reduce_dtype.
        module.set_requires_gradient_sync(reduces, recurse=False)
        # Shards are summed after each micro-batch, and over the replicas once.
        if sync == "hsdp_last":
            module.set_requires_all_reduce(is_last, recurse=False)
        # On the last one FSDP waits for its reductions and forgets the order of the step.
        module.set_is_last_backward(reduces)


def _gather_skipped(modules: list[Any]) -> None:
    # FSDP widens the gathered gradients of all modules after a backward that reduces nothing, and
    # stumbles over a module that was never gathered: a block that all ranks skip at first.
    for module in modules:
        records = (record for group in groups_of(module) for record in group.fsdp_params)
        fresh = [record for record in records if "_unsharded_param" not in vars(record)]
        # Before the first call of the root nothing is known of the dtypes.
        if any(getattr(record, "reduce_dtype", None) for record in fresh):
            module.unshard()
            module.reshard()


def _add_zeros(records: list[Any], *, to_all: bool = False) -> None:
    # Under mixed precision FSDP holds the gradients of earlier micro-batches in float32 beside new
    # ones in 16 bits, and reduce-scatter refuses to mix the two, on the ranks where a parameter
    # was not used before: those get a zero in the dtype of the reduction. And what was summed over
    # shards FSDP adds up over the replicas only behind another such sum: there all get a zero
    # (since torch 2.13 FSDP makes them itself).
    for record in records:
        gathered = vars(record).get("_unsharded_param")  # None: never used by any rank
        if gathered is None or not gathered.requires_grad:
            continue
        wide = getattr(record, "reduce_dtype", None) or gathered.dtype
        # A parameter that was used may have its sum there already.
        if record.unsharded_accumulated_grad is None and (to_all or wide != gathered.dtype):
            zeros = torch.zeros_like(gathered, dtype=wide, requires_grad=False)
            record.unsharded_accumulated_grad = zeros


def _reduce_without_backward(modules: list[Any]) -> None:
    # No public call reduces what FSDP holds back: it does so at the end of a backward alone. This
    # is what it calls there, and what torch's pipelines call after a schedule for the same reason.
    for module in modules:
        if (state := module._get_fsdp_state())._is_root:
            state._root_post_backward_final_callback()


def _names(model: nn.Module, records: list[Any]) -> list[str]:
    if not records:
        return []
    names = {module: name for name, module in model.named_modules()}
    infos = [(one._module_info.module, one._module_info.param_name) for one in records]
    return [".".join(filter(None, (names.get(module, ""), leaf))) for module, leaf in infos]
