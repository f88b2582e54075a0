"""Where checkpoints are kept, and which of them count.

A checkpoint is a folder of safetensors files and a manifest, which lists them with sizes and
checksums. ``LocalStorage`` is a directory that all ranks share. There a checkpoint is written into
a hidden folder, and only when all of it is durable that folder is renamed to ``step_00000100``, and
only after that does the symlink ``latest`` move. A process that dies at any point leaves the
earlier checkpoints as they were, and a folder that nobody mistakes for one; the next save removes
it.

``RemoteStorage`` is a URL and has the same methods: see ``remote.py``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar, overload

import attrs

from forgekit.files import (
    is_locked,
    locked,
    make_folder,
    open_regular,
    replace,
    sync,
    write_atomic,
)
from forgekit.ranks import CheckpointError, Ranks, explain

if TYPE_CHECKING:
    from forgekit.checkpoints.remote import RemoteStorage
    from forgekit.checkpoints.save import Keep


MANIFEST = "manifest.json"
FORMAT = 2
"""Of the files and the manifest; counts up when this version could not be read by earlier ones."""
PAUSES_S = (0.5, 2.0, 8.0)
"""Between tries to read a file of a storage that does not answer."""

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(tmp|old)-(step_\d{8,})(-deleted)?-[0-9a-f]+")
_URL_AS_PATH = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/[^/]")
CHUNK_BYTES = 4 << 20
_NO_FILE = (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""Errors of opening a pipe, a socket, a link or a directory as a file."""
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

T = TypeVar("T")

log = logging.getLogger("forgekit")


class ManifestError(ValueError):
    """A manifest is missing, damaged, or not one; the message continues a sentence about it."""


