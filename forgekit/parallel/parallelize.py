"""Turn one model into this rank's part of it.

The order is fixed, because each line needs the one before. Parts of other stages go first, so that
nothing below spends time on them. Tensor parallelism and experts change what a parameter is.
Recomputation wraps what a block computes, collectives included; compilation traces it with the
recomputation inside; FSDP gathers parameters around the compiled block, inner modules first. Only
sharded parameters are materialised from meta, so that no rank ever holds a full copy of a model
that was built there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from forgekit.inputs import check_choice
from forgekit.mesh import check_dimensions, expert_ranks
from forgekit.model.attention_kernels import AttentionChoice
from forgekit.model.initial import init_weights
from forgekit.parallel.activation_checkpoint import (
    ActivationCheckpoint,
    check_recompute,
    compile_blocks,
    recompute,
)
from forgekit.parallel.agreement import check_alike
from forgekit.parallel.context.context_parallel import (
    ChosenAttention,
    Context,
    ContextParallel,
    apply_context,
    choose_attention,
)
from forgekit.parallel.expert import apply_experts, expert_mesh, find_experts
from forgekit.parallel.fsdp import Precision, shard, shard_experts
from forgekit.parallel.layout import arrange, size_of
from forgekit.parallel.pipeline.schedule import PipelineSchedule
from forgekit.parallel.pipeline.stage_tensors import Absent
from forgekit.parallel.pipeline.stages import Stages, split_stages
from forgekit.parallel.tensor.plan import EXPERT, Plan, Style, read_plan
from forgekit.parallel.tensor.sharded_logits import share_logits
from forgekit.parallel.tensor.tensor_parallel import (
    apply_plan,
    logit_modules,
    share_again,
    shared_parameters,
)
from forgekit.state import DEFAULT_LOSS_SCALE, Layout, check_dense, longest_of, set_layout


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
    attention: AttentionChoice = "auto",
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
        attention: The kernel: ``"flash"``, ``"varlen"``, ``"flex"``, ``"sdpa"``, or ``"auto"``: the
            best that the device has for the dtype and the width of a head. It is written down in
            ``state.layout.attention``.
        plan: How ranks share each matrix, as patterns of module names to styles: see
            ``forgekit.parallel.tensor.tensor_parallel``, and ``"expert"`` for modules of
            ``[e ...]`` parameters. The model's own ``plan`` if None, or what the configuration of a
            model of transformers says.
        blocks: Name of the list of repeated layers; ``"layers"`` where the model has one, or the
            model in a model of transformers.
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
            (heads, features, layers), the device or the dtype has no such attention, the plan does
            not fit, the blocks are not found, a buffer is on meta and its module has no
            ``reset_buffers()``, a parameter is shared by two blocks, or parameters are complex or
            sparse.
    """
    blocks = _their_blocks(model) if blocks is None else blocks
    asked = _Options(
        precision=precision,
        activation_checkpoint=activation_checkpoint,
        memory_budget=memory_budget,
        compile=compile,
        pipeline_schedule=pipeline_schedule,
        context_parallel=context_parallel,
        attention=attention,
        plan=plan,
        blocks=blocks,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        prefetch=prefetch,
        seed=seed,
    )
    # What can be refused is refused here, on all ranks alike, before process groups are made.
    _check_ranks(model, mesh, asked)
    _check_options(model, mesh, asked)
    _check_model(model, mesh, asked)
    chosen = _choose_attention(model, mesh, asked)
    whole = dict(model.named_modules())
    on_meta = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    buffers_on_meta = _with_buffers_on_meta(model)
    styles = read_plan(model, size_of(mesh, "tp"), plan) if size_of(mesh, "tp") > 1 else {}
    ranks = _Ranks(*arrange(mesh), expert_mesh(mesh))
    experts = _find_experts(model, ranks, plan)
    context = apply_context(
        model, mesh, context_parallel, tensor=size_of(mesh, "tp"), chosen=chosen
    )

    _copy_from_first_rank(model, mesh)
    stages = _split(model, mesh, asked)
    roots = [model] if stages is None else stages.modules
    layers = [layer for layer in _blocks(model, blocks) if not isinstance(layer, Absent)]
    if not on_meta and not _is_on_cpu(model, mesh):
        model.to(mesh.device_type)
    unsharded: Mapping[nn.Module, Mapping[str, Any]] = {}
    if ranks.tensor is not None:
        unsharded = apply_plan(model, ranks.tensor, styles, whole)
    if ranks.experts is not None:
        experts = apply_experts(model, ranks.experts, experts)
    for layer in layers:
        recompute(layer, activation_checkpoint)
    if compile:
        compile_blocks(layers, activation_checkpoint, memory_budget=memory_budget)
    layout = _describe(model, mesh, asked, context, styles, stages, chosen)
    layout = attrs.evolve(layout, unsharded=unsharded)
    if _is_wrapped(mesh, asked):
        _shard(roots, layers, experts, ranks, asked, layout)
    if ranks.tensor is not None and layout.has_last:
        roots[-1].register_forward_hook(share_logits)
    if on_meta:
        _fill(model, roots, on_meta, buffers_on_meta, mesh, asked)
    set_layout(model, layout)
    return model


