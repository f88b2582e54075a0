"""Adapters on disk, in the layout of peft: a directory that either library opens.

``adapter_config.json`` says which matrices have an adapter, ``adapter_model.safetensors`` holds the
factors. A ``Transformer``'s matrices have the names that Llama-like models have in transformers;
those of other models keep their own. Every rank calls both functions, in any layout.

References:
    https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgekit.files import atomic_directory, restore_replaced
from forgekit.inputs import path_of
from forgekit.lora.adapters import check_unmerged, reshard
from forgekit.lora.peft_names import CONFIG, TENSORS, to_files
from forgekit.lora.peft_reading import read_files
from forgekit.model.initial import copy_full
from forgekit.model.lora import adapter_names, add_chosen, check_sharded, find_matrices
from forgekit.model.lora_layers import Adapter, LoraLayer, full_of, lora_layers
from forgekit.model.transformer import Transformer
from forgekit.state import was_parallelized


def save_adapter(
    model: nn.Module, directory: str | os.PathLike[str], *, base: str | None = None
) -> None:
    """Write a model's adapters in the layout of peft; every rank calls it.

    Tensors are gathered one at a time to rank 0, which writes. The directory appears whole, under
    its name, or not at all; one with an adapter in it is replaced.

    Args:
        model: A model with adapters, in any layout.
        directory: Where; on a file system of rank 0.
        base: Name of the base model, or its directory, for readers who open it.

    Raises:
        ValueError: If there is no adapter, it is merged, other parameters are trained too, or
            adapters differ in what the file says once (DoRA).
        FileExistsError: If the directory holds other files.
    """
    path = path_of("directory", directory)
    check_unmerged(model, "the file is for a base without them")
    _check_trained(model)
    reshard(model)
    adapters, tensors = _gather(model)
    _together(lambda: _write(path, adapters, tensors, _is_known(model), base))


def load_adapter(model: nn.Module, directory: str | os.PathLike[str]) -> None:
    """Read adapters in the layout of peft into a model, in place; every rank calls it.

    Beside an adapter of the head peft stores the weights of embedding and head; a ``Transformer``
    takes these too, as peft does.

    A model without adapters gets those of the file; like ``add_lora`` that has to come before
    ``parallelize``. One that has some keeps them and takes their values, in any layout. Everything
    is checked before the first change, and tensors are read one at a time.

    Args:
        model: The base, or the base with adapters of the same matrices, ranks and scales.
        directory: What ``save_adapter`` or peft wrote.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If it is not for this model: matrices that the model does not have, other
            shapes, ranks, scales or DoRA; if it holds what has no counterpart here (biases,
            trained modules); if a file is damaged, or the model is merged.
    """
    path = restore_replaced(path_of("directory", directory))
    check_unmerged(model, "loaded values would not be what is merged")
    held = _everywhere(_held(model))
    chosen, tensors = read_files(path, _shapes(model), held, is_known=_is_known(model))
    if not held:
        if was_parallelized(model):
            raise ValueError(
                f"{type(model).__name__} went through parallelize without adapters. Call "
                "forgekit.load_adapter before forgekit.parallelize, or add_lora before it and "
                "load_adapter after it."
            )
        check_sharded(model)
        add_chosen(model, chosen)
    reshard(model)
    held_here = {**{key: parameter for parameter, key in _parameters(model)}, **_stems(model)}
    with torch.no_grad():
        for key, parameter in held_here.items():
            if key in tensors:
                copy_full(parameter, tensors[key]())


def _is_known(model: nn.Module) -> bool:
    return isinstance(model, Transformer)


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[str, str]]]:
    """Adapters' parameters, each with its matrix and the part that it is of the adapter."""
    for layer in lora_layers(model).values():
        for matrix, adapter in layer.adapters.items():
            for part, leaf in zip("ABm", layer.factor_names(matrix), strict=True):
                if leaf is not None:
                    yield getattr(layer, leaf), (adapter.name, part)


