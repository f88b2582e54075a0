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
from functools import reduce
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from forgekit.checks import check_choice, check_integers
from forgekit.mesh import check_dimensions, expert_ranks, expert_view
from forgekit.model.attention_kernels import AttentionChoice
from forgekit.model.batch_invariant import refuse_batch_invariant
from forgekit.model.key_value_cache import is_batch_invariant
from forgekit.model.layers import Block
from forgekit.model.transformer import make_batch_invariant
from forgekit.parallel.activation_checkpoint import (
    ActivationCheckpoint,
    compile_blocks,
    recompute,
    tile_feed_forward,
)
from forgekit.parallel.agreement import check_alike, exchange
from forgekit.parallel.context.context_parallel import (
    ContextParallel,
    apply_context,
    choose_attention,
)
from forgekit.parallel.expert import apply_experts, find_experts
from forgekit.parallel.fsdp import COMPUTE, Precision, shard, shard_experts
from forgekit.parallel.head import find_head, gather_output, take_head
from forgekit.parallel.layout import arrange, size_of
from forgekit.parallel.materialise import (
    check_buffers,
    copy_from_first_rank,
    materialise,
    move,
)
from forgekit.parallel.pipeline.schedule import PipelineSchedule
from forgekit.parallel.pipeline.stages import Stages
from forgekit.parallel.tensor.plan import Plan, read_plan
from forgekit.parallel.tensor.tensor_parallel import apply_plan
from forgekit.state import DEFAULT_LOSS_SCALE, Layout, check_dense, longest_of, set_layout