@attrs.frozen(kw_only=True)
class _Options:
    """What ``parallelize`` was asked for; see there."""

    precision: Precision
    activation_checkpoint: ActivationCheckpoint
    memory_budget: float
    compile: bool
    pipeline_schedule: PipelineSchedule
    context_parallel: ContextParallel
    attention: AttentionChoice
    plan: Plan | None
    blocks: str | None
    reshard_after_forward: bool | int
    cpu_offload: bool
    prefetch: int
    seed: int


class _Ranks(NamedTuple):
    """Views of a mesh: over what parameters are sharded.

    Attributes:
        data: By FSDP; of two dimensions, replicated over the first.
        tensor: By tensor parallelism; None for a single rank.
        experts: Experts; see ``expert_mesh``.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None
    experts: DeviceMesh | None


def _check_ranks(model: nn.Module, mesh: DeviceMesh, asked: _Options) -> None:
    """Raise on every rank if the mesh is not the world, or ranks were set up differently."""
    _check_mesh(mesh)
    plan = getattr(model, "plan", None) if asked.plan is None else asked.plan
    items = plan.items() if isinstance(plan, Mapping) else ()
    # A style of torch's by its attributes: its own text has an address.
    shown = [(n, (type(s), vars(s)) if isinstance(s, ParallelStyle) else s) for n, s in items]
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    check_alike(model, attrs.asdict(asked, recurse=False) | {"plan": shown, "mesh": sizes})


def _check_options(model: nn.Module, mesh: DeviceMesh, asked: _Options) -> None:
    what, is_split = asked.activation_checkpoint, size_of(mesh, "pp") > 1
    check_choice("precision", asked.precision, get_args(Precision))
    check_choice("activation_checkpoint", what, get_args(ActivationCheckpoint))
    check_choice("pipeline_schedule", asked.pipeline_schedule, get_args(PipelineSchedule))
    check_choice("context_parallel", asked.context_parallel, get_args(ContextParallel))
    check_choice("attention", asked.attention, get_args(AttentionChoice))
    check_recompute(what, is_compiled=asked.compile, memory_budget=asked.memory_budget)
    if not _blocks(model, asked.blocks) and (asked.compile or what != "none" or is_split):
        raise ValueError(
            f"{type(model).__name__} has no list 'layers' to compile, recompute or split into "
            f"pipeline stages; name its list of repeated layers with blocks=; {_lists(model)}"
        )


def _check_model(model: nn.Module, mesh: DeviceMesh, asked: _Options) -> None:
    check_dense(model)
    _check_hooks(model)
    _check_buffers(model)
    if _is_wrapped(mesh, asked):
        _check_shared_by_blocks(_blocks(model, asked.blocks))


def _is_wrapped(mesh: DeviceMesh, asked: _Options) -> bool:
    return mesh.size() > 1 or asked.precision != "fp32" or asked.cpu_offload


def _choose_attention(model: nn.Module, mesh: DeviceMesh, asked: _Options) -> ChosenAttention:
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(asked.precision, own)
    is_ring = size_of(mesh, "cp") > 1 and asked.context_parallel != "ulysses"
    return choose_attention(model, mesh, dtype, asked.attention, is_ring=is_ring)


def _split(model: nn.Module, mesh: DeviceMesh, asked: _Options) -> Stages | None:
    """Keep this rank's pipeline stages, in place; None where a rank has the whole model."""
    if size_of(mesh, "pp") == 1:
        return None
    # Each part of a backward in two would recompute, or compile, the block once more.
    splits = asked.activation_checkpoint == "none" and not asked.compile
    schedule = asked.pipeline_schedule
    trains = any(parameter.requires_grad for parameter in model.parameters())
    stages = split_stages(model, mesh, schedule, asked.blocks, splits_backward=splits)
    if trains:
        _check_stages_train(stages)
    return stages


def _describe(
    model: nn.Module,
    mesh: DeviceMesh,
    asked: _Options,
    context: Context,
    styles: Mapping[str, Style],
    stages: Stages | None,
    chosen: ChosenAttention,
) -> Layout:
    tensor, is_fp16 = size_of(mesh, "tp"), asked.precision == "fp16"
    has_last = stages is None or stages.has_last
    return Layout(
        ring=context.ring,
        ulysses=context.ulysses,
        context_rank=context.rank,
        sockets=context.sockets,
        experts=expert_ranks(mesh)[1],
        tensor=tensor,
        sequence=tensor if "sequence" in styles.values() else 1,
        longest=longest_of(model),
        attention=chosen.kernels,
        documents=chosen.documents,
        locates=any("locate" in own for own in context.sockets.values()),
        owns_loss=has_last and (tensor == 1 or mesh.get_local_rank("tp") == 0),
        stages=stages,
        styles=styles,
        logits=frozenset(logit_modules(styles)),
        loss_scale=1.0 if is_fp16 else DEFAULT_LOSS_SCALE,
        dynamic_loss_scale=is_fp16,
    )


