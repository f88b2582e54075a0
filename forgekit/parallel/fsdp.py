"""Sharded data parallelism through FSDP2, with sums in place of averages.

FSDP divides gradients by the number of ranks. A step's one factor divides by the number of
targets instead, so the collectives have to sum. ``accumulate`` asks for that again at each step,
for models that were wrapped elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from forgekit.model.layers import Block

Precision = Literal["fp32", "bf16", "fp16"]
Sync = Literal["last", "every", "hsdp_last"]

COMPUTE = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})
"""What parameters are cast to; masters stay float32."""


def shard(
    roots: list[nn.Module],
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    precision: Precision,
    *,
    inner: Collection[nn.Module] = (),
    reshard_after_forward: bool | int = True,
    cpu_offload: bool = False,
) -> None:
    """Wrap each block and then the roots in FSDP, in place.

    Args:
        roots: The model, or this rank's pipeline stages; on meta or filled with the same values on
            every rank.
        blocks: The repeated layers in the order in which they run; each is gathered when the one
            before it computes.
        mesh: Over which parameters are sharded; of two dimensions, replicated over the first
            (HSDP).
        precision: What parameters are cast to for compute; masters and reductions are float32.
        inner: Roots whose output goes on to another pipeline stage as it is; that of the others
            is cast to float32.
        reshard_after_forward: Whether a block's parameters are freed after forward and gathered
            again for backward; False keeps them (less communication, more memory), a number keeps
            them sharded over groups of so many neighbours.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.

    Raises:
        ValueError: If ``reshard_after_forward`` cannot be arranged on this mesh.
    """
    reshards = reshard_after_forward
    if not isinstance(reshards, bool) and mesh.size() != dist.get_world_size():
        # Each of them would make a mesh of its own, and process groups are made by all together.
        raise ValueError(
            f"reshard_after_forward={reshards} needs all {dist.get_world_size()} ranks on "
            f"dp_replicate, dp_shard and cp, and they have {mesh.size()}. Use True or False beside "
            "tp."
        )
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": _offload_policy(mesh, cpu_offload)}
    for block in blocks:
        policy = _block_policy(precision, block)
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshards, **options)
    for root in roots:
        # The output is cast on the root only; on a block it would break the next block.
        output = None if root in inner else torch.float32
        # FSDP keeps a root's own parameters until backward, which begins with them.
        fully_shard(root, mp_policy=_policy(precision, output_dtype=output), **options)
        modules = fsdp_modules(root)
        for module in modules:
            sum_gradients(module)
        # By itself FSDP gathers whatever the host reaches while the device computes; experts make
        # the host wait for numbers of tokens, and nothing would be on its way by then.
        groups = [[root], *(fsdp_modules(block) for block in blocks if block in modules)]
        for (module, *_), following in itertools.pairwise(groups):
            cast("FSDPModule", module).set_modules_to_forward_prefetch(following)


def shard_experts(
    modules: list[nn.Module],
    view: DeviceMesh,
    precision: Precision,
    *,
    reshard_after_forward: bool | int = True,
    cpu_offload: bool = False,
) -> None:
    """Wrap modules of experts in FSDP over the ranks that hold the same experts, in place.

    They are sharded along their second dimension: the first is taken by the experts.

    Args:
        modules: What ``apply_experts`` returned, before the blocks around them are wrapped.
        view: What ``expert_view`` returned.
        precision: See ``shard``.
        reshard_after_forward: See ``shard``; a number means True, as the blocks' groups of
            neighbours hold different experts.
        cpu_offload: See ``shard``.
    """
    is_replicated = view["dp_replicate"].size() > 1
    mesh = view["dp_replicate", "fsdp_ep"] if is_replicated else view["fsdp_ep"]
    for module in modules:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=_block_policy(precision, module),
            reshard_after_forward=bool(reshard_after_forward),
            offload_policy=_offload_policy(mesh, cpu_offload),
            shard_placement_fn=lambda _: Shard(1),
        )


def sum_gradients(module: FSDPModule) -> None:
    """Make one FSDP module add gradients up over ranks as they are, in place.

    Its children keep what they have: torch's setters do not recurse.
    """
    # No factor but 1 is safe: FSDP divides twice by another on a mesh of size 1. And without the
    # second line gloo gets a reduction that it does not have (PREMUL_SUM).
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "set_reduce_scatter_unused_params"):  # since torch 2.13
        # Else a parameter that one rank does not use shifts all others in the reduced buffer.
        module.set_reduce_scatter_unused_params(True, recurse=False)


class FsdpModules(list[Any]):
    """The FSDP modules of a model, each root before its parts; found once for a step.

    Attributes:
        walked: All modules of the model: those among which they were found.
    """

    def __init__(self, walked: Collection[nn.Module]) -> None:
        super().__init__([module for module in walked if isinstance(module, FSDPModule)])
        self.walked = walked

    @cached_property
    def groups(self) -> list[Any]:
        """FSDP's groups of parameters that are gathered together."""
        return [group for module in self for group in _groups(module)]

    @cached_property
    def records(self) -> list[Any]:
        """FSDP's records of the parameters that it shards."""
        return [record for group in self.groups for record in group.fsdp_params]


