"""Read an export back: its values and, where asked for, its logits in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgekit.environment import require
from forgekit.huggingface.load import (
    check_stored,
    huggingface_spec,
    load_huggingface,
    local_part,
    overlaps,
)
from forgekit.huggingface.names import NameMap
from forgekit.huggingface.safetensors_files import reading, same_bits, stored_tensors, view_of
from forgekit.model.transformer import Transformer
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
    with ExitStack() as stack:  # each file is opened once: headers of many experts are long
        paths = {one.file for one in stored.values()}
        files = {path: stack.enter_context(reading(path)) for path in paths}
        for name, tensor in tensors.items():
            values, held = local_part(tensor)
            for part in names.parts[name]:
                if (overlap := overlaps(values, held, part)) is None:
                    continue
                written = view_of(files[stored[part.key].file], part.key, overlap[1])
                if not same_bits(written, overlap[0].to("cpu", written.dtype)):
                    raise CheckpointError(
                        f"{part.key!r} was read back with other values than {name!r} has."
                    )


@torch.no_grad()
def check_logits(directory: Path) -> None:
    """Compare logits that transformers computes from a directory with a ``Transformer``'s.

    Both models are built from the files, whole and in float32, in this process.

    Raises:
        CheckpointError: If they differ, or transformers does not open it.
    """
    transformers = require("transformers", extra="hf")
    spec = huggingface_spec(directory)
    ids = (torch.arange(min(POSITIONS, spec.max_seq_len)) * 7919 % spec.vocab_size).unsqueeze(0)
    model = Transformer(spec).eval()
    load_huggingface(model, directory)
    options: dict[str, Any] = {"trust_remote_code": False, "dtype": torch.float32}
    opened = transformers.AutoModelForCausalLM.from_pretrained(str(directory), **options).eval()
    expected = model(ids)
    error = float((opened(ids).logits - expected).norm())
    if not error <= CLOSE * float(expected.norm()):
        raise CheckpointError(
            f"the export computes other logits in transformers: they differ by {error:.1e}, of "
            f"{float(expected.norm()):.1e}, so it was not kept."
        )
