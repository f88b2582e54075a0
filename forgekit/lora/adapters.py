"""Adapters of a model in any layout: added before ``parallelize``, merged and taken out after."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import nn

from forgekit.inputs import check_integers
from forgekit.model.initial import copy_full
from forgekit.model.lora import Base, add_adapters
from forgekit.model.lora_layers import (
    LoraLayer,
    LoraLinear,
    full_of,
    local_of,
    lora_layers,
    merged_unpacked,
    merged_weight,
)
from forgekit.model.nf4 import is_packed
from forgekit.optim.average import average_of
from forgekit.parallel.fsdp import fsdp_modules, release
from forgekit.state import TrainState, donate, layout_of, was_parallelized

StateT = TypeVar("StateT", bound=TrainState)

NONE = MappingProxyType({})


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 32.0,
    targets: Collection[str] | str = ("*.query", "*.value"),
    rank_pattern: Mapping[str, int] = NONE,
    alpha_pattern: Mapping[str, float] = NONE,
    dropout: float = 0.0,
    dora: bool = False,
    rslora: bool = False,
    base: Base | None = None,
    seed: int = 0,
) -> nn.Module:
    """Add low-rank adapters to matrices of a model and freeze all else, in place, and return it.

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
        rank_pattern: Ranks of matrices that match a pattern of names; of several the last counts.
        alpha_pattern: The same for ``alpha``.
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
    if was_parallelized(model):
        raise ValueError(
            f"{type(model).__name__} went through parallelize, and gradients of adapters that are "
            "added now would never be summed: each rank would train its own. Call "
            "forgekit.add_lora(model) before forgekit.parallelize(model, mesh)."
        )
    return add_adapters(
        model,
        rank=rank,
        alpha=alpha,
        targets=targets,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        dropout=dropout,
        dora=dora,
        rslora=rslora,
        base=base,
        seed=seed,
    )


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Add each adapter to its matrix, in place: in float32 or wider, rounded once to its dtype.

    Every rank calls it, in any layout. The matrices' own values are kept beside them, so that
    ``unmerge_lora`` restores every bit; that costs their memory once more. A merged model computes
    without its adapters: it can be evaluated and exported, not trained or checkpointed.

    Of a packed base (``base="nf4"``) what it holds is unpacked and added to: that is what the
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
            weight = local_of(getattr(layer, matrix))
            if isinstance(layer, LoraLinear) and is_packed(weight):
                layer.bases[matrix], layer.merged = weight, merged_unpacked(layer)
                continue
            merged = merged_weight(layer, matrix)
            layer.bases[matrix] = weight.clone()
            weight.copy_(merged)


@torch.no_grad()
def unmerge_lora(model: nn.Module) -> None:
    """Restore the matrices as they were before ``merge_lora``, in place and bit for bit.

    Args:
        model: What ``merge_lora`` was given.

    Raises:
        ValueError: If it is not merged.
    """
    layers = lora_layers(model).values()
    if not any(layer.bases for layer in layers) and layout_of(model).stages is None:
        raise ValueError(
            f"{type(model).__name__} is not merged, so there is nothing to take out of its "
            "matrices. Call forgekit.merge_lora(model) first."
        )
    reshard(model)
    for layer in layers:
        if isinstance(layer, LoraLinear):
            layer.merged = None
        for matrix, base in layer.bases.items():
            local_of(getattr(layer, matrix)).copy_(base)
        layer.bases.clear()


@torch.no_grad()
def reset_magnitudes(model: nn.Module) -> None:
    """Set each DoRA magnitude to the lengths of its weight's rows as they are now, in place.

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
            has_learned = full_of(layer.lora_B).any().cpu()
            copy_full(lengths, torch.where(has_learned, full_of(lengths).cpu(), initial))


def relora(state: StateT, *, every: int) -> StateT:
    """Every ``every`` steps merge a state's adapters into their weights and start new ones.

    Products of low rank, one after the other, add up to a change of high rank (ReLoRA).

    Call it after each step; what the model computes does not change. New values of ``A`` come from
    the adapter's seed, its name and the step, so every layout and every resumed run finds the same.
    The optimizer forgets what it kept for adapters (moments and their step counts begin again) and
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
            "away what the adapters learned. Train without relora, or leave base out."
        )
    if state.step and state.step % every == 0:
        reshard(state.model)
        for layer in layers:
            _restart(layer, state)
        if (average := average_of(state)) is not None:
            average.restart()  # it holds factors whose product is in the base now
    return donate(state)


@torch.no_grad()
def _restart(layer: LoraLayer, state: TrainState) -> None:
    for matrix in layer.adapters:
        local_of(getattr(layer, matrix)).copy_(merged_weight(layer, matrix))
    for name, full in layer.initial_adapters(restart=state.step).items():
        parameter = getattr(layer, name)
        copy_full(parameter, full())
        state.optimizer.state.pop(parameter, None)


def check_unmerged(model: nn.Module, why: str) -> list[LoraLayer]:
    """List a model's layers with adapters; raise if they are merged.

    Args:
        model: The model.
        why: What would go wrong otherwise.
    """
    layers = lora_layers(model)
    if merged := [name for name, layer in layers.items() if layer.bases]:
        raise ValueError(
            f"the adapters of {len(merged)} layers (first: {merged[0]!r}) are merged into their "
            f"weights: {why}. Call forgekit.unmerge_lora(model) first."
        )
    return list(layers.values())


def reshard(model: nn.Module) -> None:
    """Reshard what FSDP has gathered: it would be stale."""
    release(fsdp_modules(*layout_of(model).roots(model)))
