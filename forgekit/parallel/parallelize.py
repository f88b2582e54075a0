"""Turn one model into this rank's part of it.

The order is fixed, because each line needs the one before: recomputation wraps what a block
computes, compilation traces it with the recomputation inside, FSDP gathers parameters around the
compiled block, and only sharded parameters are materialised from meta, so that no rank ever holds
a full copy of a model that was built there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from forgekit.model.initial import init_weights
from forgekit.parallel.fsdp import Precision, shard

__all__ = ["ActivationCheckpoint", "parallelize"]

ActivationCheckpoint = Literal["none", "full", "selective"]
PipelineSchedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"
]
ContextParallel = Literal["ring", "ulysses", "both"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    precision: Precision = "fp32",
    activation_checkpoint: ActivationCheckpoint = "none",
    compile: bool = False,
    pipeline_schedule: PipelineSchedule = "1f1b",
    context_parallel: ContextParallel = "ring",
    blocks: str | None = None,
    seed: int = 0,
) -> nn.Module:
    """Prepare a model for training on a mesh, in place, and return it.

    Parameter names stay the same in every layout. With more than one rank parameters are always
    sharded by FSDP, on a dimension of size 1 if need be.

    Args:
        model: A ``Transformer`` or any module with a list of repeated layers.
        mesh: What ``build_mesh`` returned.
        precision: ``"fp32"``, or ``"bf16"``: compute in bfloat16 with float32 masters, gradients
            and reductions.
        activation_checkpoint: What the backward pass recomputes: ``"none"``, ``"full"`` blocks,
            or ``"selective"``: everything but matrix products and attention.
        compile: Whether each block is compiled.
        pipeline_schedule: Order of work between pipeline stages; without effect on one stage.
        context_parallel: How a sequence is shared; without effect where each rank holds it whole.
        blocks: Name of the list of repeated layers; ``"layers"`` where the model has one.
        seed: Seed of the initial weights of parameters that are on meta.

    Returns:
        The same model, on the mesh's device, without anything left on meta.

    Raises:
        ValueError: If an option is unknown, the mesh has dimensions beyond data parallelism, the
            blocks are not found, a buffer is on meta (only its module knows its values), or a
            parameter on meta is shared by two modules.
    """
    _check_choice("precision", precision, get_args(Precision))
    _check_choice("activation_checkpoint", activation_checkpoint, get_args(ActivationCheckpoint))
    _check_choice("pipeline_schedule", pipeline_schedule, get_args(PipelineSchedule))
    _check_choice("context_parallel", context_parallel, get_args(ContextParallel))
    _check_mesh(mesh)
    layers = _blocks(model, blocks)
    if not layers and (compile or activation_checkpoint != "none"):
        raise ValueError(
            f"{type(model).__name__} has no list 'layers' to compile or recompute; name its list "
            f"of repeated layers with blocks=; {_lists(model)}"
        )
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    _check_buffers(model)
    _check_shared(model)
    if not on_meta:
        model.to(mesh.device_type)
    _copy_from_first_rank(model, mesh)
    for layer in layers:
        _recompute(layer, activation_checkpoint)
        if compile:
            layer.compile()
    if mesh.size() > 1 or precision != "fp32":
        shard(model, layers, mesh, precision)
    if on_meta:
        _materialise(model, mesh.device_type)
        init_weights(model, seed, only=on_meta)
    return model


def _materialise(model: nn.Module, device: str) -> None:
    """Allocate what is on meta and move the rest; ``to_empty`` would empty the rest as well."""
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))


def _blocks(model: nn.Module, name: str | None) -> list[nn.Module]:
    found = model
    for part in (name or "layers").split("."):
        found = getattr(found, part, None)
    if isinstance(found, nn.ModuleList | nn.Sequential):
        return list(dict.fromkeys(found))  # a layer that is used twice is wrapped once
    if name is None:
        return []
    raise ValueError(
        f"blocks={name!r} is no list of layers of {type(model).__name__}; {_lists(model)}"
    )


def _lists(model: nn.Module) -> str:
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return f"its lists are {lists}."


@torch.no_grad()
def _copy_from_first_rank(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every rank start from rank 0's values: FSDP would glue shards of different models."""
    if mesh.size() > 1:
        filled = (t for t in (*model.parameters(), *model.buffers()) if not t.is_meta)
        for tensor in filled:
            # As bytes on the mesh's device: gloo does not know every dtype.
            there = tensor.detach().to(mesh.device_type).contiguous().reshape(-1)
            dist.broadcast(there.view(torch.uint8), src=0)
            tensor.copy_(there.reshape(tensor.shape))


def _recompute(layer: nn.Module, what: ActivationCheckpoint) -> None:
    # Replacing `forward` keeps the parameters' names; a wrapper module would prefix them.
    if what == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_expensive)
    forward: Callable[..., Any] = layer.forward
    layer.forward = partial(checkpoint, forward, **options)


def _keep_expensive(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = getattr(op, "__name__", "").split(".")[0]
    is_expensive = name in {"mm", "addmm", "bmm"} or "scaled_dot_product" in name
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(map(repr, choices))}.")


def _check_mesh(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    others = {n: mesh[n].size() for n in ("pp", "cp", "tp") if n in names and mesh[n].size() > 1}
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks and the world {dist.get_world_size()}; a step adds "
            "up over all of them. Start as many processes as the mesh needs."
        )
    if others or "dp_shard" not in names:
        raise ValueError(
            f"parallelize lays models out over dp_replicate and dp_shard; this mesh has "
            f"{others or names}. Build it with forgekit.build_mesh and leave the others at 1."
        )


def _check_buffers(model: nn.Module) -> None:
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise ValueError(
            f"the buffers {lost} are on meta and only their modules know their values. Build the "
            "model on the CPU, or compute them in forward."
        )


def _check_shared(model: nn.Module) -> None:
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, name)
        if known != name and parameter.is_meta:
            raise ValueError(
                f"{name!r} is the same parameter as {known!r} and on meta; filling it there would "
                "make two of one. Build the model on the CPU."
            )
