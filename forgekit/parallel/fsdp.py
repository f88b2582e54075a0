"""Sharded data parallelism through FSDP2, with sums in place of averages.

FSDP divides gradients by the number of ranks. A step's one factor divides by the number of
targets instead, so the collectives have to sum. ``accumulate`` asks for that again at each step,
for models that were wrapped elsewhere.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from forgekit.model.layers import Block

__all__ = [
    "Precision",
    "Sync",
    "clear_gradients",
    "fsdp_modules",
    "reset_iteration",
    "set_sync",
    "shard",
    "sum_gradients",
]

Precision = Literal["fp32", "bf16"]
Sync = Literal["last", "every", "hsdp_last"]


def shard(
    model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, precision: Precision
) -> None:
    """Wrap each block and then the root in FSDP, in place.

    Args:
        model: The model; on meta or filled with the same values on every rank.
        blocks: The repeated layers; each is gathered when it is used.
        mesh: The whole mesh. Parameters are sharded over ``dp_shard`` and, where
            ``dp_replicate`` is above 1, replicated over it (HSDP).
        precision: What parameters are cast to for compute; masters and reductions are float32.
    """
    data = (
        mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
    )
    for block in blocks:
        fully_shard(block, mesh=data, mp_policy=_block_policy(precision, block))
    fully_shard(model, mesh=data, mp_policy=_root_policy(precision))
    for module in fsdp_modules(model):
        sum_gradients(module)


def sum_gradients(module: FSDPModule) -> None:
    """Make one FSDP module add gradients up over ranks as they are, in place.

    Its children keep what they have: torch's setters do not recurse.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "set_reduce_scatter_unused_params"):  # since torch 2.13
        # Else a parameter that one rank does not use shifts all others in the reduced buffer.
        module.set_reduce_scatter_unused_params(True, recurse=False)


def fsdp_modules(model: nn.Module) -> list[Any]:
    """List a model's FSDP modules, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


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
        module.set_requires_gradient_sync(reduces, recurse=False)
        if sync == "hsdp_last":
            module.set_requires_all_reduce(is_last, recurse=False)
        module.set_is_last_backward(reduces)


def clear_gradients(model: nn.Module, modules: list[Any]) -> None:
    """Forget all gradients in place, those that FSDP holds outside ``.grad`` too."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad = None
    for parameter in (
        p for module in modules for group in _groups(module) for p in group.fsdp_params
    ):
        # While a module is gathered, its sharded parameters are not those of the module.
        parameter.sharded_param.grad = None
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


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


def _groups(module: Any) -> list[Any]:
    fsdp_state = module._get_fsdp_state()
    if hasattr(fsdp_state, "_fsdp_param_groups"):  # since torch 2.13; before, one or none
        return fsdp_state._fsdp_param_groups
    return [group for group in [fsdp_state._fsdp_param_group] if group is not None]


def _block_policy(precision: Precision, block: nn.Module) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    # Inputs of our own blocks are not cast: hidden states arrive in bfloat16 already, and the
    # cosines and sines of rotary embedding must stay in float32 (bfloat16 has 8 bits for an angle).
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=not isinstance(block, Block),
    )


def _root_policy(precision: Precision) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    # The output is cast on the root only; on a block it would break the next block.
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
