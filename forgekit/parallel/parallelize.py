"""Turn one model into this rank's part of it.

The order is fixed, because each line needs the one before. Parts of other stages go first, so that
nothing below spends time on them. Tensor parallelism and experts change what a parameter is.
Recomputation wraps what a block computes, collectives included; compilation traces it with the
recomputation inside; FSDP gathers parameters around the compiled block, inner modules first. Only
sharded parameters are materialised from meta, so that no rank ever holds a full copy of a model
that was built there.
"""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forgekit.mesh import check_dimensions
from forgekit.model.initial import init_weights
from forgekit.parallel.activation_checkpoint import (
    ActivationCheckpoint,
    check_recompute,
    compile_block,
    recompute,
)
from forgekit.parallel.context.context_parallel import ContextParallel, apply_context
from forgekit.parallel.expert import apply_experts, expert_mesh, find_experts
from forgekit.parallel.fsdp import Precision, shard, shard_experts
from forgekit.parallel.layout import arrange, size_of
from forgekit.parallel.pipeline.schedule import PipelineSchedule
from forgekit.parallel.pipeline.stage_tensors import Absent
from forgekit.parallel.pipeline.stages import split_stages
from forgekit.parallel.rank_agreement import check_alike
from forgekit.parallel.tensor.sharded_logits import share_logits
from forgekit.parallel.tensor.tensor_parallel import (
    EXPERT,
    Plan,
    apply_plan,
    logit_modules,
    read_plan,
)
from forgekit.state import DEFAULT_LOSS_SCALE, Layout, check_dense, set_layout

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    precision: Precision = "fp32",
    activation_checkpoint: ActivationCheckpoint = "none",
    memory_budget: float = 0.5,
    compile: bool = False,
    pipeline_schedule: PipelineSchedule = "1f1b",
    context_parallel: ContextParallel = "ring",
    plan: Plan | None = None,
    blocks: str | None = None,
    reshard_after_forward: bool | int = True,
    cpu_offload: bool = False,
    prefetch: int = 1,
    seed: int = 0,
) -> nn.Module:
    """Prepare a model for training on a mesh, in place, and return it.

    Parameter names stay the same in every layout. With more than one rank parameters are always
    sharded by FSDP, on a dimension of size 1 if need be. On a pipeline's rank the model keeps what
    its stages need, and only a step or an evaluation can run it.

    Args:
        model: A ``Transformer`` or any module with a list of repeated layers.
        mesh: What ``build_mesh`` returned.
        precision: ``"fp32"``; ``"bf16"`` or ``"fp16"``: compute in 16 bits with float32 masters,
            gradients and reductions, in float16 with a loss scale that follows overflows.
        activation_checkpoint: What the backward pass recomputes: ``"none"``, ``"full"`` blocks,
            ``"selective"``: everything but matrix products and attention, or ``"budget"``: what
            the compiler finds cheapest until ``memory_budget`` is kept.
        memory_budget: Share of a compiled block's activations that ``"budget"`` keeps, 0 to 1.
        compile: Whether each block is compiled.
        pipeline_schedule: Order of work between pipeline stages; without effect on one rank.
        context_parallel: How ranks share a sequence: ``"ring"``, ``"ulysses"`` or ``"both"``;
            without effect where each rank holds it whole.
        plan: How ranks share each matrix, as patterns of module names to styles: see
            ``forgekit.parallel.tensor.tensor_parallel``, and ``"expert"`` for modules of
            ``[e ...]`` parameters. The model's own ``plan`` if None.
        blocks: Name of the list of repeated layers; ``"layers"`` where the model has one.
        reshard_after_forward: Whether FSDP lets a block's parameters go between forward and
            backward; a number keeps them within groups of so many neighbours. Pipeline stages
            keep them for the whole step: a backward in two parts needs them in both.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        prefetch: How many blocks ahead parameters are gathered.
        seed: Seed of the initial weights of parameters that are on meta.

    Returns:
        The same model, on the mesh's device, without anything left on meta.

    Raises:
        ValueError: If ranks differ in model or options, an option is unknown, sizes do not divide
            (heads, features, layers), the plan does not fit, the blocks are not found, a buffer is
            on meta (only its module knows its values), a parameter on meta is shared by two
            modules or one is shared by two blocks, or parameters are complex or sparse.
    """
    _check_mesh(mesh)
    check_alike(
        model,
        {
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            "precision": precision,
            "activation_checkpoint": activation_checkpoint,
            "memory_budget": memory_budget,
            "compile": compile,
            "pipeline_schedule": pipeline_schedule,
            "context_parallel": context_parallel,
            "plan": None if plan is None else sorted(plan),
            "blocks": blocks,
            "reshard_after_forward": reshard_after_forward,
            "cpu_offload": cpu_offload,
            "prefetch": prefetch,
            "seed": seed,
        },
    )
    _check_choice("precision", precision, get_args(Precision))
    _check_choice("activation_checkpoint", activation_checkpoint, get_args(ActivationCheckpoint))
    _check_choice("pipeline_schedule", pipeline_schedule, get_args(PipelineSchedule))
    _check_choice("context_parallel", context_parallel, get_args(ContextParallel))
    check_recompute(activation_checkpoint, is_compiled=compile, memory_budget=memory_budget)
    layers = _blocks(model, blocks)
    if not layers and (compile or activation_checkpoint != "none"):
        raise ValueError(
            f"{type(model).__name__} has no list 'layers' to compile or recompute; name its list "
            f"of repeated layers with blocks=; {_lists(model)}"
        )
    check_dense(model)
    _check_hooks(model)
    _check_buffers(model)
    _check_shared(model)
    is_wrapped = mesh.size() > 1 or precision != "fp32" or cpu_offload
    if is_wrapped:
        _check_shared_by_blocks(layers)
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    # Arranging makes process groups, so what can be refused is, before and on all ranks alike.
    styles = read_plan(model, size_of(mesh, "tp"), plan) if size_of(mesh, "tp") > 1 else {}
    data, tensor = arrange(mesh)
    locates = any(hasattr(module, "locate") for module in model.modules())
    view = expert_mesh(mesh)
    experts = [] if view is None else find_experts(model, _expert_patterns(model, plan))
    ring, ulysses, place = apply_context(model, mesh, context_parallel, tensor=size_of(mesh, "tp"))
    _copy_from_first_rank(model, mesh)

    stages = None
    if size_of(mesh, "pp") > 1:
        # Each part of a backward in two would recompute, or compile, the block once more.
        splits = activation_checkpoint == "none" and not compile
        stages = split_stages(model, mesh, pipeline_schedule, blocks, splits_backward=splits)
        layers = [layer for layer in _blocks(model, blocks) if not isinstance(layer, Absent)]
    roots = [model] if stages is None else stages.modules
    is_last = stages is None or stages.has_last
    if not on_meta:
        model.to(mesh.device_type)
    sequence = 1 if tensor is None else apply_plan(model, tensor, plan)
    spread = [] if view is None else apply_experts(model, view, experts)
    for layer in layers:
        recompute(layer, activation_checkpoint)
        if compile:
            compile_block(layer, activation_checkpoint, memory_budget=memory_budget)
    if is_wrapped:
        keep: dict[str, Any] = {
            # A backward in two parts finds a stage's weights only while they are gathered.
            "reshard_after_forward": reshard_after_forward if stages is None else False,
            "cpu_offload": cpu_offload,
        }
        if view is not None:
            shard_experts(spread, view, precision, **keep)
        inner = roots[:-1] if is_last else roots
        shard(roots, layers, data, precision, inner=inner, prefetch=prefetch, **keep)
    if tensor is not None and is_last:
        roots[-1].register_forward_hook(share_logits)
    if on_meta:
        for root in roots:
            _materialise(root, mesh.device_type, "cpu" if cpu_offload else mesh.device_type)
        init_weights(model, seed, only=on_meta & {name for name, _ in model.named_parameters()})
    layout = Layout(
        ring=ring,
        ulysses=ulysses,
        context_rank=place,
        tensor=size_of(mesh, "tp"),
        sequence=sequence,
        longest=getattr(getattr(model, "spec", None), "max_seq_len", None),
        locates=locates,
        owns_loss=is_last and (tensor is None or tensor.get_local_rank() == 0),
        stages=stages,
        loss_scale=1.0 if precision == "fp16" else DEFAULT_LOSS_SCALE,
        styles=styles,
        logits=frozenset(logit_modules(styles)),
        dynamic_loss_scale=precision == "fp16",
    )
    set_layout(model, layout)
    return model


