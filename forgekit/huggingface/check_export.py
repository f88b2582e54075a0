"""Read an export back: its values, its configuration and, where asked for, its logits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgekit.data.optional_packages import require
from forgekit.huggingface.families import differences, family_of
from forgekit.huggingface.load import (
    check_stored,
    load_huggingface,
    local_part,
    overlaps,
    read_config,
)
from forgekit.huggingface.names import NameMap
from forgekit.huggingface.safetensors_files import fill, reading, stored_tensors
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.ranks import CheckpointError

POSITIONS = 16

CLOSE = 1e-3
"""Relative difference of logits."""


@torch.no_grad()
def check_values(tensors: Mapping[str, Tensor], names: NameMap, directory: Path) -> None:
    """Compare what a rank holds with the files, bit for bit after the cast to their dtype.

    Raises:
        CheckpointError: If anything differs.
    """
    stored = stored_tensors(directory)
    check_stored(names, stored, directory)
    for name, tensor in tensors.items():
        local, box = local_part(tensor)
        for part in names.parts[name]:
            if (found := overlaps(local, box, part)) is None:
                continue
            view, there = found
            source = stored[part.key]
            expected = view.to("cpu", source.dtype).contiguous()
            read = torch.empty_like(expected)
            with reading(source.file) as file:
                fill(read, file, source, there)
            if not torch.equal(_bits(read), _bits(expected)):
                raise CheckpointError(
                    f"{part.key!r} was read back with other values than {name!r} has."
                )


def check_spec(spec: TransformerSpec, directory: Path) -> None:
    """Compare a model's spec with that of the files; a vocabulary may have lost its padding.

    Raises:
        CheckpointError: If they describe another model.
    """
    config = read_config(directory)
    found = differences(family_of(config).read(config), spec)
    if different := [one for one in found if not one.startswith("vocab_size")]:
        raise CheckpointError(f"config.json was read back as another model: {different}.")


@torch.no_grad()
def check_transformers(directory: Path) -> None:
    """Compare logits that transformers computes from a directory with a ``Transformer``'s.

    Both models are built from the files, whole and in float32, in this process.

    Raises:
        CheckpointError: If they differ, or transformers does not open it.
    """
    transformers = require("transformers", extra="hf")
    config = read_config(directory)
    spec = family_of(config).read(config)
    ids = (torch.arange(min(POSITIONS, spec.max_seq_len)) * 7919 % spec.vocab_size).unsqueeze(0)
    model = Transformer(spec).eval()
    load_huggingface(model, directory)
    options: dict[str, Any] = {"trust_remote_code": False, "dtype": torch.float32}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(directory), **options).eval()
    expected = model(ids)
    error = float((theirs(ids).logits - expected).norm())
    if not error <= CLOSE * float(expected.norm()):
        raise CheckpointError(
            f"the export computes other logits in transformers: they differ by {error:.1e}, of "
            f"{float(expected.norm()):.1e}, so it was not kept."
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
