"""Checkpoints behind a URL, in an object store or wherever fsspec reaches.

There is no rename, no lock and no symlink there, and an object appears when it is complete. So the
manifest does what the rename does on a disk: it is written last, and what it does not name does not
count. Each save has a folder of its own, ``step_00000100/data-1f3a90c2/``, because overwriting the
files of an earlier save of the same step would leave a mixture if it stopped half-way::

    step_00000100/data-1f3a90c2/__0_0.distcp
    step_00000100/data-1f3a90c2/.metadata
    step_00000100/manifest.json

Files are written to the local disk first (``TMPDIR``), which is where their checksums come from,
and uploaded by the rank that wrote them. ``latest`` is found by looking. Nothing tells a save that
is under way from one that died, so only one run at a time may save to a URL: each save deletes
folders that no manifest names. Nor does anything keep a checkpoint while another run loads it.
"""

from __future__ import annotations

import io
import logging
import posixpath
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import attrs

import forgekit.run.checkpoints.commit as files
from forgekit.data.optional_packages import require
from forgekit.run.checkpoints.commit import Workspace
from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.run.checkpoints.manifest import ManifestError, format_manifest, parse_manifest
from forgekit.run.checkpoints.ranks import Ranks
from forgekit.run.checkpoints.retention import Keep

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystem

_DATA = "data-"

log = logging.getLogger("forgekit")


