"""Checkpoints behind a URL, in an object store or wherever fsspec reaches.

There is no rename, no lock and no symlink there, and an object appears when it is complete. So the
manifest does what the rename does on a disk: it is written last, and what it does not name does not
count. Each save has a folder of its own, because overwriting the files of an earlier save of the
same step would leave a mixture if it stopped half-way::

    step_00000100/data-1f3a90c2/rank_00000.safetensors
    step_00000100/manifest.json

Nothing tells a running save from a dead one there, so only one run at a time may save to a URL:
each save deletes folders that no manifest names. Nor does anything keep a checkpoint while another
run loads it.
"""

from __future__ import annotations

import posixpath
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from forgekit.checkpoints.directory import (
    CHUNK_BYTES,
    MANIFEST,
    ManifestError,
    format_manifest,
    only_warns,
    parse_manifest,
    step_name,
    steps_among,
    unique,
)
from forgekit.data.optional_packages import require
from forgekit.ranks import CheckpointError, Ranks

_DATA = "data-"


@attrs.frozen
class RemoteStorage:
    """A URL, with the methods of ``LocalStorage``.

    Attributes:
        url: The URL, without a slash at its end.
        fs: The file system of fsspec for it.
        root: The URL as this file system takes it.
    """

    url: str
    fs: Any
    root: str

    @classmethod
    def at(cls, url: str) -> RemoteStorage:
        """Find the file system for a URL.

        Raises:
            ImportError: If fsspec is not installed, or the package that it needs for the scheme.
            ValueError: If the scheme is not known.
        """
        fs, root = require("fsspec.core", extra="fsspec").url_to_fs(url)
        return cls(url.rstrip("/"), fs, root.rstrip("/"))

    def __str__(self) -> str:
        return self.url

    def steps(self) -> dict[int, str]:
        """Return every ``step_*`` folder by step, committed or not."""
        named = steps_among(self.names(self.root))
        return {step: f"{self.url}/{name}" for step, name in named.items()}

    def names(self, path: str) -> list[str]:
        """List a folder; what unfinished saves left there is not listed."""
        names = self._names(path if path == self.root else self._inside(path))
        return [name for name in names if not name.startswith(_DATA)]

    def load_manifest(self, path: str) -> dict[str, Any]:
        """Read the manifest of a checkpoint; raises ``ManifestError`` if it is not one."""
        try:
            return parse_manifest(self.fs.cat_file(self._inside(path, MANIFEST)))
        except (FileNotFoundError, NotADirectoryError):
            raise ManifestError("is missing") from None

    def opened(self, path: str, name: str) -> BinaryIO:
        """Open a file of a checkpoint."""
        return self.fs.open(self._inside(path, name), "rb")

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:  # noqa: ARG002
        """Nothing can lock a URL."""
        yield

    @contextmanager
    def fetched(self, path: str, name: str) -> Iterator[Path]:
        """Yield a copy of a file on the local disk."""
        with tempfile.NamedTemporaryFile() as local, self.opened(path, name) as stream:
            shutil.copyfileobj(stream, local, CHUNK_BYTES)
            local.flush()
            yield Path(local.name)

    @contextmanager
    def workspace(self, ranks: Ranks, step: int) -> Iterator[tuple[Path, str]]:
        """Make a folder on each rank's own disk; remove what was not committed in the end.

        Yields:
            The folder, and that of the checkpoint to which the files are uploaded.
        """
        folder = ranks.first(lambda: self.remove_leftovers() or unique(_DATA[:-1]))
        with ExitStack() as stack:
            prefix = f"forgekit-{step_name(step)}-"
            fresh = partial(tempfile.TemporaryDirectory, prefix=prefix)
            path = ranks.together(lambda: stack.enter_context(fresh()))
            try:
                yield Path(path), folder
            finally:
                if ranks.rank == 0:
                    with only_warns(f"could not delete what no checkpoint of {self} needs"):
                        self.remove_leftovers()

    def deliver(self, path: Path, folder: str, step: int, name: str) -> None:
        """Upload this rank's file."""
        target = self._inside(step_name(step), folder)
        self.fs.makedirs(target, exist_ok=True)
        self.fs.put_file(str(path / name), f"{target}/{name}")

    def commit(self, _path: Path, manifest: dict[str, Any]) -> str:
        """Write the manifest, after checking that all files have arrived."""
        final = f"{self.url}/{step_name(manifest['step'])}"
        self.fs.invalidate_cache()  # else fsspec answers from before the other ranks' uploads
        for name, expected in manifest["files"].items():
            if (size := self.fs.info(self._inside(final, name))["size"]) != expected["bytes"]:
                raise CheckpointError(
                    f"{final}/{name} has {size} bytes after the upload instead of "
                    f"{expected['bytes']}. Save again; does another run save there?"
                )
        # Last: from here on it counts. pipe_file makes the object appear whole or not at all.
        self.fs.pipe_file(self._inside(final, MANIFEST), format_manifest(manifest))
        return final

    def point_latest(self, name: str) -> None:
        """A URL has no ``latest``; the newest step is found by listing."""

    def discard(self, path: str) -> None:
        """Delete a checkpoint, its manifest first, so that a half-deleted one does not count."""
        self.fs.rm_file(self._inside(path, MANIFEST))
        self.fs.rm(self._inside(path), recursive=True)

    def check_empty(self) -> None:
        """A store has no directories that could be something else."""

    def restore_replaced(self) -> None:
        """No save sets a checkpoint aside here."""

    def remove_leftovers(self) -> None:
        """Delete what dead saves left, and what a save of the same step replaced."""
        for path in self.steps().values():
            try:
                named = self.load_manifest(path).get("folder")
            except ManifestError:
                named = None
            for name in self._names(self._inside(path)):
                if name.startswith(_DATA) and name != named:
                    self.fs.rm(self._inside(path, name), recursive=True)

    def _names(self, path: str) -> list[str]:
        self.fs.invalidate_cache()  # fsspec remembers listings, also of what others have changed
        try:
            return [posixpath.basename(p.rstrip("/")) for p in self.fs.ls(path, detail=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _inside(self, path: str, *names: str) -> str:
        """Turn the URL or the name of a checkpoint into what the file system takes."""
        return "/".join([self.root, posixpath.basename(path), *names])