def _expert_patterns(model: nn.Module, plan: Plan | None) -> list[str]:
    styles = getattr(model, "plan", None) if plan is None else plan
    patterns = [name for name, style in (styles or {}).items() if style == EXPERT]
    if not patterns:
        raise ValueError(
            f"ep is above 1 and no plan names the experts of {type(model).__name__}; pass for "
            f"example plan={{'layers.*.experts': '{EXPERT}'}}, or set ep to 1."
        )
    return patterns


def _materialise(model: nn.Module, device: str, home: str) -> None:
    """Allocate what is on meta at ``home`` and move the rest, which ``to_empty`` would empty."""
    model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(device))


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


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it is one of {', '.join(map(repr, choices))}.")


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks and the world {dist.get_world_size()}; a step adds "
            "up over all of them. Start as many processes as the mesh needs."
        )
    check_dimensions(mesh)


def _check_buffers(model: nn.Module) -> None:
    lost = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if lost:
        raise ValueError(
            f"the buffers {lost} are on meta and only their modules know their values. Build the "
            "model on the CPU, or compute them in forward."
        )


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name!r} has a gradient hook, and parallelize puts another parameter, without "
                "it, in its place. Change gradients after it: parameter.grad between accumulate "
                "and reduce_totals."
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


def _check_shared_by_blocks(blocks: list[nn.Module]) -> None:
    """Raise if two blocks hold one parameter: FSDP would gather it for the first of them only."""
    owners: dict[nn.Parameter, tuple[int, str]] = {}
    for index, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            other, known = owners.setdefault(parameter, (index, name))
            if other != index:
                raise ValueError(
                    f"blocks {other} and {index} share one parameter ({known!r} and {name!r}); "
                    "FSDP shards each block by itself, so a parameter can be in one of them only. "
                    "Call the shared module in the model's forward, between the blocks, or use "
                    "the same whole block twice."
                )
