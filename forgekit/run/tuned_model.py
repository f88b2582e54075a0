"""What a fine-tuning run leaves: the model as a Hugging Face directory, and its adapters."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from forgekit.inputs import path_of
from forgekit.model.lora_layers import lora_layers
from forgekit.run.adapter_files import save_adapter
from forgekit.run.adapters import merge_lora, unmerge_lora
from forgekit.run.huggingface.load import read_config
from forgekit.run.huggingface.save import save_huggingface
from forgekit.state import TrainState


def check_new_directory(**directories: str | os.PathLike[str] | None) -> None:
    """Refuse a directory that is there already, before a run that writes it at its end.

    Args:
        **directories: By the argument's name its value; None is not written.

    Raises:
        FileExistsError: If there is anything of that name.
    """
    for name, directory in directories.items():
        if directory is not None and path_of(name, directory).exists():
            raise FileExistsError(
                f"{name} is {directory}, which exists already; the model would be written there "
                "after the last step. Name a new directory, or remove this one."
            )


def export_tuned(
    state: TrainState,
    out: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
) -> str:
    """Write a fine-tuned model as a directory that transformers opens; every rank calls it.

    Adapters are merged into what is written, and kept apart in peft's layout: as ``adapter/`` in
    the run directory. Weights have the dtype of the base's.

    Args:
        state: The state; its model is as before afterwards.
        out: The run directory.
        directory: The new directory.
        base: The directory that training began with; its tokenizer and other settings are kept.

    Returns:
        What was written, to show.

    Raises:
        CheckpointError: As ``save_huggingface``.
    """
    source = path_of("base", base)
    config = read_config(source)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    adapter = Path(out) / "adapter" if lora_layers(state.model) else None
    if adapter is not None:
        save_adapter(state.model, adapter, base=str(source))
        merge_lora(state.model)
    try:
        save_huggingface(state.model, directory, like=source, dtype=dtype)
    finally:
        if adapter is not None:
            unmerge_lora(state.model)
    beside = "" if adapter is None else f", its adapters alone: {adapter}"
    return f"exported to {directory}{beside}"