@attrs.frozen
class LocalStorage:
    """A directory on a file system that all ranks share."""

    directory: Path

    def __str__(self) -> str:
        return str(self.directory)

    def steps(self) -> dict[int, Path]:
        """Return every ``step_*`` folder by step, committed or not."""
        named = steps_among(path.name for path in self._entries())
        return {step: self.directory / name for step, name in named.items()}

    def names(self, path: Path) -> list[str]:
        """List a checkpoint's folder."""
        return [entry.name for entry in path.iterdir()] if path.is_dir() else []

    def load_manifest(self, path: Path) -> dict[str, Any]:
        """Read the manifest of a checkpoint; raises ``ManifestError`` if it is not one."""
        try:
            with open_regular(path / MANIFEST, follow=False) as stream:
                return parse_manifest(stream.read())
        except (FileNotFoundError, NotADirectoryError):
            raise ManifestError("is missing") from None
        except OSError as error:
            if error.errno not in _NO_FILE:
                raise  # the file may be whole
            raise ManifestError(f"cannot be read: {error.strerror or error}") from None

    def opened(self, path: Path, name: str) -> BinaryIO:
        """Open a file of a checkpoint."""
        return open_regular(path / name)

    @contextmanager
    def reading(self, path: Path) -> Iterator[None]:
        """Lock a checkpoint against retention."""
        with locked(path, shared=True):
            yield

    @contextmanager
    def fetched(self, path: Path, name: str) -> Iterator[Path]:
        """Yield the path of a checkpoint's file on this machine."""
        yield path / name

    @contextmanager
    def workspace(self, ranks: Ranks, step: int) -> Iterator[tuple[Path, str]]:
        """Make a folder for the files of a save, and remove it unless it was committed.

        Yields:
            The folder, which all ranks share, and its name inside the checkpoint: none.
        """
        with ExitStack() as stack:
            fresh = self._temporary(step)
            yield ranks.first(lambda: stack.enter_context(fresh)), ""

    def deliver(self, path: Path, _folder: str, _step: int, name: str) -> None:
        """Sync this rank's file, which is where it belongs."""
        sync(path / name)

    def commit(self, path: Path, manifest: dict[str, Any]) -> Path:
        """Turn a written folder into a checkpoint and point ``latest`` at it."""
        final = self.directory / step_name(manifest["step"])
        # Each of these is durable before the next one starts: contents (synced by their writers),
        # manifest, the folder that lists them, the new name, latest. A crash between any two
        # leaves either a folder without a name or a checkpoint that is whole.
        write_atomic(path / MANIFEST, format_manifest(manifest))
        sync(path)
        aside = final.with_name(unique(f".old-{final.name}"))  # for an earlier save of this step
        replace(final, path, aside)
        self.point_latest(final.name)
        shutil.rmtree(aside, ignore_errors=True)  # last, so that one of the two is always whole
        return final

    def point_latest(self, name: str) -> None:
        """Let the symlink ``latest`` point to a checkpoint; a failure is logged."""
        latest, link = self.directory / "latest", self.directory / ".latest.new"
        with only_warns(f"{latest} does not point to {name}"):
            link.unlink(missing_ok=True)  # of a save that died here
            try:
                link.symlink_to(name)
                link.replace(latest)  # a symlink cannot be changed in one step
                sync(self.directory)
            finally:
                link.unlink(missing_ok=True)

    def discard(self, path: Path) -> None:
        """Delete a checkpoint, renamed first, so that a half-deleted one does not count."""
        # The new name begins with .tmp-, so that the next save deletes what is left.
        doomed = path.with_name(unique(f".tmp-{path.name}-deleted"))
        path.rename(doomed)
        shutil.rmtree(doomed)

    def check_empty(self) -> None:
        """Refuse a path without checkpoints that is something else.

        Raises:
            CheckpointError: If it is a file or a checkpoint itself.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(
                f"{self} is a file; name the directory that holds the checkpoints."
            )
        with contextlib.suppress(ManifestError):
            self.load_manifest(self.directory)
            raise CheckpointError(
                f"{self} is a checkpoint itself; name the directory that holds it, "
                f"{self.directory.parent}, and choose it with step=."
            )

    def restore_replaced(self) -> None:
        """Give a checkpoint its name back if a save set it aside and died before replacing it."""
        hidden = self._hidden()
        if any(is_locked(path) for path, match in hidden.items() if match[1] == "tmp"):
            return  # that save is alive
        for path, match in hidden.items():
            final = self.directory / match[2]
            if match[1] == "old" and not final.exists():
                with contextlib.suppress(ManifestError):
                    self.load_manifest(path)
                    path.rename(final)

    def remove_leftovers(self) -> None:
        """Delete what dead processes left; folders of living ones are locked."""
        self.restore_replaced()
        for path in self._hidden():
            if not is_locked(path):
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _temporary(self, step: int) -> Iterator[Path]:
        make_folder(self.directory)
        self.remove_leftovers()
        temporary = self.directory / unique(f".tmp-{step_name(step)}")
        temporary.mkdir()
        with locked(temporary):  # so that another process's save sees that this one is alive
            try:
                yield temporary
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _entries(self) -> list[Path]:
        return [*self.directory.iterdir()] if self.directory.is_dir() else []

    def _hidden(self) -> dict[Path, re.Match[str]]:
        """Return the folders of unfinished saves, with the parts of their names."""
        folders = (p for p in self._entries() if p.is_dir() and not p.is_symlink())
        return {path: match for path in folders if (match := _HIDDEN.fullmatch(path.name))}


Storage: TypeAlias = "LocalStorage | RemoteStorage"
Checkpoint: TypeAlias = Any
"""A folder in a ``LocalStorage``, a URL in a ``RemoteStorage``."""


def storage_of(directory: str | os.PathLike[str]) -> Storage:
    """Return the storage of a directory or a URL.

    Raises:
        ValueError: If it is a URL that became a path, or its scheme is not known.
        ImportError: If it is a URL and fsspec, or what it needs for it, is not installed.
    """
    if isinstance(directory, Path) and _URL_AS_PATH.match(str(directory)):
        raise ValueError(
            f"directory {directory} looks like a URL that became a Path, which merges its slashes. "
            "Pass the URL as a string."
        )
    if "://" not in os.fspath(directory):
        return LocalStorage(Path(directory))
    from forgekit.checkpoints.remote import RemoteStorage

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
    steps = committed(storage_of(directory))
    return steps[max(steps)] if steps else None


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


def manifest_of(storage: Storage, path: Checkpoint) -> dict[str, Any]:
    """Read a checkpoint's manifest; raises ``ManifestError`` if it is not one."""
    return patiently(lambda: storage.load_manifest(path), f"{path}/{MANIFEST}")


def runs_of(storage: Storage, steps: Mapping[int, Checkpoint]) -> dict[str, int]:
    """Return the newest step of each run whose checkpoints are there."""
    runs = {manifest_of(storage, steps[step]).get("run"): step for step in sorted(steps)}
    return {run: step for run, step in runs.items() if run}  # a newer format may have none