@attrs.frozen
class Remote:
    """A place behind a URL, with the methods of ``storage.Disk``.

    Attributes:
        url: The URL, without a slash at its end.
        fs: The file system of fsspec for it.
        root: The URL as this file system takes it.
    """

    url: str
    fs: Any
    root: str

    @classmethod
    def at(cls, url: str) -> Remote:
        """Find the file system for a URL.

        Raises:
            ImportError: If fsspec is not installed, or the package that it needs for the scheme.
            ValueError: If nobody knows the scheme.
        """
        fs, root = require("fsspec.core", extra="fsspec").url_to_fs(url)
        return cls(url.rstrip("/"), fs, root.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def committed(self) -> dict[int, str]:
        """Return the checkpoints by step."""
        found = self._steps()
        return {step: path for step, path in found.items() if self._fault(step, path) is None}

    def torn(self) -> dict[str, str]:
        """Return what looks like a checkpoint and does not count, each with its fault."""
        faults = {path: self._fault(step, path) for step, path in self._steps().items()}
        return {path: fault for path, fault in faults.items() if fault is not None}

    def check_empty(self) -> None:
        """Accept what is there: an upload that a crash cut short has no manifest yet."""

    def manifest(self, path: str) -> dict[str, Any] | None:
        """Read a checkpoint's manifest; None if it is missing or not one."""
        try:
            return self._load_manifest(path)
        except ManifestError:
            return None

    def find_damage(self, path: str, name: str, expected: dict[str, Any]) -> str | None:
        """Compare a file with its manifest entry; return what is wrong, or None."""
        return files.find_damage(
            f"{path}/{name}",
            expected,
            lambda: self.fs.info(self._inside(path, name))["size"],
            lambda: self.opened(path, name),
        )

    def opened(self, path: str, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a checkpoint."""
        return self.fs.open(self._inside(path, name), "rb")

    @contextmanager
    def reading(self, path: str, folder: str) -> Iterator[tuple[str, FileSystem]]:
        """Yield a folder of shards, and what torch reads it through; nothing keeps it."""
        yield folder, _downloads(lambda name, mode: self.fs.open(self._inside(path, name), mode))

    @contextmanager
    def workspace(self, ranks: Ranks, step: int) -> Iterator[Workspace]:
        """Make room on each rank's disk, and clear what was not committed in the end."""
        folder = ranks.first(self._prepare)
        with ExitStack() as stack:
            prefix = f"forgekit-{files.step_name(step)}-"
            fresh = partial(tempfile.TemporaryDirectory, prefix=prefix)
            paths = ranks.each(lambda: stack.enter_context(fresh()))
            try:
                yield Workspace(Path(paths[ranks.rank]), folder)
            finally:
                if ranks.rank == 0:
                    self._try_to_clear()

    def deliver(self, workspace: Workspace, step: int, names: list[str]) -> None:
        """Upload this rank's files."""
        folder = self._inside(files.step_name(step), workspace.folder)
        self.fs.makedirs(folder, exist_ok=True)
        for name in names:
            self.fs.put_file(str(workspace.path / name), f"{folder}/{name}")

    def commit(self, workspace: Workspace, manifest: dict[str, Any]) -> str:
        """Write the manifest, after a look whether all files have arrived."""
        path = f"{self.url}/{files.step_name(manifest['step'])}"
        self.fs.invalidate_cache()
        for name, expected in manifest["files"].items():
            if (size := self.fs.info(self._inside(path, name))["size"]) != expected["bytes"]:
                raise CheckpointError(
                    f"{path}/{name} has {size} bytes after the upload instead of "
                    f"{expected['bytes']}. Save again; does another run save there?"
                )
        content = format_manifest(manifest | {"folder": workspace.folder})
        self.fs.pipe_file(self._inside(path, files.MANIFEST), content)
        return path

    def retain(self, keep: Keep | None, saved: int) -> None:
        """Delete the checkpoints that a rule does not name, each manifest first."""
        found = self.committed()
        metrics = {step: (self.manifest(path) or {}).get("metric") for step, path in found.items()}
        for step in files.superseded(self.url, metrics, keep, saved):
            self._discard(found[step])

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints after a step, to which a run was rolled back."""
        for newer, path in sorted(self.committed().items()):
            if newer > step:
                self._discard(path)

    def _load_manifest(self, path: str) -> dict[str, Any]:
        try:
            return parse_manifest(self.fs.cat_file(self._inside(path, files.MANIFEST)))
        except (FileNotFoundError, NotADirectoryError):
            raise ManifestError("is missing") from None

    def _fault(self, step: int, path: str) -> str | None:
        try:
            return files.compare_step(step, self._load_manifest(path))
        except ManifestError as error:
            return str(error)

    def _discard(self, path: str) -> None:
        try:
            self.fs.rm_file(self._inside(path, files.MANIFEST))  # no longer a checkpoint
            self.fs.rm(self._inside(path), recursive=True)
        except Exception as error:  # stores have errors of their own
            log.warning("could not delete the old checkpoint %s: %s", path, error)

    def _steps(self) -> dict[int, str]:
        named = files.steps_among(self._names(self.root))
        return {step: f"{self.url}/{name}" for step, name in named.items()}

    def _names(self, path: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            return [posixpath.basename(p.rstrip("/")) for p in self.fs.ls(path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _inside(self, path: str, *names: str) -> str:
        """Turn the URL or the name of a checkpoint into what the file system takes."""
        return "/".join([self.root, posixpath.basename(path), *names])

    def _prepare(self) -> str:
        self._clear()
        return files.unique(_DATA.rstrip("-"))

    def _clear(self) -> None:
        """Delete what dead saves left, and what a save of the same step replaced."""
        for path in self._steps().values():
            named = (self.manifest(path) or {}).get("folder")
            for name in self._names(self._inside(path)):
                if name.startswith(_DATA) and name != named:
                    self.fs.rm(self._inside(path, name), recursive=True)

    def _try_to_clear(self) -> None:
        try:
            self._clear()
        except Exception as error:  # stores have errors of their own
            log.warning("could not delete what no checkpoint of %s needs: %s", self.url, error)


def _downloads(opened: Callable[[str, str], AbstractContextManager[BinaryIO]]) -> FileSystem:
    """Make what torch reads through: each file that a rank needs is fetched whole, once."""
    from torch.distributed.checkpoint.filesystem import FileSystem

    class Downloads(FileSystem):
        @contextmanager
        def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
            with tempfile.TemporaryFile() as local:
                with opened(str(path), mode) as stream:
                    shutil.copyfileobj(stream, local, files.CHUNK_BYTES)
                local.seek(0)
                yield cast(io.IOBase, local)

    return Downloads()