@attrs.frozen(kw_only=True)
class Options:
    """The options of ``parallelize``, the same on all ranks."""

    precision: Precision
    activation_checkpoint: ActivationCheckpoint
    memory_budget: float
    mlp_tiles: int
    compile: bool
    pipeline_schedule: PipelineSchedule
    context_parallel: ContextParallel
    attention: AttentionChoice
    plan: Plan | None
    blocks: str | None
    head: str | None
    reshard_after_forward: bool
    cpu_offload: bool
    batch_invariant: bool
    seed: int


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    precision: Precision = "fp32",
    activation_checkpoint: ActivationCheckpoint = "none",
    memory_budget: float = 0.5,
    mlp_tiles: int = 1,
    compile: bool = False,
    pipeline_schedule: PipelineSchedule = "1f1b",
    context_parallel: ContextParallel = "ring",
    attention: AttentionChoice = "auto",
    plan: Plan | None = None,
    blocks: str | None = None,
    head: str | None = None,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
    batch_invariant: bool = False,
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
        mlp_tiles: In how many tiles of positions a block's feed-forward runs, forward and, again,
            backward, so that only one tile's intermediate values exist at a time: for long rows.
            Layers of experts are not divided.
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
        head: Name of the projection to logits of a model that takes no ``head=`` by itself, such
            as ``"lm_head"``; from then on it does: ``model(ids, head=partial(
            forgekit.linear_cross_entropy, labels=labels))`` never holds logits.
        reshard_after_forward: Whether FSDP frees a block's parameters between forward and
            backward. Pipeline stages keep them for the whole step: a backward in two parts needs
            them in both.
        cpu_offload: Whether shards, gradients and optimizer state live in host memory.
        batch_invariant: Whether a token's logits have the same bits whatever is computed beside
            it; see ``Transformer``. One that was built so stays so.
        seed: Seed of the initial weights of parameters that are on meta.

    Returns:
        The same model, on the mesh's device, without anything left on meta.

    Raises:
        ValueError: If ranks differ in model or options, an option is unknown, sizes do not divide
            (heads, features, layers), the device or the dtype has no such attention,
            ``batch_invariant`` cannot hold, the plan does not fit, the blocks or the head are not
            found, a buffer is on meta and its module has no ``reset_buffers()``, a parameter is
            shared by two blocks, or parameters are complex or sparse.
    """
    options = Options(
        precision=precision,
        activation_checkpoint=activation_checkpoint,
        memory_budget=memory_budget,
        mlp_tiles=mlp_tiles,
        compile=compile,
        pipeline_schedule=pipeline_schedule,
        context_parallel=context_parallel,
        attention=attention,
        plan=plan,
        blocks=blocks,
        head=head,
        reshard_after_forward=reshard_after_forward,
        cpu_offload=cpu_offload,
        batch_invariant=batch_invariant,
        seed=seed,
    )
    _lay_out(model, mesh, options)
    return model


def _lay_out(model: nn.Module, mesh: DeviceMesh, options: Options) -> None:
    """Lay a model out in place, in the order that the top of this file explains."""
    # Everything that can be refused is refused here, on all ranks, before process groups are made.
    path, layers = _check(model, mesh, options)
    precision, mode = options.precision, options.activation_checkpoint
    method = options.context_parallel
    kernels = choose_attention(model, mesh, COMPUTE.get(precision), options.attention, method)
    tensor, view = size_of(mesh, "tp"), expert_view(mesh)
    styles = read_plan(model, tensor, options.plan)
    experts = [] if view is None else find_experts(model, options.plan)
    projection = None if options.head is None else find_head(model, options.head)
    modules = dict(model.named_modules())  # all of them: a pipeline takes some out

    data_ranks, tensor_ranks = arrange(mesh)
    # Sockets before anything is wrapped: they are found by their modules' names and attributes.
    context = apply_context(model, mesh, method, kernels=kernels)
    # While parameters are whole: afterwards each rank keeps its part of what it holds.
    copy_from_first_rank(model, mesh)
    # Nothing below spends time or memory on the parts of other stages.
    stages = _split(model, mesh, path, options)
    roots = [model] if stages is None else stages.modules
    has_last = stages is None or stages.has_last
    layers, experts = _present(layers, roots), _present(experts, roots)
    move(model, mesh)
    # From here on a parameter is a DTensor over tp, or over ep.
    unsharded = apply_plan(model, tensor_ranks, styles, modules)
    apply_experts(model, view, experts)
    # Recomputation repeats the collectives of tp, cp and ep; the compiler traces both as one block.
    tile_feed_forward(layers, options.mlp_tiles)
    for layer in layers:
        recompute(layer, mode)
    if options.compile:
        compile_blocks(layers, mode, memory_budget=options.memory_budget)
    if projection is not None:
        take_head(roots, projection)
    if _is_sharded(mesh, options):
        # A backward in two parts finds a stage's weights only while they are gathered.
        reshards = stages is None and options.reshard_after_forward
        kept = {"reshard_after_forward": reshards, "cpu_offload": options.cpu_offload}
        # Inner modules first: an outer one leaves out what is wrapped already.
        if view is not None:
            shard_experts(experts, view, precision, **kept)
        inner = roots[:-1] if has_last else roots
        shard(roots, layers, data_ranks, precision, inner=inner, **kept)
    if tensor_ranks is not None and has_last:
        roots[-1].register_forward_hook(gather_output)
    # Last: what gets memory are shards.
    materialise(model, roots, mesh.device_type, seed=options.seed, cpu_offload=options.cpu_offload)
    layout = Layout(
        **context._asdict(),
        experts=expert_ranks(mesh)[1],
        tensor=tensor,
        sequence=tensor if "sequence" in styles.values() else 1,
        longest=longest_of(model),
        attention=kernels.kernels,
        documents=kernels.documents,
        owns_loss=has_last and (tensor_ranks is None or tensor_ranks.get_local_rank() == 0),
        stages=stages,
        styles=styles,
        unsharded=unsharded,
        loss_scale=1.0 if precision == "fp16" else DEFAULT_LOSS_SCALE,
        dynamic_loss_scale=precision == "fp16",
    )
    set_layout(model, layout)


def _check(model: nn.Module, mesh: DeviceMesh, options: Options) -> tuple[str, list[nn.Module]]:
    """Raise for what cannot be laid out; return the path of the repeated layers, and them."""
    _check_ranks(model, mesh, options)
    path, layers = _find_blocks(model, options.blocks)
    _check_options(model, mesh, layers, options)
    _check_model(model, layers if _is_sharded(mesh, options) else [])
    if options.batch_invariant or is_batch_invariant(model):
        _make_batch_invariant(model, mesh, options)
    return path, layers


def _check_ranks(model: nn.Module, mesh: DeviceMesh, options: Options) -> None:
    """Raise on every rank if the mesh is not the world, or ranks were set up differently."""
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks and the world {dist.get_world_size()}. Start as "
            "many processes as the mesh needs."
        )
    check_dimensions(mesh)
    plan = getattr(model, "plan", None) if options.plan is None else options.plan
    shown = [*plan.items()] if isinstance(plan, Mapping) else ()
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    check_alike(model, {**attrs.asdict(options, recurse=False), "plan": shown, "mesh": sizes})


def _check_options(
    model: nn.Module, mesh: DeviceMesh, layers: list[nn.Module], options: Options
) -> None:
    for name, kind in get_type_hints(Options).items():
        if get_origin(kind) is Literal:
            check_choice(name, getattr(options, name), get_args(kind))
    recomputed, compiled = options.activation_checkpoint, options.compile
    if recomputed == "budget" and not compiled:
        raise ValueError("activation_checkpoint='budget' needs compile=True.")
    check_integers(mlp_tiles=(options.mlp_tiles, 1))
    if options.mlp_tiles > 1 and not any(isinstance(layer, Block) for layer in layers):
        raise ValueError(
            f"mlp_tiles is {options.mlp_tiles}, but {type(model).__name__} has no Transformer "
            "blocks. Recompute whole blocks instead: activation_checkpoint='full'."
        )
    if not layers and (compiled or recomputed != "none" or size_of(mesh, "pp") > 1):
        raise ValueError(
            f"{type(model).__name__} has no list 'layers' to compile, recompute or split into "
            f"pipeline stages; {_lists(model)}"
        )


def _make_batch_invariant(model: Any, mesh: DeviceMesh, options: Options) -> None:
    """Make a model batch-invariant, in place, unless something else is asked for beside it."""
    proved = {"compile": [False], "attention": ["auto"], "precision": ["fp32", "bf16"]}
    given = {name: getattr(options, name) for name in (*proved, "head")}
    given |= {name: size_of(mesh, name) for name in ("tp", "cp", "pp")}
    for name, value in given.items():
        if value not in proved.get(name, [None, 1]):
            refuse_batch_invariant(f"{name} is {value!r}")
    make_batch_invariant(model)


def _check_model(model: nn.Module, layers: list[nn.Module]) -> None:
    check_dense(model)
    check_buffers(model)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name!r} has a gradient hook, which parallelize would lose. Change gradients "
                "after it: parameter.grad between accumulate and reduce_totals."
            )
    # Two blocks with one parameter; a whole block that is used twice is one block.
    owners: dict[nn.Parameter, int] = {}
    for index, block in enumerate(layers):
        for name, parameter in block.named_parameters():
            if (other := owners.setdefault(parameter, index)) != index:
                raise ValueError(
                    f"blocks {other} and {index} share {name!r}, but FSDP would gather it for only "
                    "one. Move the shared module out of the blocks, or reuse a whole block."
                )


def _split(model: nn.Module, mesh: DeviceMesh, blocks: str, options: Options) -> Stages | None:
    """Keep this rank's pipeline stages, in place; None where a rank has the whole model."""
    if size_of(mesh, "pp") == 1:
        return None
    # Each part of a backward in two would recompute, or compile, the block once more.
    splits = options.activation_checkpoint == "none" and not options.compile
    trains = any(parameter.requires_grad for parameter in model.parameters())
    stages = Stages(model, mesh, options.pipeline_schedule, blocks, splits_backward=splits)
    has_trained = any(p.requires_grad for stage in stages.modules for p in stage.parameters())
    frozen = [rank for rank, trained in enumerate(exchange(has_trained)) if not trained]
    if trains and frozen:
        raise ValueError(
            f"the pipeline stages of the ranks {frozen} have nothing to train. Add adapters "
            "(forgekit.add_lora) to blocks of every rank, or use pp=1."
        )
    return stages


