"""Storage of checkpoints, on a file system or behind a URL, and which of them are committed.

A checkpoint is a folder of safetensors files and a manifest, which lists them with sizes and
checksums. In a ``LocalStorage``, a directory that all ranks share, it is written into a hidden
folder, and only when all of it is durable that folder is renamed to ``step_00000100``, and only
after that does the symlink ``latest`` move. A process that dies at any point leaves the earlier
checkpoints as they were, and a folder that nobody mistakes for one; the next save removes it.

A ``RemoteStorage`` is a URL, in an object store or wherever fsspec reaches. There is no rename, no
lock and no symlink there, and an object appears when it is complete. So the manifest does what the
rename does on a disk: it is written last, and files that it does not name are ignored. Each save
has its own folder: overwriting the files of an earlier save of the same step would leave a mixture
if it stopped half-way::

    step_00000100/data-1f3a90c2/rank_00000.safetensors
    step_00000100/manifest.json

A running save cannot be distinguished from a dead one there, so only one run at a time may save:
each save deletes folders that no manifest names. Nor does anything keep a checkpoint while another
run loads it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, overload

import attrs

from forgekit.checks import check_integers, parse_json
from forgekit.files import (
    atomic_directory,
    clear_leftovers,
    is_locked,
    locked,
    make_folder,
    open_regular,
    restore_replaced,
    sync,
)
from forgekit.ranks import CheckpointError, Ranks
from forgekit.remote.urls import Url, UrlError, fs_of, names_below, path_or_url, retried

MANIFEST = "manifest.json"
FORMAT = 3
"""Format of files and manifest; incremented when earlier versions could not read it."""
SHOWN = 20
"""Maximum number of steps in a message that lists checkpoints."""
CHUNK_BYTES = 4 << 20

_STEP = re.compile(r"step_(\d{8,})")
_DATA = "data-"

T = TypeVar("T")
Manifest: TypeAlias = dict[str, Any]

log = logging.getLogger("forgekit")


class ManifestError(ValueError):
    """A manifest is missing, damaged, or not one; the message continues a sentence."""


@attrs.frozen(kw_only=True)
class Keep:
    """Which checkpoints ``checkpoint_save`` keeps: those that at least one of these rules selects.

    The one that was just saved, which ``latest`` names, and one that is being loaded always stay.
    Only committed checkpoints count. ``best`` reads the manifests of all of them after each save;
    the other rules those that may go.

    Attributes:
        last: How many of the newest, at least 1.
        every: Keep steps that are multiples of this number; None for none.
        milestones: Keep step 0 and powers of two.
        best: How many with the smallest metric, as given to ``checkpoint_save``; 0 for none.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is out of range.

    Examples:
        >>> sorted(Keep(last=1, every=300, milestones=True).of(dict.fromkeys(range(0, 1000, 100))))
        [0, 300, 600, 900]
        >>> sorted(Keep(last=1, best=1).of({100: 3.5, 200: 3.1, 300: None, 400: 3.3}))
        [200, 400]
    """

    last: int = 3
    every: int | None = None
    milestones: bool = False
    best: int = 0

    def __attrs_post_init__(self) -> None:
        every = 1 if self.every is None else self.every
        check_integers(keep=(self.last, 1), every=(every, 1), best=(self.best, 0))

    def of(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Select the checkpoints to keep.

        Args:
            metrics: The metric of each committed step; None or NaN where there is none.

        Returns:
            The steps that stay.
        """
        steps = sorted(metrics)
        kept = set(steps[-self.last :]) | set(filter(self.names, steps))
        measured = {s: m for s, m in metrics.items() if m is not None and not math.isnan(m)}
        # The newest of equally good ones.
        ranked = sorted(measured, key=lambda s: (measured[s], -s))
        return kept | set(ranked[: self.best])

    def names(self, step: int) -> bool:
        """Whether a step is kept for its number, by ``every`` or ``milestones``."""
        is_multiple = self.every is not None and step > 0 and step % self.every == 0
        return is_multiple or (self.milestones and step & (step - 1) == 0)


