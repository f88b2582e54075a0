"""Values for a model's parameters, from meta or from rank 0, on every rank's device.

Only what is left of a model after it was sharded gets memory here, so that no rank ever holds a
full copy of a model that was built on meta.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forgekit.model.initial import init_weights
from forgekit.parallel.tensor.tensor_parallel import share_again, shared_parameters


def check_buffers(model: nn.Module) -> None:
    """Raise for buffers on meta that their modules cannot compute.

    Raises:
        ValueError: With their names.
    """
    lost = [
        f"{name}.{leaf}".lstrip(".")
        for name, module in model.named_modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta and not hasattr(module, "reset_buffers") and not _is_known(module)
    ]
    if lost:
        raise ValueError(
            f"the buffers {lost} are on meta and only their modules know their values. Build the "
            "model on the CPU, compute them in forward, or give their modules reset_buffers()."
        )


@torch.no_grad()
def copy_from_first_rank(model: nn.Module, mesh: DeviceMesh) -> None:
    """Broadcast rank 0's values: FSDP would join shards of different models."""
    if mesh.size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                # As bytes on the mesh's device: gloo lacks some dtypes.
                there = tensor.detach().to(mesh.device_type).contiguous().reshape(-1)
                dist.broadcast(there.view(torch.uint8), src=0)
                tensor.copy_(there.reshape(tensor.shape))


def move(model: nn.Module, mesh: DeviceMesh) -> None:
    """Move a model to the mesh's device, in place, unless it is on meta."""
    tensors = (*model.parameters(), *model.buffers())
    # Not if it is there already: torch cannot move fake parameters to a CPU.
    if any(parameter.is_meta for parameter in model.parameters()) or (
        mesh.device_type == "cpu" and all(tensor.device.type == "cpu" for tensor in tensors)
    ):
        return
    model.to(mesh.device_type)


def materialise(
    model: nn.Module, roots: list[nn.Module], device: str, *, seed: int, cpu_offload: bool
) -> None:
    """Allocate and initialise parameters and buffers on meta, in place.

    Args:
        model: The model, sharded.
        roots: What FSDP has wrapped of it: the model or this rank's pipeline stages.
        device: Where it computes.
        seed: Of the initial weights.
        cpu_offload: Whether parameters live in host memory.
    """
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    if not on_meta:
        return
    without_values = [
        m for m in model.modules() if any(b.is_meta for b in m.buffers(recurse=False))
    ]
    home = "cpu" if cpu_offload else device
    for root in roots:
        # `_apply` replaces each parameter by its name, so that one of two names becomes two.
        shared = shared_parameters(root)
        # Tensors that are not on meta are moved; ``to_empty`` would clear them.
        root._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(device))
        for names in shared:  # one per name by now
            share_again(root, names)
    # Each from (seed, name), drawn whole, then sharded: torch draws the same numbers for every
    # shard of a DTensor on a CPU.
    init_weights(model, seed, only=on_meta)
    for module in without_values:
        _reset_buffers(module)


SCALE = "scalar_embed_scale"
"""Attribute with the factor of transformers' scaled embeddings."""


def _is_known(module: nn.Module) -> bool:
    """Whether a module is a rotary or scaled embedding of transformers.

    Buffers of the first follow from its config, one set or one for each kind of layer.
    """
    names = [name for name, _ in module.named_buffers()]
    is_rotary = hasattr(module, "config") and all(name.endswith("inv_freq") for name in names)
    return hasattr(module, SCALE) or (is_rotary and not [*module.children(), *module.parameters()])


def _reset_buffers(module: nn.Module) -> None:
    if hasattr(module, "reset_buffers"):
        module.reset_buffers()  # pyright: ignore[reportCallIssue]
        return
    if hasattr(module, SCALE):
        module.get_buffer("embed_scale").fill_(getattr(module, SCALE))
        return
    twin = type(module)(module.config)  # pyright: ignore[reportArgumentType]
    for name, buffer in twin.named_buffers():
        module.get_buffer(name).copy_(buffer)
