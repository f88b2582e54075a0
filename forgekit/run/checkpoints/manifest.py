"""The manifest of a checkpoint: written whole, read with distrust.

It holds a checksum of itself, so that a changed number of samples is found as surely as a changed
shard. Older checkpoints without one load as they did. A checkpoint whose manifest is damaged, or is
no manifest, does not count; reading it never waits and never ends the process.
"""

from __future__ import annotations

import errno
import hashlib
import json
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from forgekit.files import open_regular

MANIFEST = "manifest.json"
INDEX = ".metadata"
"""torch's own description of the shards."""
FORMAT = 1
"""Of the files and the manifest; counts up when this version could not be read by earlier ones."""

NO_FILE = (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of opening a pipe, a socket, a link or a directory as a file."""

_CHECKSUM = "checksum"
_KINDS = MappingProxyType(
    {
        "step": int,
        "files": dict,
        "tensors": dict,
        "optimizer": dict,
        "fields": dict,
        "run": str,
        "model": dict,
    }
)


class ManifestError(ValueError):
    """A manifest is missing, damaged, or not one; the message continues a sentence about it."""


def format_manifest(manifest: dict[str, Any]) -> bytes:
    """Write a manifest out, with its checksum."""
    # The checksum is of what a reader will parse: JSON turns tuples into lists.
    plain = json.loads(json.dumps(manifest))
    return json.dumps({**plain, _CHECKSUM: _checksum(plain)}, indent=1).encode()


def load_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint's directory.

    Raises:
        ManifestError: If it is missing, unreadable, or not one.
    """
    try:
        with open_regular(path / MANIFEST, follow=False) as stream:
            content = stream.read()
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError("is missing") from None
    except OSError as error:
        if error.errno not in NO_FILE:
            raise  # the file may be whole
        raise ManifestError(f"cannot be read: {error.strerror or error}") from None
    return parse_manifest(content)


def parse_manifest(content: bytes) -> dict[str, Any]:
    """Parse a manifest and check that it was not changed.

    One of a newer format is returned unchecked: only a newer version can tell.

    Raises:
        ManifestError: If it is not one, or was changed.
    """
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):  # of many brackets
        raise ManifestError("is not JSON") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int | str):
        raise ManifestError("describes no checkpoint")
    if isinstance(manifest["format"], int) and manifest["format"] > FORMAT:
        return manifest
    found = _checksum(manifest)  # over sorted keys, so formatting does not matter
    if manifest.get(_CHECKSUM, found) != found:
        raise ManifestError(
            f"was changed after it was saved: its checksum is {found[:12]} instead of "
            f"{manifest[_CHECKSUM]!r:.14}"
        )
    if manifest["format"] == FORMAT:
        _check(manifest)
    return manifest


def _checksum(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != _CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _check(manifest: dict[str, Any]) -> None:
    """Check the entries that are used before anything of a checkpoint is read."""
    for key, kind in _KINDS.items():
        if not isinstance(manifest.get(key), kind):
            raise ManifestError(f"has no {key!r}, or one of the wrong type")
    if not isinstance(manifest.get("metric"), int | float | None):
        raise ManifestError(f"has the metric {manifest['metric']!r:.40}, which is not a number")
    counters = [manifest["step"], *(manifest["fields"].get(name) for name in ("step", "samples"))]
    if not all(isinstance(count, int) and count >= 0 for count in counters):
        raise ManifestError("has a step or a number of samples that is no count")
    folder = manifest.get("folder", "")
    if not isinstance(folder, str) or folder.strip(".") != folder or "/" in folder:
        raise ManifestError(f"names a folder outside the checkpoint: {folder!r:.80}")
    for name, entry in manifest["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ManifestError(f"names a file outside the checkpoint: {name!r:.80}")
        is_entry = isinstance(entry, dict) and {"bytes", "crc32"} <= entry.keys()
        if not is_entry or not isinstance(entry["bytes"], int):
            raise ManifestError(f"has no size and checksum of {name!r:.80}")
