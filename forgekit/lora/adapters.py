"""LoRA adapters in any layout: added before ``parallelize``, merged and unmerged after it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import permutations
from typing import Literal, TypeVar, get_args

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from forgekit.checks import check_choice, check_integers, quoted
from forgekit.model.initial import copy_full
from forgekit.model.lora import (
    Adapter,
    LoraExperts,
    LoraLayer,
    LoraLinear,
    adapter_names,
    check_unmerged,
    lora_layers,
    merged_weight,
)
from forgekit.model.moe import Experts
from forgekit.model.nf4 import PIECE, is_packed
from forgekit.model.transformer import Transformer
from forgekit.optim.average import average_of
from forgekit.parallel.fsdp import fsdp_modules, release
from forgekit.parallel.tensor.tensor_parallel import shared_parameters
from forgekit.state import TrainState, donate, layout_of, was_parallelized
from forgekit.tensors import full, local

StateT = TypeVar("StateT", bound=TrainState)

STACKS = ("gate", "up", "down")
Base = Literal["nf4"]
"""How matrices with an adapter are stored."""


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 32.0,
    targets: Collection[str] | str = ("*.query", "*.value"),
    dropout: float = 0.0,
    dora: bool = False,
    rslora: bool = False,
    base: Base | None = None,
    seed: int = 0,
) -> nn.Module:
    """Add LoRA adapters to matrices of a model and freeze all else, in place; return the model.

    A matrix computes with ``weight + scale * B @ A``, at first with ``weight``, as ``B`` is zero.
    ``A`` comes from ``(seed, name)``, bitwise the same in every layout. Parameters of the base keep
    their names; the adapter's stand beside them, in float32 where the base has 16 bits. Call it
    before ``parallelize`` and the optimizer, and again for matrices with other options.

    Args:
        model: Any model; on meta or filled.
        rank: Rows of ``A``, ``r``.
        alpha: The scale is ``alpha / r``, or ``alpha / sqrt(r)`` with ``rslora``.
        targets: Patterns of names: of linear layers, of a ``Transformer``'s experts
            (``"*.experts"``) or one stack of them (``"*.experts.down"``), which get an adapter for
            each expert.
        dropout: Probability on what ``A`` takes, in [0, 1).
        dora: Whether lengths of the rows of each weight are trained besides.
        rslora: See ``alpha``.
        base: ``"nf4"`` packs the matrices that get an adapter into four bits a value (QLoRA), at
            once and whenever weights are loaded later; None leaves them as they are.
        seed: Seed of the initial values.

    Returns:
        The same model.

    Raises:
        ValueError: If the model went through ``parallelize``, a pattern matches nothing, a matrix
            has an adapter already or a weight that another module uses, a number is out of range,
            experts are to have dropout or ``dora``, or a matrix that is to be packed is of experts
            or the output projection, or has a number of values that 16,384 does not divide.

    Examples:
        >>> model = add_lora(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), rank=2, targets="1")
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['1.lora_A', '1.lora_B']
    """
    template = Adapter(
        name="", rank=rank, alpha=alpha, dropout=dropout, dora=dora, rslora=rslora, seed=seed
    )
    names = _match(model, [targets] if isinstance(targets, str) else [*targets])
    return add_chosen(model, [attrs.evolve(template, name=name) for name in names], base)


def add_chosen(model: nn.Module, chosen: Sequence[Adapter], base: Base | None = None) -> nn.Module:
    """Add adapters to the named matrices and freeze all else, in place. See ``add_lora``."""
    if packs := base is not None:
        check_choice("base", base, get_args(Base))
    if was_parallelized(model) or any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} went through parallelize already, so gradients of adapters "
            "added now would never be summed. Add or load adapters before forgekit.parallelize."
        )
    matrices = find_matrices(model)
    shared = _shared_weights(model)
    for adapter in chosen:
        if problem := _problem(model, matrices[adapter.name], adapter, shared, packs=packs):
            raise ValueError(
                f"{adapter.name!r} {problem}. Narrow the pattern, or add it with other options."
            )
    for adapter in chosen:
        layer, path = find_matrices(model)[adapter.name], adapter.name
        if isinstance(layer, Experts):
            path, _, stack = adapter.name.rpartition(".")
            adapted = layer if isinstance(layer, LoraExperts) else LoraExperts.of(layer)
            adapted.add_adapter(stack, adapter)
        else:
            adapted = LoraLinear.of(layer, adapter, packs=packs)
        model.set_submodule(path, adapted)
    trained = set(adapter_names(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add each adapter to its matrix, in place: in float32 or wider, rounded once to its dtype.

    Every rank calls it, in any layout. The matrices' own values are kept beside them, so that
    ``unmerge_lora`` restores every bit; that costs their memory once more. A merged model computes
    without its adapters: it can be evaluated and exported, not trained or checkpointed.

    A packed base (``base="nf4"``) is unpacked and added to: that is what the
    adapter was trained beside, not the weights that were packed. The sum is kept beside it, in the
    dtype that they had, and is not packed again.

    Args:
        model: A model with adapters, as ``add_lora`` or ``parallelize`` returned it.

    Raises:
        ValueError: If it has no adapter, or is merged already.
    """
    layers = check_unmerged(model, "once more would add them twice")
    if not layers and layout_of(model).stages is None:
        raise ValueError(
            f"{type(model).__name__} has no adapter to merge; forgekit.add_lora adds some."
        )
    reshard(model)
    for layer in layers:
        for matrix in layer.adapters:
            weight = getattr(layer, matrix)
            layer.bases[matrix] = local(weight).clone()
            merged = merged_weight(layer, matrix)
            if isinstance(layer, LoraLinear) and is_packed(weight):
                layer.merged = merged.to(layer.full_dtype)
                if isinstance(weight, DTensor):
                    mesh, placements = weight.device_mesh, weight.placements
                    layer.merged = distribute_tensor(
                        layer.merged, mesh, placements, src_data_rank=None
                    )
            else:
                copy_full(weight, merged)


