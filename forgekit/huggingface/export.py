"""Exports of a fine-tuning run: the model as a Hugging Face directory, and its adapters."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from forgekit.checks import path_of
from forgekit.huggingface.load import read_config
from forgekit.huggingface.new_tokens import read_base
from forgekit.huggingface.save import save_huggingface
from forgekit.lora.adapters import merge_lora, unmerge_lora
from forgekit.lora.peft_files import adapters_of_experts, save_adapter
from forgekit.mesh import process_rank
from forgekit.model.lora import lora_layers
from forgekit.ranks import CheckpointError
from forgekit.state import TrainState


def check_new_directory(**directories: str | os.PathLike[str] | None) -> None:
    """Raise before a run for a directory that could not be written at its end.

    The first rank, which writes it, looks.

    Args:
        **directories: By the argument's name its value; None is not written.

    Raises:
        FileExistsError: If there is anything of that name.
        OSError: If it cannot be made: what is above it is a file or cannot be written.
    """
    for name, directory in directories.items():
        if directory is None or process_rank():
            continue
        path = path_of(name, directory)
        if os.path.lexists(path):
            raise FileExistsError(
                f"{name} is {directory}, which exists already; the model would be written there "
                "after the last step. Name a new directory, or remove this one."
            )
        above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
        tempfile.TemporaryDirectory(dir=above).cleanup()


def export_tuned(
    state: TrainState,
    out: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    new_tokens: Sequence[str] = (),
) -> str:
    """Write a fine-tuned model as a directory for transformers; every rank calls it.

    Adapters are merged into the weights, and also written in peft's layout, which has none of
    experts: as ``adapter/`` in the run directory. Weights have the dtype of the base's.

    Args:
        state: The state; its model is as before afterwards.
        out: The run directory.
        directory: The new directory.
        base: The directory that training began with; its tokenizer and other settings are kept.
        new_tokens: What ``read_base`` added to its tokenizer.

    Returns:
        What was written, to show.

    Raises:
        CheckpointError: As ``save_huggingface``; says what is missing.
    """
    source = path_of("base", base)
    config = read_config(source)
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    stacks, is_adapted = adapters_of_experts(state.model), bool(lora_layers(state.model))
    adapter = Path(out) / "adapter" if is_adapted and not stacks else None
    if state.saves.pending is not None:
        state.saves.pending.wait()
    try:
        if adapter is not None:
            save_adapter(state.model, adapter, base=str(source))
        if is_adapted:
            merge_lora(state.model)
        tokenizer = read_base(source, new_tokens)[0] if new_tokens else None
        save_huggingface(state.model, directory, tokenizer, like=source, dtype=dtype)
    except (CheckpointError, OSError) as error:
        raise CheckpointError(
            f"all steps are done and saved; the export to {directory} failed: "
            f"{str(error).rstrip('.')}. Fix that and run the same command again."
        ) from error
    finally:
        unmerge_lora(state.model)
    beside = "" if adapter is None else f", its adapters alone: {adapter}"
    return f"exported to {directory}{beside}"
