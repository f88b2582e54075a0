"""Manifests of checkpoints, changed by somebody who knows the format or does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forgekit.checkpoints.directory import format_manifest

__all__ = ["edit", "rewrite"]


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as with an editor: its checksum stays."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and its checksum with it."""
    edit(folder, change)
    file = folder / "manifest.json"
    file.write_bytes(format_manifest(json.loads(file.read_text())))