@torch.no_grad()
def unmerge_lora(model: nn.Module) -> None:
    """Restore the matrices as they were before ``merge_lora``, in place and bit for bit.

    Args:
        model: What ``merge_lora`` was given; one that is not merged stays as it is.
    """
    reshard(model)
    for layer in lora_layers(model).values():
        if isinstance(layer, LoraLinear):
            layer.merged = None
        for matrix, base in layer.bases.items():
            local(getattr(layer, matrix)).copy_(base)
        layer.bases.clear()


@torch.no_grad()
def reset_magnitudes(model: nn.Module) -> None:
    """Set each DoRA magnitude to its weight's current row norms, in place.

    An adapter that has learned, so that its ``B`` is not zero, keeps its own. ``load_huggingface``
    and ``checkpoint_load`` do this by themselves; call it, on every rank, after other changes of a
    base that has adapters already, such as ``model.load_state_dict(base, strict=False)``.

    Args:
        model: A model with adapters, in any layout; without DoRA nothing changes.
    """
    reshard(model)
    for layer in lora_layers(model).values():
        if isinstance(layer, LoraLinear) and (lengths := layer.lora_magnitude_vector) is not None:
            initial = layer.initial_adapters()["lora_magnitude_vector"]()
            has_learned = full(layer.lora_B).any().cpu()
            copy_full(lengths, torch.where(has_learned, full(lengths).cpu(), initial))


def relora(state: StateT, *, every: int) -> StateT:
    """Merge a state's adapters into their weights every ``every`` steps and start new ones.

    Products of low rank, one after the other, add up to a change of high rank (ReLoRA).

    Call it after each step; what the model computes does not change. New values of ``A`` come from
    the adapter's seed, its name and the step, so every layout and every resumed run finds the same.
    The optimizer's state of adapters is cleared (moments and their step counts begin again) and
    keeps the rest; a running average begins again with the weights as they are. ReLoRA also warms
    the learning rate up again, which is the schedule's part. In a base of 16 bits a merge rounds
    away what is below their precision.

    Args:
        state: The state after a step, or before the first; consumed.
        every: Number of steps between two merges.

    Returns:
        The state, of the same step.

    Raises:
        ValueError: If ``every`` is below 1, adapters are merged by ``merge_lora``, or the base is
            packed into four bits, where rounding would erase what was learned.

    References:
        https://arxiv.org/abs/2307.05695
    """
    check_integers(every=(every, 1))
    layers = check_unmerged(state.model, "they would be added twice")
    if any(is_packed(getattr(layer, matrix)) for layer in layers for matrix in layer.adapters):
        raise ValueError(
            'the base is packed (add_lora(base="nf4")), and a merge into four bits would round '
            "away what the adapters learned."
        )
    if state.step and state.step % every == 0:
        reshard(state.model)
        for layer in layers:
            _restart(layer, state)
        if (average := average_of(state)) is not None:
            average.restart()  # it averages factors whose product is in the base now
    return donate(state)


