"""The file side of checkpoints: what is on disk is either complete or does not count.

A checkpoint is written into a hidden temporary directory and described by a manifest that holds
the size and checksum of each file. Only when all of it is durable is the directory renamed to
``step_00000100``, and only after that does the symlink ``latest`` move. A process that dies at any
point leaves the earlier checkpoints as they were and a temporary directory that nobody mistakes for
a checkpoint; the next save removes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from forgekit.data.atomic_directory import held, is_held, sync
from forgekit.run.checkpoints.manifest import (
    MANIFEST,
    ManifestError,
    format_manifest,
    load_manifest,
)
from forgekit.run.checkpoints.retention import Keep

INDEX = ".metadata"
"""What torch calls its own description of the shards."""
CHUNK_BYTES = 4 << 20
_STEP = re.compile(r"step_(\d{8,})")
_URL_AS_PATH = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/[^/]")
_ASIDE = re.compile(r"\.old-(step_\d{8,})-")
_HIDDEN = re.compile(r"\.(tmp|old)-step_\d{8,}(-deleted)?-[0-9a-f]+")
_LINK = re.compile(r"\.tmp-latest-[0-9a-f]+")
_CONTENT = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json")

log = logging.getLogger("forgekit")


def is_url(directory: str | os.PathLike[str]) -> bool:
    """Say whether checkpoints are kept behind a URL, such as ``s3://bucket/run``.

    Raises:
        ValueError: If it was one, before somebody made it into a ``Path``.
    """
    if isinstance(directory, Path) and _URL_AS_PATH.match(str(directory)):
        raise ValueError(
            f"directory {directory} looks like a URL that became a Path, which merges its slashes. "
            "Pass the URL as a string."
        )
    return "://" in os.fspath(directory)


def step_name(step: int) -> str:
    """Name the directory of a step."""
    return f"step_{step:08d}"


def steps_among(names: Iterable[str]) -> dict[int, str]:
    """Return those of the names that are a step's, by step."""
    return {int(match[1]): name for name in names if (match := _STEP.fullmatch(name))}


def step_directories(directory: Path) -> dict[int, Path]:
    """Return every ``step_*`` directory by step, committed or not."""
    if not directory.is_dir():
        return {}
    named = steps_among(path.name for path in directory.iterdir())
    return {step: directory / name for step, name in named.items()}


def committed(directory: Path) -> dict[int, Path]:
    """Return the checkpoints by step: directories whose manifest is there and is theirs."""
    found = step_directories(directory)
    return {step: path for step, path in found.items() if find_fault(step, path) is None}


def torn(directory: Path) -> dict[Path, str]:
    """Return what looks like a checkpoint and does not count, each with its fault."""
    faults = {path: find_fault(step, path) for step, path in step_directories(directory).items()}
    return {path: fault for path, fault in faults.items() if fault is not None}


def find_fault(step: int, path: Path) -> str | None:
    """Say why a step's directory is no checkpoint, as what its manifest is or does; None if it is.

    Args:
        step: The step that its name says.
        path: The directory.
    """
    try:
        return compare_step(step, load_manifest(path))
    except ManifestError as error:
        return str(error)


def compare_step(step: int, manifest: dict[str, Any]) -> str | None:
    """Compare the step of a manifest with that of a directory's name; return what is wrong."""
    if (said := manifest.get("step", step)) == step:
        return None
    return f"says step {said}, so the directory was renamed; {step_name(said)} is its name"


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint's manifest; None if it is missing or not one."""
    try:
        return load_manifest(path)
    except ManifestError:
        return None


@contextlib.contextmanager
def temporary_directory(directory: Path, step: int) -> Iterator[Path]:
    """Make a fresh directory to write a checkpoint into, and remove it unless it was committed.

    It is locked while in use, so that a later save can tell it from one that a dead process left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    temporary = directory / unique(f".tmp-{step_name(step)}")
    temporary.mkdir()
    with held(temporary):
        try:
            yield temporary
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Clear what dead processes left, after putting back checkpoints that they had set aside."""
    put_back(directory)
    for path in _hidden(directory):
        if not is_held(path):
            shutil.rmtree(path, ignore_errors=True)
    for path in directory.iterdir():
        if _LINK.fullmatch(path.name) and path.is_symlink():
            path.unlink(missing_ok=True)


def put_back(directory: Path) -> None:
    """Restore a checkpoint whose replacement never arrived, unless a save is still at it."""
    hidden = _hidden(directory)
    if any(is_held(path) for path in hidden if path.name.startswith(".tmp-")):
        return
    for aside in hidden:
        match = _ASIDE.match(aside.name)
        if match and read_manifest(aside) and not (directory / match[1]).exists():
            aside.rename(directory / match[1])


