"""Where checkpoints are kept, and which of them count.

``LocalStorage`` is a directory that all ranks share, ``RemoteStorage`` a URL; both have the same
methods. To save, each rank writes its files into a workspace and delivers them, and the first rank
commits them.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar, overload

from forgekit.files import is_locked
from forgekit.ranks import CheckpointError, explain
from forgekit.run.checkpoints.local_storage import LocalStorage
from forgekit.run.checkpoints.manifest import MANIFEST, NO_FILE, ManifestError
from forgekit.run.checkpoints.retention import Keep
from forgekit.run.checkpoints.step_names import step_name

if TYPE_CHECKING:
    from forgekit.run.checkpoints.remote_storage import RemoteStorage


Storage: TypeAlias = "LocalStorage | RemoteStorage"
Checkpoint: TypeAlias = Any
"""A directory in a ``LocalStorage``, a URL in a ``RemoteStorage``."""

CHUNK_BYTES = 4 << 20
PAUSES_S = (0.5, 2.0, 8.0)
"""Between tries to read a file of a storage that does not answer."""
T = TypeVar("T")
_URL_AS_PATH = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/[^/]")

log = logging.getLogger("forgekit")


def storage_of(directory: str | os.PathLike[str]) -> Storage:
    """Return the storage of a directory or a URL.

    Raises:
        ValueError: If it is a URL that became a path.
        ImportError: If it is a URL and fsspec, or what it needs for it, is not installed.
    """
    if isinstance(directory, Path) and _URL_AS_PATH.match(str(directory)):
        raise ValueError(
            f"directory {directory} looks like a URL that became a Path, which merges its slashes. "
            "Pass the URL as a string."
        )
    if "://" not in os.fspath(directory):
        return LocalStorage(Path(directory))
    from forgekit.run.checkpoints.remote_storage import RemoteStorage

    return RemoteStorage.at(os.fspath(directory))


@overload
def latest_checkpoint(directory: Path) -> Path | None: ...


@overload
def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | str | None: ...


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | str | None:
    """Find the newest committed checkpoint by listing, not by trusting the ``latest`` symlink.

    Args:
        directory: What ``checkpoint_save`` was given.

    Returns:
        The directory with the highest step whose manifest is there, or None; for a URL its URL.

    Examples:
        >>> latest_checkpoint("/nowhere") is None
        True
    """
    # The symlink moves after the commit, so a crash may leave it one behind.
    found = committed(storage_of(directory))
    return found[max(found)] if found else None


def committed(storage: Storage) -> dict[int, Checkpoint]:
    """Return the checkpoints by step: those whose manifest is whole and names that step."""
    return survey(storage)[0]


def survey(storage: Storage) -> tuple[dict[int, Checkpoint], dict[Checkpoint, str]]:
    """Return the checkpoints by step, and what only looks like one, with its fault."""
    good, faulty = {}, {}
    for step, path in patiently(storage.steps, str(storage)).items():
        if fault := _find_fault(storage, step, path):
            faulty[path] = fault
        else:
            good[step] = path
    return good, faulty


def run_of(storage: Storage) -> str:
    """Return the identity of the run whose checkpoints are there; a new one where there is none."""
    found = committed(storage)
    newest = storage.load_manifest(found[max(found)]) if found else {}
    return newest.get("run") or uuid.uuid4().hex


def retain(storage: Storage, keep: Keep | None, saved: int) -> None:
    """Delete the checkpoints that a rule does not name; never the one that was just saved.

    One that another process is loading stays, too.

    Args:
        storage: Where they are.
        keep: The rule; None keeps all.
        saved: The step that was just saved.
    """
    found, faulty = survey(storage)
    for path, fault in faulty.items():
        if fault != "is missing":
            log.warning("%s is kept and not counted: its %s %s", path, MANIFEST, fault)
    if max(found, default=saved) > saved:
        log.warning(
            "%s holds step %d, newer than step %d that was just saved, and a resumed run will "
            "start from there. Delete the newer ones or save to another directory.",
            *(storage, max(found), saved),
        )
    metrics = {step: storage.load_manifest(path).get("metric") for step, path in found.items()}
    kept = {*found} if keep is None else {*keep.of(metrics), saved}
    for step in sorted(found.keys() - kept):
        # A reader holds a shared lock on a directory; nothing can lock a URL.
        if not (isinstance(found[step], Path) and is_locked(found[step])):
            _discard(storage, found[step])


def discard_after(storage: Storage, step: int) -> None:
    """Delete the checkpoints after a step to which a run was rolled back; ``latest`` names it."""
    storage.point_latest(step_name(step))  # first, so that it never names a deleted one
    for newer, path in sorted(committed(storage).items()):
        if newer > step:
            _discard(storage, path)


def digest(stream: BinaryIO) -> dict[str, Any]:
    """Return the size and checksum that the manifest keeps of a file."""
    size, checksum = 0, 0
    while chunk := stream.read(CHUNK_BYTES):
        size += len(chunk)
        checksum = zlib.crc32(chunk, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def find_damage(
    storage: Storage, path: Checkpoint, name: str, expected: dict[str, Any]
) -> str | None:
    """Compare a file with its manifest entry; return what is wrong, or None."""
    file = f"{path}/{name}"
    try:
        found = patiently(lambda: _digest_of(storage, path, name), file)
    except (FileNotFoundError, NotADirectoryError):
        return f"{file} is missing ({expected['bytes']} bytes expected)"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}"
    if found["bytes"] != expected["bytes"]:
        return f"{file} has {found['bytes']} bytes instead of {expected['bytes']}"
    if found["crc32"] != expected["crc32"]:
        return f"{file} has crc32 {found['crc32']} instead of {expected['crc32']}"
    return None


def patiently(read: Callable[[], T], name: str) -> T:
    """Read, again after growing pauses where the storage does not answer.

    A file that cannot be read is not a damaged one: taking an older checkpoint instead would lose
    what was trained since.

    Raises:
        OSError: If there is no such file, or it is none.
        CheckpointError: If it cannot be read all the same.
    """
    for pause in (*PAUSES_S, None):
        try:
            return read()
        except Exception as error:  # stores have errors of their own
            is_missing = isinstance(error, FileNotFoundError | NotADirectoryError | ManifestError)
            if is_missing or getattr(error, "errno", None) in NO_FILE:
                raise
            if pause is None:
                raise CheckpointError(
                    f"{name} cannot be read: {explain(error)}. It may be whole, so no older "
                    "checkpoint is taken for it. Try again when the storage answers, or choose "
                    "another one with step=."
                ) from error
            log.warning("%s cannot be read: %s; next try in %s s", name, explain(error), pause)
            time.sleep(pause)
    raise AssertionError


def _digest_of(storage: Storage, path: Checkpoint, name: str) -> dict[str, Any]:
    with storage.opened(path, name) as stream:
        return digest(stream)


def _find_fault(storage: Storage, step: int, path: Checkpoint) -> str | None:
    """Say what a manifest is or does wrong; None for nothing."""
    try:
        named = patiently(lambda: storage.load_manifest(path), f"{path}/{MANIFEST}").get(
            "step", step
        )
    except ManifestError as error:
        return str(error)
    if named == step:
        return None
    return f"says step {named}, so the directory was renamed; {step_name(named)} is its name"


def _discard(storage: Storage, path: Checkpoint) -> None:
    try:
        storage.discard(path)
    except Exception as error:  # stores have errors of their own
        log.warning("could not delete the old checkpoint %s: %s", path, error)