@torch.no_grad()
def _restart(layer: LoraLayer, state: TrainState) -> None:
    for matrix in layer.adapters:
        copy_full(getattr(layer, matrix), merged_weight(layer, matrix))
    for name, draw in layer.initial_adapters(restart=state.step).items():
        parameter = getattr(layer, name)
        copy_full(parameter, draw())
        state.optimizer.state.pop(parameter, None)


def find_matrices(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that can have adapters, by name of the matrix (linear layer or stack)."""
    matrices: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            matrices[name] = module
        elif isinstance(module, Experts):
            matrices |= {f"{name}.{stack}": module for stack in STACKS}
    return matrices


def reshard(model: nn.Module) -> None:
    """Reshard gathered parameters, which would be stale."""
    release(fsdp_modules(*layout_of(model).roots(model)))


def _match(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the matrices that a pattern matches, by their or their experts' names."""
    matrices, chosen = find_matrices(model), set[str]()
    for pattern in patterns:
        matching = {
            name
            for name, module in matrices.items()
            if fnmatchcase(name, pattern)
            or (isinstance(module, Experts) and fnmatchcase(name.rpartition(".")[0], pattern))
        }
        if not matching:
            ends = dict.fromkeys(name.rpartition(".")[2] for name in matrices)
            raise ValueError(
                f"no linear layer or stack of experts matches the pattern {pattern!r}; their "
                f"names end in {quoted(ends)}. The output projection of a tied model is its "
                "embedding."
            )
        chosen |= matching
    return [name for name in matrices if name in chosen]


def _problem(
    model: nn.Module, layer: nn.Module, adapter: Adapter, shared: Mapping[str, str], *, packs: bool
) -> str | None:
    """Return why a matrix cannot get an adapter with these options."""
    name, stack = adapter.name, adapter.name.rpartition(".")[2]
    transformers = [module for module in model.modules() if isinstance(module, Transformer)]
    # For these the adapter is added to the matrix, not to its output.
    kind = "of experts" if isinstance(layer, Experts) else ""
    kind = "the output projection" if any(t.output is layer for t in transformers) else kind
    if isinstance(layer, LoraLinear) or (
        isinstance(layer, LoraExperts) and stack in layer.adapters
    ):
        return "already has an adapter"
    if isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward:
        return f"is a {type(layer).__name__} with a forward of its own; adapters are for nn.Linear"
    if name in shared:
        return f"shares its weight with {shared[name]!r} (tied), so merging would change both"
    if kind and adapter.dropout:
        return f"is {kind}; its adapter takes no dropout"
    if isinstance(layer, Experts) and adapter.dora:
        return f"is {kind}; its adapter takes no dora"
    if packs and kind:
        return f'is {kind}; base="nf4" packs only other linear layers'
    if (packs or adapter.dropout) and any(t.batch_invariant for t in transformers):
        return "is in a batch_invariant model, which takes neither dropout nor a packed base"
    if packs and isinstance(layer, nn.Linear) and layer.weight.numel() % PIECE:
        shape = [*layer.weight.shape]
        return f'has shape {shape}; base="nf4" packs {PIECE} values, a divisor of its size'
    return None


def _shared_weights(model: nn.Module) -> dict[str, str]:
    """Return linear layers with a shared weight, with a name of the other module."""
    pairs = [pair for names in shared_parameters(model) for pair in permutations(names, 2)]
    return {one.rpartition(".")[0]: other for one, other in pairs}