def _hidden(directory: Path) -> list[Path]:
    """List the directories that saves make; others may have such names, but not such contents."""
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if _HIDDEN.fullmatch(path.name) and _is_ours(path)]


def _is_ours(path: Path) -> bool:
    try:
        return not path.is_symlink() and all(_CONTENT.fullmatch(e.name) for e in path.iterdir())
    except OSError:  # a file, or not to be read
        return False


def digest(stream: BinaryIO) -> dict[str, Any]:
    """Return the size and checksum that the manifest keeps of a file."""
    size, checksum = 0, 0
    while chunk := stream.read(CHUNK_BYTES):
        size += len(chunk)
        checksum = zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def find_damage(
    name: object,
    expected: dict[str, Any],
    size: Callable[[], int],
    opened: Callable[[], AbstractContextManager[BinaryIO]],
) -> str | None:
    """Compare a file with its manifest entry; return what is wrong, or None.

    The size is looked at first: a truncated file is found without reading it.

    Args:
        name: What the file is called.
        expected: Its entry.
        size: Asks for its bytes.
        opened: Opens it.
    """
    try:
        if (found := size()) != expected["bytes"]:
            return f"{name} has {found} bytes instead of {expected['bytes']}"
        with opened() as stream:
            checksum = digest(stream)["crc32"]
    except FileNotFoundError:
        return f"{name} is missing ({expected['bytes']} bytes expected)"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    if checksum != expected["crc32"]:
        return f"{name} has crc32 {checksum} instead of {expected['crc32']}"
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
    with (temporary / MANIFEST).open("wb") as stream:
        stream.write(format_manifest(manifest))
        stream.flush()
        os.fsync(stream.fileno())
    sync(temporary)
    aside = _replace(temporary, final)
    with only_warns(f"{final} is saved, but may be lost if the machine stops now"):
        sync(directory)
    _point_latest(directory, final.name)
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)
    return final


@contextlib.contextmanager
def only_warns(what: str) -> Iterator[None]:
    """Log what goes wrong once a checkpoint is committed: it is good whatever comes after."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, error)


def retain(directory: Path, keep: Keep | None, saved: int) -> None:
    """Delete the checkpoints that a rule does not name; never the one that was just saved.

    A directory is renamed before it is deleted, so that a half-deleted one is not a checkpoint.
    A failure to delete is logged and not raised: the checkpoint that was just saved is good.
    """
    found = committed(directory)
    for path, fault in torn(directory).items():
        if os.path.lexists(path / MANIFEST):
            log.warning("%s is kept and not counted: its %s %s", path, MANIFEST, fault)
    metrics = {step: (read_manifest(path) or {}).get("metric") for step, path in found.items()}
    for step in superseded(directory, metrics, keep, saved):
        if not is_held(found[step]):
            _discard(found[step])


def discard_after(directory: Path, step: int) -> None:
    """Delete the checkpoints after a step, to which a run was rolled back; ``latest`` names it."""
    _point_latest(directory, step_name(step))
    for newer, path in sorted(committed(directory).items()):
        if newer > step:
            _discard(path)


def superseded(
    directory: object, metrics: dict[int, float | None], keep: Keep | None, saved: int
) -> list[int]:
    """Return the steps that a rule does not name, and warn of those newer than the one just saved.

    Args:
        directory: Where they are, for the warning.
        metrics: The metric of each committed step.
        keep: The rule; None keeps all.
        saved: The step that was just saved, which stays.
    """
    if max(metrics, default=saved) > saved:
        log.warning(
            "%s holds step %d, newer than step %d that was just saved, and a resumed run will "
            "start from there. Delete the newer ones or save to another directory.",
            *(directory, max(metrics), saved),
        )
    kept = {*metrics} if keep is None else {*keep.of(metrics), saved}
    return sorted(metrics.keys() - kept)


def _discard(path: Path) -> None:
    doomed = path.with_name(unique(f".tmp-{path.name}-deleted"))
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
    aside = final.with_name(unique(f".old-{final.name}"))
    final.rename(aside)
    try:
        temporary.rename(final)
    except OSError:
        aside.rename(final)
        raise
    return aside


def _point_latest(directory: Path, name: str) -> None:
    link = directory / unique(".tmp-latest")
    with only_warns(f"{directory / 'latest'} does not point to {name}"):
        try:
            link.symlink_to(name)
            link.replace(directory / "latest")
            sync(directory)
        finally:
            link.unlink(missing_ok=True)


def unique(stem: str) -> str:
    """Add to a name what no other has."""
    return f"{stem}-{uuid.uuid4().hex[:8]}"


@attrs.frozen
class Workspace:
    """Where the files of a checkpoint are written.

    Attributes:
        path: A directory on this rank.
        folder: The folder inside the checkpoint in which they will be; empty for none.
    """

    path: Path
    folder: str = ""