def _is_sharded(mesh: DeviceMesh, options: Options) -> bool:
    """Whether FSDP wraps the model: on several ranks always, on a dimension of size 1 if need be.

    Optimizers refuse plain parameters beside DTensors.
    """
    return mesh.size() > 1 or options.precision != "fp32" or options.cpu_offload


def _present(modules: list[nn.Module], roots: list[nn.Module]) -> list[nn.Module]:
    """The modules still on this rank after the pipeline split."""
    present = {module for root in roots for module in root.modules()}
    return [module for module in modules if module in present]


def _find_blocks(model: nn.Module, name: str | None) -> tuple[str, list[nn.Module]]:
    """The list of repeated layers; by default ``layers``, of transformers' models in their body."""
    in_body = f"{getattr(model, 'base_model_prefix', '')}.layers"
    path = name or (in_body if in_body in dict(model.named_modules()) else "layers")
    layers: Any = reduce(lambda module, part: getattr(module, part, None), path.split("."), model)
    if isinstance(layers, nn.ModuleList | nn.Sequential):
        return path, list(dict.fromkeys(layers))  # a layer that is used twice is listed once
    if name is None:
        return path, []
    raise ValueError(
        f"{name!r} is not a ModuleList or Sequential in {type(model).__name__}; {_lists(model)}"
    )


def _lists(model: nn.Module) -> str:
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return f"candidates for blocks=: {lists}."
