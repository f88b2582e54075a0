"""Sharded data parallelism through FSDP2, with sums in place of averages.

FSDP divides gradients by the number of ranks. A step's one factor divides by the number of
targets instead, so the collectives have to sum. ``accumulate`` asks for that again at each step,
for models that were wrapped elsewhere.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from forgekit.model.layers import Block

__all__ = ["Precision", "shard", "sum_gradients"]

Precision = Literal["fp32", "bf16"]


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
    for module in model.modules():
        if isinstance(module, FSDPModule):
            sum_gradients(module)


def sum_gradients(module: FSDPModule) -> None:
    """Make one FSDP module add gradients up over ranks as they are, in place.

    Its children keep what they have: torch's setters do not recurse.
    """
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "set_reduce_scatter_unused_params"):  # since torch 2.13
        # Else a parameter that one rank does not use shifts all others in the reduced buffer.
        module.set_reduce_scatter_unused_params(True)


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
