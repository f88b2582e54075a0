"""The file side of checkpoints: what is on disk is either complete or does not count.

A checkpoint is written into a hidden temporary directory and described by a manifest that holds
the size and checksum of each file. Only when all of it is durable is the directory renamed to
``step_00000100``, and only after that does the symlink ``latest`` move. A process that dies at any
point leaves the earlier checkpoints as they were and a temporary directory that nobody mistakes for
a checkpoint; the next save removes it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forgekit.data.corpus.atomic import held, is_held, sync
from forgekit.run.retention import Keep

__all__ = ["CheckpointError", "latest_checkpoint"]

MANIFEST = "manifest.json"
CHUNK_BYTES = 4 << 20
_STEP = re.compile(r"step_(\d{8,})")
_ASIDE = re.compile(r"\.old-(step_\d{8,})-.*")

log = logging.getLogger("forgekit")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, is damaged, or does not belong to this run."""


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Find the newest committed checkpoint by looking, not by trusting the ``latest`` symlink.

    Args:
        directory: What ``checkpoint_save`` was given.

    Returns:
        The directory with the highest step whose manifest is there, or None.

    Examples:
        >>> latest_checkpoint("/nowhere") is None
        True
    """
    found = committed(Path(directory))
    return found[max(found)] if found else None


def step_name(step: int) -> str:
    """Name the directory of a step."""
    return f"step_{step:08d}"


def step_directories(directory: Path) -> dict[int, Path]:
    """Return every ``step_*`` directory by step, committed or not."""
    if not directory.is_dir():
        return {}
    named = ((_STEP.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in named if match}


def committed(directory: Path) -> dict[int, Path]:
    """Return the checkpoints by step: directories whose manifest is there and parses."""
    found = step_directories(directory)
    return {step: path for step, path in found.items() if read_manifest(path) is not None}


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint's manifest; None if it is missing or not one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and "files" in manifest else None


@contextlib.contextmanager
def temporary_directory(directory: Path, step: int) -> Iterator[Path]:
    """Make a fresh directory to write a checkpoint into, and remove it unless it was committed.

    It is locked while in use, so that a later save can tell it from one that a dead process left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    temporary = directory / _unique(f".tmp-{step_name(step)}")
    temporary.mkdir()
    with held(temporary):
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Clear what dead processes left, after putting back checkpoints that they had set aside."""
    put_back(directory)
    for path in [*directory.glob(".tmp-*"), *directory.glob(".old-*")]:
        if path.is_symlink():
            path.unlink(missing_ok=True)
        elif not is_held(path):
            shutil.rmtree(path, ignore_errors=True)


def put_back(directory: Path) -> None:
    """Restore a checkpoint whose replacement never arrived, unless a save is still at it."""
    if any(is_held(path) for path in directory.glob(".tmp-*")):
        return
    for aside in directory.glob(".old-*"):
        match = _ASIDE.fullmatch(aside.name)
        if match and read_manifest(aside) and not (directory / match[1]).exists():
            aside.rename(directory / match[1])


def digest(file: Path) -> dict[str, Any]:
    """Return the size and checksum that the manifest keeps of a file."""
    size, checksum = 0, 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def find_damage(file: Path, expected: dict[str, Any]) -> str | None:
    """Compare a file with its manifest entry; return what is wrong, or None.

    The size is looked at first: a truncated file is found without reading it.
    """
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{file} has {size} bytes instead of {expected['bytes']}"
        checksum = digest(file)["crc32"]
    except FileNotFoundError:
        return f"{file} is missing ({expected['bytes']} bytes expected)"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    if checksum != expected["crc32"]:
        return f"{file} has crc32 {checksum} instead of {expected['crc32']}"
    return None


def commit(temporary: Path, manifest: dict[str, Any]) -> Path:
    """Turn a written temporary directory into a checkpoint and point ``latest`` at it.

    The order is what makes it safe: contents, manifest, rename and symlink each become durable
    before the next one starts. A checkpoint of the same step is set aside first and removed last.

    Args:
        temporary: A directory with all files written and synced.
        manifest: What ``manifest.json`` shall hold; ``step`` names the checkpoint.

    Returns:
        The checkpoint's directory.
    """
    directory = temporary.parent
    final = directory / step_name(manifest["step"])
    with (temporary / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync(temporary)
    aside = _replace(temporary, final)
    sync(directory)
    _point_latest(directory, final.name)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def retain(directory: Path, keep: Keep | None, saved: int) -> None:
    """Delete the checkpoints that a rule does not name; never the one that was just saved.

    A directory is renamed before it is deleted, so that a half-deleted one is not a checkpoint.
    A failure is logged and not raised: the checkpoint that was just saved is good.
    """
    found = committed(directory)
    if max(found, default=saved) > saved:
        log.warning(
            "%s holds step %d, newer than step %d that was just saved, and a resumed run will "
            "start from there. Delete the newer ones or save to another directory.",
            *(directory, max(found), saved),
        )
    if keep is None:
        return
    metrics = {step: (read_manifest(path) or {}).get("metric") for step, path in found.items()}
    kept = {*keep.of(metrics), saved}
    for step, path in sorted(found.items()):
        if step not in kept and not is_held(path):
            _discard(path)


def _discard(path: Path) -> None:
    doomed = path.with_name(_unique(f".tmp-{path.name}-deleted"))
    try:
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        log.warning("could not delete the old checkpoint %s: %s", path, error)


def _replace(temporary: Path, final: Path) -> Path | None:
    """Rename ``temporary`` to ``final``; return where an earlier ``final`` now is."""
    if not final.exists():
        temporary.rename(final)
        return None
    aside = final.with_name(_unique(f".old-{final.name}"))
    final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        aside.rename(final)
        raise
    return aside


def _point_latest(directory: Path, name: str) -> None:
    link = directory / _unique(".tmp-latest")
    link.symlink_to(name)
    link.replace(directory / "latest")
    sync(directory)


def _unique(stem: str) -> str:
    return f"{stem}-{uuid.uuid4().hex[:8]}"