def _shard(
    roots: list[nn.Module],
    layers: list[nn.Module],
    experts: list[nn.Module],
    ranks: _Ranks,
    asked: _Options,
    layout: Layout,
) -> None:
    """Wrap experts, then blocks, then roots in FSDP, in place: inner modules first."""
    keep: dict[str, Any] = {
        # A backward in two parts finds a stage's weights only while they are gathered.
        "reshard_after_forward": asked.reshard_after_forward if layout.stages is None else False,
        "cpu_offload": asked.cpu_offload,
    }
    idle: list[nn.Parameter] = []
    if ranks.experts is not None:
        idle = shard_experts(experts, ranks.experts, asked.precision, **keep)
    inner = roots[:-1] if layout.has_last else roots
    keep |= {"inner": inner, "ignored": idle, "prefetch": asked.prefetch}
    shard(roots, layers, ranks.data, asked.precision, **keep)


def _fill(
    model: nn.Module,
    roots: list[nn.Module],
    on_meta: set[str],
    buffers_on_meta: list[nn.Module],
    mesh: DeviceMesh,
    asked: _Options,
) -> None:
    """Give what was on meta memory, and initial values, in place."""
    for root in roots:
        device = mesh.device_type
        _materialise(root, device, "cpu" if asked.cpu_offload else device)
    init_weights(model, asked.seed, only=on_meta & {name for name, _ in model.named_parameters()})
    for module in buffers_on_meta:
        _reset_buffers(module)


def _find_experts(model: nn.Module, ranks: _Ranks, plan: Plan | None) -> list[nn.Module]:
    return [] if ranks.experts is None else find_experts(model, _expert_patterns(model, plan))


def _expert_patterns(model: nn.Module, plan: Plan | None) -> list[str]:
    styles = getattr(model, "plan", None) if plan is None else plan
    patterns = [name for name, style in (styles or {}).items() if style == EXPERT]
    if not patterns:
        raise ValueError(
            f"ep is above 1 and no plan names the experts of {type(model).__name__}; pass for "
            f"example plan={{'layers.*.experts': '{EXPERT}'}}, or set ep to 1."
        )
    return patterns


def _is_on_cpu(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Whether a model is where it stays: torch cannot move parameters without values to there."""
    tensors = (*model.parameters(), *model.buffers())
    return mesh.device_type == "cpu" and all(tensor.device.type == "cpu" for tensor in tensors)


def _materialise(model: nn.Module, device: str, home: str) -> None:
    """Allocate what is on meta at ``home`` and move the rest, which ``to_empty`` would empty."""
    shared = shared_parameters(model)
    model._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t.to(device))
    for names in shared:  # which became one for each of its names
        share_again(model, names)


def _their_blocks(model: nn.Module) -> str | None:
    """The list of layers in the body of a model of transformers; None for any other model."""
    name = f"{getattr(model, 'base_model_prefix', None) or '.'}.layers"
    return name if any(own == name for own, _ in model.named_modules()) else None


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


def _check_mesh(mesh: DeviceMesh) -> None:
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks and the world {dist.get_world_size()}; a step adds "
            "up over all of them. Start as many processes as the mesh needs."
        )
    check_dimensions(mesh)


def _check_buffers(model: nn.Module) -> None:
    lost = [
        f"{name}.{leaf}".lstrip(".")
        for name, module in model.named_modules()
        for leaf, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta and not hasattr(module, "reset_buffers") and not _is_rotary(module)
    ]
    if lost:
        raise ValueError(
            f"the buffers {lost} are on meta and only their modules know their values. Build the "
            "model on the CPU, compute them in forward, or give their modules reset_buffers()."
        )


def _is_rotary(module: nn.Module) -> bool:
    """Whether it is a rotary embedding of transformers, whose buffers follow from its config."""
    return hasattr(module, "inv_freq") and hasattr(module, "config") and not [*module.children()]


def _reset_buffers(module: nn.Module) -> None:
    if hasattr(module, "reset_buffers"):
        module.reset_buffers()  # pyright: ignore[reportCallIssue]
        return
    twin = type(module)(module.config)  # pyright: ignore[reportArgumentType]
    for name, buffer in twin.named_buffers():
        module.get_buffer(name).copy_(buffer)


def _with_buffers_on_meta(model: nn.Module) -> list[nn.Module]:
    own = {m: m.named_buffers(recurse=False) for m in model.modules()}
    return [m for m, buffers in own.items() if any(buffer.is_meta for _, buffer in buffers)]


def _check_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name!r} has a gradient hook, and parallelize replaces the parameter by one "
                "without it. Change gradients after it: parameter.grad between accumulate "
                "and reduce_totals."
            )


def _check_stages_train(stages: Stages) -> None:
    """Raise on every rank if one of them has nothing to train, and so no gradients to pass on."""
    held = [p.requires_grad for stage in stages.modules for p in stage.parameters()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, not any(held))
    if any(everyone):
        raise ValueError(
            f"the pipeline stages of the ranks {[r for r, one in enumerate(everyone) if one]} have "
            "nothing to train: all of their parameters are frozen. Add adapters to blocks of every "
            "rank (forgekit.add_lora), or use pp=1."
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
