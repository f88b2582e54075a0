"""Tensor parallelism by a plan: patterns of module names to styles, for any model.

A plan maps patterns of module names (``layers.*.attention.query``; of several that match the last
counts) to styles:

| style | for | parameters | activations |
|---|---|---|---|
| ``colwise`` | ``nn.Linear`` | rows of the weight | all channels in, this rank's out |
| ``colwise_gathered`` | the same, before what sees all | rows | all channels in and out |
| ``rowwise`` | ``nn.Linear`` | columns of the weight | this rank's channels in, sums out |
| ``rowwise_split`` | the same, behind what sees all | columns | all channels in, sums out |
| ``embedding`` | ``nn.Embedding`` | rows of the vocabulary | sums out |
| ``sequence`` | norms, ``nn.Dropout`` | on every rank | this rank's positions |
| ``heads`` | norms of a head's channels, an activation with one weight | on every rank, \
gradients summed | this rank's heads or channels |
| ``channels`` | a factor or bias for each channel or head | sharded like them | this rank's |
| ``routed`` | layers of experts | the router on every rank, gradients summed; widths of experts \
| all positions in, sums out |
| ``grouped`` | experts of transformers | some experts | all of them, sums out |
| ``replicate`` | any module | on every rank | all of them, computed alike |

With a ``sequence`` entry the residual stream is sharded over positions: sums over ranks are
scattered instead of repeated, so norms and dropout cost and keep a ``1/tp`` of it. Without one
every rank has the whole stream.

References:
    Megatron-LM, https://arxiv.org/abs/1909.08053;
    sequence parallelism, https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from types import MethodType
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from forgekit.parallel.tensor.styles import EVERYWHERE, POSITIONS, STYLES, Region


def apply_plan(
    model: nn.Module,
    mesh: DeviceMesh | None,
    styles: Mapping[str, str],
    modules: Mapping[str, nn.Module] | None = None,
) -> dict[nn.Module, dict[str, Any]]:
    """Shard a model's parameters over ranks, in place; names stay.

    Nothing is sent: every rank keeps its part of what it holds, so all must hold the same values,
    or all be on meta. Modules without an entry are computed alike on all ranks, unless the plan
    shards the residual stream over positions. The last ``colwise`` modules, those with no
    ``rowwise`` after them, return logits as a DTensor that is sharded by the vocabulary, which
    ``gather_output`` makes whole where the model returns it.

    A projection that holds several matrices side by side (one weight for queries, keys and values)
    cannot be sharded as one: its first rows would be queries on one rank and keys on another. What
    an ``embedding``, a ``rowwise`` or a ``colwise_gathered`` module returns must not be changed in
    place; torch refuses it.

    Args:
        model: Any model.
        mesh: The ranks, a mesh of one dimension; with None nothing happens.
        styles: What ``read_plan`` found in the whole model.
        modules: The whole model's modules by name, where a pipeline took some of them out of
            ``model`` since.

    Returns:
        By module the attributes that were replaced, as one rank has them.

    Raises:
        ValueError: If modules that share a parameter would shard it differently.
    """
    if mesh is None:
        return {}
    modules = dict(model.named_modules()) if modules is None else modules
    present = set(model.modules())
    stream = POSITIONS if "sequence" in styles.values() else EVERYWHERE
    region = Region(mesh, stream, {modules[name] for name in _logit_modules(styles)})
    shared = shared_parameters(model)
    before = {module: _attributes(module) for module in present}
    for name, style in reversed(list(styles.items())):
        module = modules[name]
        if module in present:
            STYLES[style].apply(module, region)
    # Each module made its own DTensor of a shared parameter.
    for names in shared:
        share_again(model, names)
    replaced = {module: _replaced(module, attributes) for module, attributes in before.items()}
    return {module: attributes for module, attributes in replaced.items() if attributes}


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes except tensors and children; hooks change in place."""
    tensors = ("_parameters", "_buffers", "_modules")
    kept = {name: value for name, value in vars(module).items() if name not in tensors}
    return {name: copy(value) if isinstance(value, dict) else value for name, value in kept.items()}


def _replaced(module: nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the former values of replaced attributes; of new ones the class's, such as methods."""
    was = {"forward": MethodType(type(module).forward, module), **before}
    return {
        name: was[name]
        for name, value in _attributes(module).items()
        if name in was
        and was[name] is not value
        and not (isinstance(value, dict) and was[name] == value)
    }


def _logit_modules(styles: Mapping[str, str]) -> set[str]:
    """Find colwise modules without a rowwise module beside or after them."""
    rowwise = [name for name, style in styles.items() if style == "rowwise"]
    beside = {name.rpartition(".")[0] for name in rowwise} - {""}
    names = list(styles)
    after = names[names.index(rowwise[-1]) + 1 :] if rowwise else names
    return {n for n in after if styles[n] == "colwise" and n.rpartition(".")[0] not in beside}


def shared_parameters(model: nn.Module) -> list[list[str]]:
    """List the names of each shared parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def share_again(model: nn.Module, names: list[str]) -> None:
    """Tie parameters again that were one before their modules were sharded."""
    first, *others = [cast("DTensor", model.get_parameter(name)) for name in names]
    for name, other in zip(names[1:], others, strict=True):
        if isinstance(first, DTensor) and first.placements != other.placements:
            raise ValueError(
                f"{names[0]!r} and {name!r} are one parameter, but the plan shards it in two ways. "
                "Use styles that shard the same way, such as 'embedding' and 'colwise'."
            )
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_parameter(leaf, model.get_parameter(names[0]))
