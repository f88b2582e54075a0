"""What a run keeps in its directory, and whether a directory can be one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import MappingProxyType

from forgekit.inputs import path_of

KINDS = MappingProxyType(
    {
        ".lock": "file",
        "config.json": "file",
        "config_changes.jsonl": "file",
        "metrics.jsonl": "file",
        "bad_steps.jsonl": "file",
        "history.jsonl": "file",
        "status.json": "file",
        "checkpoints": "folder",
    }
)
"""What a run keeps in its directory; a FIFO in place of a file would hang it."""


def check_directory(out: str | Path) -> None:
    """Refuse a run directory in which set-up would fail later, or hang.

    Raises:
        ValueError: If it cannot be made or written, holds a model, or if something else has the
            name of a file or folder that a run keeps in it.
    """
    directory = path_of("out", out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ValueError(
            f"{directory} cannot be a run directory: {why}. Choose another, out=DIR."
        ) from None
    for name, kind in KINDS.items():
        path = directory / name
        if os.path.lexists(path) and not (path.is_file() if kind == "file" else path.is_dir()):
            raise ValueError(
                f"{path} is not a {kind}, and a run keeps one of that name. Move it away, or "
                "choose another run directory, out=DIR."
            )
    if any(directory.glob("*.safetensors")):
        raise ValueError(
            f"{directory} holds a model, whose config.json would be overwritten by the run's. "
            "Choose another run directory, out=DIR."
        )