def retain(storage: Storage, keep: Keep | None, saved: int) -> None:
    """Delete the checkpoints that a rule does not name; never the one that was just saved.

    One that another process is loading stays, too.

    Args:
        storage: Where they are.
        keep: The rule; None keeps all.
        saved: The step that was just saved.
    """
    steps, faulty = survey(storage)
    for path, fault in faulty.items():
        if fault != "is missing":
            log.warning("%s is kept and not counted: its %s %s", path, MANIFEST, fault)
    if max(steps, default=saved) > saved:
        log.warning(
            "%s holds step %d, newer than step %d that was just saved, and a resumed run will "
            "start from there. Delete the newer ones or save to another directory.",
            *(storage, max(steps), saved),
        )
    if keep is None:
        return
    metrics = {step: manifest_of(storage, path).get("metric") for step, path in steps.items()}
    for step in sorted(steps.keys() - keep.of(metrics) - {saved}):
        # A reader holds a shared lock on a folder; nothing can lock a URL.
        if not (isinstance(steps[step], Path) and is_locked(steps[step])):
            _discard(storage, steps[step])


def discard_after(storage: Storage, step: int) -> None:
    """Delete the checkpoints after a step to which a run was rolled back; ``latest`` names it."""
    storage.point_latest(step_name(step))  # first, so that it never names a deleted one
    for newer, path in sorted(committed(storage).items()):
        if newer > step:
            _discard(storage, path)


def find_damage(
    storage: Storage, path: Checkpoint, name: str, expected: dict[str, Any]
) -> str | None:
    """Compare a file with its manifest entry; return what is wrong, or None."""
    file = f"{path}/{name}"
    try:
        size, crc32 = patiently(lambda: _digest(storage, path, name), file)
    except (FileNotFoundError, NotADirectoryError):
        return f"{file} is missing ({expected['bytes']} bytes expected)"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror or error}"
    if size != expected["bytes"]:
        return f"{file} has {size} bytes instead of {expected['bytes']}"
    if crc32 != expected["crc32"]:
        return f"{file} has crc32 {crc32} instead of {expected['crc32']}"
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
            if is_missing or getattr(error, "errno", None) in _NO_FILE:
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


@contextmanager
def only_warns(what: str) -> Iterator[None]:
    """Log what goes wrong once a checkpoint is committed: it is good whatever comes after."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, error)


def step_name(step: int) -> str:
    """Name the folder of a step."""
    return f"step_{step:08d}"


def format_manifest(manifest: dict[str, Any]) -> bytes:
    """Write a manifest out, with its checksum."""
    # The checksum is of what a reader will parse: JSON turns tuples into lists.
    plain = json.loads(json.dumps(manifest))
    return json.dumps({**plain, "checksum": _checksum(plain)}, indent=1).encode()


def parse_manifest(content: bytes) -> dict[str, Any]:
    """Parse a manifest; one of another format is returned unchecked."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):  # of many brackets
        raise ManifestError("is not JSON") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int | str):
        raise ManifestError("describes no checkpoint")
    if manifest["format"] != FORMAT:
        return manifest
    # Over sorted keys, so formatting does not matter.
    if manifest.get("checksum") != (checksum := _checksum(manifest)):
        raise ManifestError(
            f"was changed after it was saved: its checksum is {checksum[:12]} instead of "
            f"{manifest.get('checksum')!r:.14}"
        )
    _check(manifest)
    return manifest


def _checksum(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
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


def _find_fault(storage: Storage, step: int, path: Checkpoint) -> str | None:
    """Say what a manifest is or does wrong; None for nothing."""
    try:
        named = manifest_of(storage, path).get("step", step)
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


def _digest(storage: Storage, path: Checkpoint, name: str) -> tuple[int, str]:
    size, checksum = 0, 0
    with storage.opened(path, name) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, f"{checksum:08x}"


def steps_among(names: Iterable[str]) -> dict[int, str]:
    """Return those of the names that are a step's, by step."""
    return {int(match[1]): name for name in names if (match := _STEP.fullmatch(name))}


def unique(stem: str) -> str:
    """Append eight random hexadecimal digits to a name."""
    return f"{stem}-{uuid.uuid4().hex[:8]}"