def fsdp_modules(*roots: nn.Module) -> FsdpModules:
    """List the FSDP modules in a model, or in its ``Layout.roots``."""
    return FsdpModules(_modules(roots))


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's products: what FSDP casts parameters to, or their own."""
    for module in fsdp_modules(model):
        if (dtype := module._get_fsdp_state()._mp_policy.param_dtype) is not None:
            return dtype
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def set_sync(modules: list[Any], sync: Sync, is_last: bool) -> None:
    """Say whether the coming backward reduces gradients, and over what.

    Args:
        modules: The model's FSDP modules; changed in place.
        sync: See ``accumulate``.
        is_last: Whether it is the last backward of a step.
    """
    reduces = is_last or sync != "last"
    for module in modules:
        sum_gradients(module)
        # Without it gradients stay whole on each rank and are added up there, in reduce_dtype.
        module.set_requires_gradient_sync(reduces, recurse=False)
        # Shards are summed after each micro-batch, and over the replicas once.
        if sync == "hsdp_last":
            module.set_requires_all_reduce(is_last, recurse=False)
        # On the last one FSDP waits for its reductions and forgets the order of the step.
        module.set_is_last_backward(reduces)


def clear_gradients(modules: FsdpModules) -> None:
    """Forget a model's gradients in place, those that FSDP holds outside ``.grad`` too."""
    for module in modules.walked:
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad = None
    for parameter in modules.records:
        # While a module is gathered, its sharded parameters are not those of the module.
        parameter.sharded_param.grad = None
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def first_gradient(modules: FsdpModules) -> Tensor | None:
    """The first gradient that a model holds, in the order of its modules; None without one."""
    for record in modules.records:
        gathered = getattr(vars(record).get("_unsharded_param"), "grad", None)
        for gradient in (record.unsharded_accumulated_grad, gathered, record.sharded_param.grad):
            if gradient is not None:
                return gradient
    plain = (p for module in modules.walked for p in module._parameters.values())
    return next((p.grad for p in plain if p is not None and p.grad is not None), None)


def widen_accumulators(modules: FsdpModules) -> None:
    """Give each parameter that awaits its first gradient a zero in the dtype of the reduction.

    Call it between the forward and the backward of a step's last micro-batch, if it is not the
    first. Under mixed precision FSDP then holds the gradients of earlier micro-batches in float32
    beside new ones in 16 bits, and reduce-scatter refuses to mix the two, on the ranks where a
    parameter was not used before.

    Args:
        modules: The model's FSDP modules; changed in place.
    """
    for parameter in modules.records:
        wide = getattr(parameter, "reduce_dtype", None)  # None too before the root's first call
        gathered = getattr(parameter, "_unsharded_param", None)  # None: never used by any rank
        if wide is None or gathered is None or not gathered.requires_grad:
            continue
        # A parameter that was used has its sum in `unsharded_accumulated_grad` already.
        if gathered.dtype != wide and parameter.unsharded_accumulated_grad is None:
            parameter.unsharded_accumulated_grad = torch.zeros_like(
                gathered, dtype=wide, requires_grad=False
            )


def gather_skipped(modules: FsdpModules) -> None:
    """Gather, once, what no forward has used yet and mixed precision is about to look at.

    Call it between the first forward and backward of a step. FSDP widens the gathered gradients
    of all modules after a backward that reduces nothing, and stumbles over a module that was never
    gathered: a block that all ranks skip in a run's first micro-batches.

    Args:
        modules: The model's FSDP modules; changed in place.
    """
    if all("_unsharded_param" in vars(record) for record in modules.records):
        return
    for module in modules:
        fresh = [p for p in FsdpModules([module]).records if "_unsharded_param" not in vars(p)]
        # Before the first call of the root nothing is known of the dtypes.
        if any(getattr(p, "reduce_dtype", None) for p in fresh):
            module.unshard()
            module.reshard()


def release(modules: list[Any]) -> None:
    """Free gathered parameters, in place.

    A forward without a backward leaves those of a root gathered: with the values of then, even
    if their shards change, and as the parameters that the model names.
    """
    for module in modules:
        module.reshard()


def find_hooked(model: nn.Module, modules: FsdpModules) -> list[str]:
    """Name the sharded parameters that have a gradient hook, which FSDP never calls.

    Args:
        model: The model.
        modules: Its FSDP modules.
    """
    return _names(model, [p for p in modules.records if p.sharded_param._backward_hooks])