def _held(model: nn.Module) -> dict[str, Adapter]:
    layers: list[LoraLayer] = list(lora_layers(model).values())
    return {adapter.name: adapter for layer in layers for adapter in layer.adapters.values()}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices that adapters are for, on all ranks."""
    found = {}
    for name, module in find_matrices(model).items():
        if isinstance(module, nn.Linear):  # its weight may be packed
            found[name] = (module.out_features, module.in_features)
        else:
            found[name] = tuple(getattr(module, name.rpartition(".")[2]).shape)
    stems = _stems(model) if _is_known(model) else {}
    return _everywhere(found | {name: tuple(p.shape) for (name, _), p in stems.items()})


def _stems(model: nn.Module) -> dict[tuple[str, str], nn.Parameter]:
    """The base's parameters that a file may hold beside adapters: embedding and output weight."""
    named = model.named_parameters()
    return {(n, "W"): p for n, p in named if n in ("embedding.weight", "output.weight")}


def _check_trained(model: nn.Module) -> None:
    own = set(adapter_names(model))
    if not _everywhere(dict.fromkeys(own)):
        raise ValueError(
            f"{type(model).__name__} has no adapter to save; forgekit.add_lora adds some."
        )
    more = [n for n, p in model.named_parameters() if p.requires_grad and n not in own]
    if more:
        raise ValueError(
            f"{len(more)} trained parameters (first: {more[0]!r}) are no part of an adapter and "
            "would be lost. Freeze them (requires_grad_(False)), or save the whole model with "
            "forgekit.checkpoint_save."
        )


def _gather(model: nn.Module) -> tuple[dict[str, Adapter], dict[tuple[str, str], Tensor]]:
    """All adapters, and on rank 0 their tensors in host memory, one gathered after the other."""
    own = {key: parameter for parameter, key in _parameters(model)}
    owners = _everywhere({key: [_rank()] for key in own}, join=True)
    tensors: dict[tuple[str, str], Tensor] = {}
    for key, ranks in owners.items():
        whole = full_of(own[key].detach()) if key in own else None
        if (mine := _to_first(whole, min(ranks))) is not None:
            tensors[key] = mine.cpu().contiguous()
    return _everywhere(_held(model)), tensors


def _to_first(whole: Tensor | None, owner: int) -> Tensor | None:
    """Pass a tensor from its owner on to rank 0, which alone gets it."""
    if owner == 0:
        return whole if _rank() == 0 else None
    if _rank() == owner and whole is not None:
        dist.send_object_list([tuple(whole.shape), whole.dtype], dst=0)
        dist.send(whole.contiguous(), dst=0)
    if _rank() != 0:
        return None
    described: list[Any] = [None, None]
    dist.recv_object_list(described, src=owner)
    device = "cpu" if "gloo" in dist.get_backend() else torch.accelerator.current_accelerator()
    received = torch.empty(described[0], dtype=described[1], device=device)
    dist.recv(received, src=owner)
    return received


def _write(
    path: Path,
    adapters: dict[str, Adapter],
    tensors: dict[tuple[str, str], Tensor],
    is_known: bool,
    base: str | None,
) -> None:
    from safetensors.torch import save_file

    config, files = to_files(adapters, tensors, is_known=is_known)
    with atomic_directory(path, is_replaceable=_is_adapter) as new:
        save_file(files, new / TENSORS, metadata={"format": "pt"})
        content = {**config, "base_model_name_or_path": base}
        (new / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def _is_adapter(path: Path) -> bool:
    return {entry.name for entry in path.iterdir()} <= {CONFIG, TENSORS}


def _together(work: Any) -> None:
    """Do something on rank 0; what it raises, all ranks raise."""
    outcome: list[Exception | None] = [None]
    if _rank() == 0:
        try:
            work()
        except (OSError, ValueError) as error:
            outcome = [error]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def _everywhere(own: dict[Any, Any], *, join: bool = False) -> dict[Any, Any]:
    """What all ranks have, by key; with ``join`` their lists one after the other."""
    everyone = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [own] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
    found: dict[Any, Any] = {}
    for theirs in everyone:
        for key, value in theirs.items():
            found[key] = found[key] + value if join and key in found else value
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
