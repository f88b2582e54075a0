"""Sharded data parallelism through FSDP2, with sums in place of averages.

FSDP divides gradients by the number of ranks. A step's one factor divides by the number of
targets instead, so the collectives have to sum. ``accumulate`` asks for that again at each step,
for models that were wrapped elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import nn
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
    reshard_after_forward: bool = True,
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
            again for backward; False keeps them (less communication, more memory).
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
    """
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": _offload_policy(mesh, cpu_offload)}
    for block in blocks:
        policy = _block_policy(precision, block)
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard_after_forward, **options)
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
    reshard_after_forward: bool = True,
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
            reshard_after_forward=reshard_after_forward,
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


def fsdp_modules(*roots: nn.Module) -> list[Any]:
    """List the FSDP modules in a model, or in its ``Layout.roots``, each root before its parts."""
    return [module for module in walk(roots) if isinstance(module, FSDPModule)]


def compute_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's products: what FSDP casts parameters to, or their own."""
    for module in fsdp_modules(model):
        if (dtype := module._get_fsdp_state()._mp_policy.param_dtype) is not None:
            return dtype
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def release(modules: list[Any]) -> None:
    """Free gathered parameters, in place.

    A forward without a backward leaves those of a root gathered: with the values of then, even
    if their shards change, and as the parameters that the model names.
    """
    for module in modules:
        module.reshard()


def reset_iteration(modules: list[Any]) -> None:
    """Bring FSDP back to rest after an exception in forward or backward, in place.

    Gradients stay: an evaluation that raises between two calls of a step is none of the step's.
    ``FSDPModule.reset_iter_state`` does it since torch 2.13. Before, the trackers are cleared and
    the modules resharded by hand.
    """
    groups = [group for module in modules for group in groups_of(module)]
    # Torch forgets what was summed over shards and not yet over replicas.
    partial_sums = [group._partial_reduce_output for group in groups]
    # None before the first forward, when there is nothing to reset yet.
    for root in (module for module in modules if module._get_fsdp_state()._is_root):
        if hasattr(root, "reset_iter_state"):
            root.reset_iter_state()
        else:
            _reset_by_hand(root)
    for group, partial_sum in zip(groups, partial_sums, strict=True):
        group._partial_reduce_output = partial_sum


def _reset_by_hand(root: Any) -> None:
    for module in fsdp_modules(root):
        # States idle, nothing half reduced, parameters sharded.
        fsdp_state = module._get_fsdp_state()
        fsdp_state._training_state = type(fsdp_state._training_state).IDLE
        for group in groups_of(module):
            group._training_state = type(group._training_state).IDLE
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
        module.reshard()
    context = root._get_fsdp_state()._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def walk(roots: Iterable[nn.Module]) -> Collection[nn.Module]:
    """Each module once, in the order of ``Module.modules``, without its nested generators."""
    seen: dict[nn.Module, None] = {}
    waiting: list[Any] = [*roots][::-1]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in seen:
            seen[module] = None
            waiting.extend(reversed(module._modules.values()))
    return seen


def groups_of(module: Any) -> list[Any]:
    """FSDP's groups of parameters that are gathered together, of one FSDP module."""
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