@contextmanager
def watching_shards(
    model: nn.Module, modules: FsdpModules, *, is_due: bool = True
) -> Iterator[set[str]]:
    """Name the shards whose gradients autograd adds by itself within the block.

    That happens to a parameter that is read while it is not gathered, as by ``full_tensor()`` in
    a loss. Its gradient is this rank's alone: only FSDP adds them up over the ranks, and it does
    so with what the model's own forward took.

    Args:
        model: The model.
        modules: Its FSDP modules.
        is_due: Whether to do anything.
    """
    added: set[str] = set()
    records = [p for p in modules.records if is_due and p.sharded_param.requires_grad]
    # FSDP, which sets gradients of shards, calls no such hook; autograd does.
    with ExitStack() as stack:
        for name, record in zip(_names(model, records), records, strict=True):
            hook = record.sharded_param.register_hook(lambda _, name=name: added.add(name))
            stack.enter_context(hook)
        yield added


def find_unreduced(model: nn.Module, modules: FsdpModules) -> list[str]:
    """Name the parameters whose gradients FSDP still holds back, after a step's last backward.

    FSDP reduces a module's gradients when backward passes through the tensors that it found in
    the module's output. It finds tensors, dicts, lists, tuples and dataclasses of them, nothing
    else.

    Args:
        model: The model.
        modules: Its FSDP modules.

    Returns:
        Names in the order of the model; empty if every gradient was reduced.
    """
    left = [
        record
        for record in modules.records
        if record.unsharded_accumulated_grad is not None
        or getattr(vars(record).get("_unsharded_param"), "grad", None) is not None
    ]
    # What is summed over shards and not yet over replicas waits here.
    waiting = [group for group in modules.groups if group._partial_reduce_output is not None]
    more = [p for group in waiting for p in group.fsdp_params if p not in left]
    return _names(model, left + more)


def _names(model: nn.Module, records: list[Any]) -> list[str]:
    if not records:
        return []
    names = {module: name for name, module in model.named_modules()}
    infos = [(p._module_info.module, p._module_info.param_name) for p in records]
    return [".".join(filter(None, (names.get(module, ""), leaf))) for module, leaf in infos]


def reset_iteration(modules: list[Any]) -> None:
    """Bring FSDP back to rest after an exception in forward or backward, in place.

    ``FSDPModule.reset_iter_state`` does it since torch 2.13. Before, the trackers are cleared and
    the modules resharded by hand.
    """
    # None before the first forward, when there is nothing to reset yet.
    for root in (module for module in modules if module._get_fsdp_state()._is_root):
        if hasattr(root, "reset_iter_state"):
            root.reset_iter_state()
        else:
            _reset_by_hand(root)


def _reset_by_hand(root: Any) -> None:
    for module in fsdp_modules(root):
        # States idle, nothing half reduced, parameters sharded.
        fsdp_state = module._get_fsdp_state()
        fsdp_state._training_state = type(fsdp_state._training_state).IDLE
        for group in _groups(module):
            group._training_state = type(group._training_state).IDLE
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
        module.reshard()
    context = root._get_fsdp_state()._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def _modules(roots: Sequence[nn.Module]) -> Collection[nn.Module]:
    """Each module once, in the order of ``Module.modules``, without its generators in generators.

    Asked for at each step, as users may change a model between two.
    """
    seen: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = list(reversed(roots))
    while waiting:
        module = waiting.pop()
        if module is not None and module not in seen:
            seen[module] = None
            waiting.extend(reversed(module._modules.values()))
    return seen


def _groups(module: Any) -> list[Any]:
    fsdp_state = module._get_fsdp_state()
    if hasattr(fsdp_state, "_fsdp_param_groups"):  # since torch 2.13; before, one or none
        return fsdp_state._fsdp_param_groups
    return [group for group in [fsdp_state._fsdp_param_group] if group is not None]


def _offload_policy(mesh: DeviceMesh, cpu_offload: bool) -> OffloadPolicy:
    # Pinning needs an accelerator; without one there is nothing to copy either.
    pins = mesh.device_type != "cpu"
    return CPUOffloadPolicy(pin_memory=pins) if cpu_offload else OffloadPolicy()


def _block_policy(precision: Precision, block: nn.Module) -> MixedPrecisionPolicy:
    # Inputs of our own blocks are not cast: hidden states arrive in 16 bits already, and the
    # cosines and sines of rotary embedding must stay in float32 (bfloat16 has 8 bits for an angle).
    return _policy(precision, cast_forward_inputs=not isinstance(block, Block))


def _policy(precision: Precision, **options: Any) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    compute = COMPUTE[precision]
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, **options)