@attrs.frozen
class LocalStorage:
    """A directory on a file system shared by all ranks."""

    directory: Path

    def __str__(self) -> str:
        return str(self.directory)

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.directory / step_name(step)

    def names(self, step: int | None = None) -> list[str]:
        """List the directory, or a checkpoint's folder; nothing if it is not there."""
        folder = self.directory if step is None else self.path(step)
        # A link to an unmounted disk exists, and raises: its content is unknown.
        # ten times as fast as Path objects
        return os.listdir(folder) if os.path.lexists(folder) else []

    def opened(self, step: int, name: str) -> BinaryIO:
        """Open a file of a checkpoint."""
        return open_regular(self.path(step) / name)

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:
        """Lock a checkpoint against retention."""
        with locked(self.path(step), shared=True):
            yield

    @contextmanager
    def fetched(self, step: int, name: str) -> Iterator[Path]:
        """Yield the path of a checkpoint's file on this machine."""
        yield self.path(step) / name

    @contextmanager
    def writing(
        self, ranks: Ranks, step: int, before: Callable[[], None]
    ) -> Iterator[tuple[Path, str]]:
        """Yield a folder for the files of a save; the end of the block commits it.

        Args:
            ranks: Those that save.
            step: Its step.
            before: Called on the first rank just before they become one.

        Yields:
            The folder, which all ranks share, and its name inside the checkpoint: none.
        """
        with ExitStack() as stack:

            def begin() -> Path:
                make_folder(self.directory)
                clear_leftovers(self.directory, _STEP.pattern)
                fresh = atomic_directory(self.path(step), is_replaceable=lambda _: True)
                return stack.enter_context(fresh)

            def commit() -> None:
                before()
                stack.close()

            yield ranks.first(begin), ""
            # Each is durable before the next one starts: contents (synced by the rank
            # that wrote them), manifest, the folder that lists them, the new name. A crash between
            # any two leaves either a folder without a name or a checkpoint that is whole.
            ranks.first(commit)

    def deliver(self, folder: Path, _inside: str, _step: int, name: str) -> None:
        """Sync this rank's file, which is in its final folder."""
        sync(folder / name)

    def point_latest(self, step: int) -> None:
        """Let the symlink ``latest`` point to a checkpoint; a failure is logged."""
        latest, link = self.directory / "latest", self.directory / ".latest.new"
        with only_warns(f"{latest} does not point to {step_name(step)}"):
            link.unlink(missing_ok=True)  # from a save that died here
            try:
                link.symlink_to(step_name(step))
                link.replace(latest)  # a symlink cannot be changed in one step
                sync(self.directory)
            finally:
                link.unlink(missing_ok=True)

    def discard(self, step: int) -> None:
        """Delete a checkpoint; renamed first, so that a half-deleted one is never loaded.

        One that another process is loading stays.
        """
        if not is_locked(path := self.path(step)):
            # The next save deletes leftovers under this name.
            path.rename(doomed := path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.new"))
            shutil.rmtree(doomed)

    def restore_replaced(self) -> None:
        """Restore a checkpoint that a save had set aside when it died before replacing it."""
        for old in self.directory.glob(".step_*.old"):
            restore_replaced(old.with_name(old.name.split(".")[1]))


@attrs.frozen
class RemoteStorage:
    """A URL, with the methods of ``LocalStorage``.

    Attributes:
        url: The URL, without a slash at its end.
        fs: The file system of fsspec for it.
        root: The URL as this file system takes it.
    """

    url: Url
    fs: Any
    root: str

    def __str__(self) -> str:
        return self.url

    def path(self, step: int) -> Url:
        """Return the URL of the checkpoint of a step."""
        return self.url / step_name(step)

    def names(self, step: int | None = None) -> list[str]:
        """List the URL, or a checkpoint's folder without the folders of saves."""
        inside = names_below(self.fs, self.root if step is None else self._inside(step))
        return [name for name in inside if not name.startswith(_DATA)]

    def opened(self, step: int, name: str) -> BinaryIO:
        """Open a file of a checkpoint."""
        return self.fs.open(self._inside(step, name), "rb")

    @contextmanager
    def reading(self, step: int) -> Iterator[None]:  # noqa: ARG002
        """Nothing can lock a URL."""
        yield

    @contextmanager
    def fetched(self, step: int, name: str) -> Iterator[Path]:
        """Yield a copy of a file on the local disk."""
        with tempfile.NamedTemporaryFile() as local:
            source = self._inside(step, name)
            patiently(lambda: self.fs.get_file(source, local.name), f"{self.path(step)}/{name}")
            yield Path(local.name)

    @contextmanager
    def writing(
        self, ranks: Ranks, step: int, before: Callable[[], None]
    ) -> Iterator[tuple[Path, str]]:
        """Yield a folder on each rank's own disk; the end of the block uploads the manifest.

        ``before`` is called before anything is deleted, too, and again before each try to upload
        the manifest: a store that was out of reach for a while may have got another writer.

        Yields:
            The folder, and that of the checkpoint to which the files are uploaded.
        """

        def begin() -> str:
            before()
            self._remove_leftovers()
            return f"{_DATA}{uuid.uuid4().hex[:8]}"

        inside = ranks.first(begin)
        with ExitStack() as stack:
            fresh = tempfile.TemporaryDirectory(prefix=f"forgekit-{step_name(step)}-")
            folder = Path(ranks.together(lambda: stack.enter_context(fresh)))
            yield folder, inside
            # Last, since it commits. pipe_file makes the object appear whole or not at all.
            manifest = self._inside(step, MANIFEST)
            ranks.first(lambda: self._put(manifest, (folder / MANIFEST).read_bytes(), before))
        if ranks.rank == 0:
            with only_warns(f"could not delete what no checkpoint of {self} needs"):
                self._remove_leftovers([step])  # of an earlier save that was replaced

    def deliver(self, folder: Path, inside: str, step: int, name: str) -> None:
        """Upload this rank's file and check the size that arrived."""
        target, size = self._inside(step, inside, name), (folder / name).stat().st_size

        def upload() -> None:
            self.fs.put_file(str(folder / name), target)
            if (arrived := self.fs.info(target)["size"]) != size:
                raise OSError(errno.EIO, f"{arrived} bytes have arrived instead of {size}")

        retried(upload, f"{self.path(step)}/{inside}/{name}")

    def point_latest(self, step: int) -> None:
        """Let the object ``latest`` name a checkpoint, for people; a failure is logged."""
        with only_warns(f"{self}/latest does not name {step_name(step)}"):
            self._put(f"{self.root}/latest", step_name(step).encode())

    def discard(self, step: int) -> None:
        """Delete a checkpoint; its manifest first, so that a half-deleted one is never loaded."""
        self._remove(self._inside(step, MANIFEST))
        self._remove(self._inside(step))

    def restore_replaced(self) -> None:
        """Nothing to do: no save sets a checkpoint aside here."""

    def _remove_leftovers(self, steps: Iterable[int] | None = None) -> None:
        """Delete leftovers of dead saves and of a replaced save of the same step."""
        for step in steps_among(self.names()) if steps is None else steps:
            try:
                named = read_manifest(self, step).get("folder")
            except ManifestError:
                named = None
            for name in names_below(self.fs, self._inside(step)):
                if name.startswith(_DATA) and name != named:
                    self._remove(self._inside(step, name))

    def _put(self, target: str, content: bytes, before: Callable[[], None] | None = None) -> None:
        name = self.fs.unstrip_protocol(target)
        retried(lambda: self.fs.pipe_file(target, content), name, before=before)

    def _remove(self, target: str) -> None:
        with suppress(FileNotFoundError):  # by an attempt whose answer was lost
            retried(lambda: self.fs.rm(target, recursive=True), self.fs.unstrip_protocol(target))

    def _inside(self, step: int, *names: str) -> str:
        return "/".join([self.root, step_name(step), *names])


Storage: TypeAlias = LocalStorage | RemoteStorage


def storage_of(directory: str | os.PathLike[str]) -> Storage:
    """Return the storage of a directory or a URL.

    Raises:
        ValueError: If it is a URL that became a path, or its scheme is not known.
        ImportError: If the package that fsspec needs for the URL's scheme is not installed.
    """
    where = path_or_url(directory)
    return LocalStorage(where) if isinstance(where, Path) else RemoteStorage(where, *fs_of(where))


@overload
def latest_checkpoint(directory: Path) -> Path | None: ...


@overload
def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | str | None: ...


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | str | None:
    """Find the newest committed checkpoint by listing, without the ``latest`` symlink.

    Args:
        directory: What ``checkpoint_save`` was given.

    Returns:
        The directory with the highest step whose manifest is there, or None; for a URL its URL.

    Examples:
        >>> latest_checkpoint("/nowhere") is None
        True
    """
    # The symlink moves after the commit, so a crash may leave it one behind.
    storage = storage_of(directory)
    step = newest(storage)
    return None if step is None else storage.path(step)


def newest(storage: Storage) -> int | None:
    """Return the step of the newest checkpoint; None if there is none."""
    return next((step for step, _ in committed(storage)), None)


def steps_in(storage: Storage) -> list[int]:
    """Return the steps that have a folder, the newest first; not all need be committed."""
    return sorted(steps_among(patiently(storage.names, str(storage))), reverse=True)


def committed(
    storage: Storage,
    steps: Iterable[int] | None = None,
    faults: dict[int, str] | None = None,
) -> Iterator[tuple[int, Manifest]]:
    """Yield steps and manifests of checkpoints, each read on request.

    Args:
        storage: Where they are.
        steps: Which, in what order; all, the newest first, by default.
        faults: Takes the fault of each folder that was passed over, as it only looks like one.
    """
    for step in steps_in(storage) if steps is None else steps:
        try:
            yield step, read_manifest(storage, step)
        except ManifestError as error:
            if faults is not None:
                faults[step] = str(error)


def read_manifest(storage: Storage, step: int) -> Manifest:
    """Read a checkpoint's manifest; raise ``ManifestError`` unless it is of this step."""

    def read() -> bytes:
        try:
            with storage.opened(step, MANIFEST) as stream:
                return stream.read()
        except (FileNotFoundError, NotADirectoryError):
            raise ManifestError("is missing") from None

    manifest = parse_manifest(patiently(read, f"{storage.path(step)}/{MANIFEST}"))
    if (named := manifest.get("step", step)) != step:
        raise ManifestError(f"says step {named}, so the directory was renamed")
    return manifest


def retain(storage: Storage, keep: Keep | None, saved: int) -> None:
    """Delete the checkpoints that a rule does not select; never the one just saved.

    Args:
        storage: Where they are.
        keep: The rule; None keeps all.
        saved: The step that was just saved.
    """
    if (last := newest(storage) or saved) > saved:
        log.warning(
            "%s holds step %d, newer than step %d that was just saved, and a resumed run will "
            "start from there. Delete the newer ones or save to another directory.",
            *(storage, last, saved),
        )
    if keep is None:
        return
    metrics: dict[int, float | None] = {}
    faults: dict[int, str] = {}
    # Manifests are long and many: those of steps kept for their number are not read.
    deciding = (
        step
        for step in steps_in(storage)
        if keep.best or len(metrics) < keep.last or not keep.names(step)
    )
    for step, manifest in committed(storage, deciding, faults):
        metrics[step] = manifest.get("metric")
    if damaged := {step: fault for step, fault in faults.items() if fault != "is missing"}:
        log.warning("%s is kept and not counted: %s", *describe_faults(storage, damaged))
    _discard(storage, sorted(metrics.keys() - keep.of(metrics) - {saved}))


def discard_after(storage: Storage, step: int) -> None:
    """Delete the checkpoints after a rollback's step and point ``latest`` to it."""
    storage.point_latest(step)  # first, so that it never names a deleted one
    later = [newer for newer in steps_in(storage) if newer > step]
    _discard(storage, sorted(newer for newer, _ in committed(storage, later)))


def describe(storage: Storage) -> str:
    """List the steps of the newest checkpoints, for a message."""
    steps = [str(step) for step, _ in islice(committed(storage), SHOWN)]
    return ", ".join(reversed(steps)) or "none"


def describe_faults(storage: Storage, faults: Mapping[int, str]) -> tuple[Path | str, str]:
    """Describe a folder without a good manifest, and count further ones."""
    step, fault = next(iter(faults.items()))
    more = f" ({len(faults) - 1} more folders are no checkpoints)" if len(faults) > 1 else ""
    return storage.path(step), f"its {MANIFEST} {fault}{more}"


def find_damage(storage: Storage, step: int, name: str, expected: dict[str, Any]) -> str | None:
    """Compare a file with its manifest entry; return the difference, or None."""
    file = f"{storage.path(step)}/{name}"
    try:
        size, crc32 = patiently(lambda: _digest(storage, step, name), file)
    except (FileNotFoundError, NotADirectoryError):
        return f"{file} is missing ({expected['bytes']} bytes expected)"
    now = {"bytes": size, "crc32": crc32}
    return None if now == expected else f"{file} is {now} and was saved as {expected}"


def patiently(read: Callable[[], T], name: str) -> T:
    """Read, with growing pauses between retries while the storage does not answer.

    A file that cannot be read is not a damaged one: taking an older checkpoint instead would lose
    what was trained since.

    Raises:
        OSError: If there is no such file, or it is none.
        CheckpointError: If it cannot be read all the same.
    """
    try:
        return retried(read, f"{name} cannot be read")
    except UrlError as error:
        raise CheckpointError(
            f"{error} It may be whole, so no older checkpoint is used instead. Try again when the "
            "storage answers, or choose another one with step=."
        ) from error


@contextmanager
def only_warns(problem: str) -> Iterator[None]:
    """Log errors instead of raising them: the checkpoint is already committed."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", problem, error)


def step_name(step: int) -> str:
    """Name the folder of a step."""
    return f"step_{step:08d}"


def steps_among(names: list[str]) -> list[int]:
    """Return the steps of the checkpoint folders among names."""
    return [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]


def format_manifest(manifest: Manifest) -> bytes:
    """Format a manifest with its checksum."""
    # The checksum is of the parsed JSON, in which tuples are lists.
    plain = json.loads(json.dumps(manifest))
    return json.dumps({**plain, "checksum": _checksum(plain)}, indent=1).encode()


def parse_manifest(content: bytes) -> Manifest:
    """Parse a manifest; one of another format is returned unchecked."""
    try:
        manifest = parse_json(content)
    except ValueError:
        raise ManifestError("is not JSON") from None
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ManifestError("does not describe a checkpoint")
    if manifest["format"] != FORMAT:
        return manifest
    # With sorted keys, so formatting does not matter.
    if manifest.get("checksum") != (checksum := _checksum(manifest)):
        raise ManifestError(f"was changed after it was saved: its checksum is {checksum[:12]}")
    return manifest


def _checksum(manifest: Manifest) -> str:
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _discard(storage: Storage, steps: list[int]) -> None:
    for step in steps:
        with only_warns(f"could not delete the old checkpoint {storage.path(step)}"):
            storage.discard(step)


def _digest(storage: Storage, step: int, name: str) -> tuple[int, str]:
    size, checksum = 0, 0
    with storage.opened(step, name) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, f"{checksum:08x}"
