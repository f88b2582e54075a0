"""Checkpoints in a directory that all ranks share, each of them complete or ignored.

A checkpoint is written into a hidden temporary directory and described by a manifest that holds
the size and checksum of each file. Only when all of it is durable is the directory renamed to
``step_00000100``, and only after that does the symlink ``latest`` move. A process that dies at any
point leaves the earlier checkpoints as they were and a temporary directory that nobody mistakes for
a checkpoint; the next save removes it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import attrs

from forgekit.files import is_locked, locked, make_folder, open_regular, replace, sync, write_atomic
from forgekit.ranks import CheckpointError, Ranks
from forgekit.run.checkpoints.manifest import (
    MANIFEST,
    ManifestError,
    format_manifest,
    load_manifest,
)
from forgekit.run.checkpoints.step_names import step_name, steps_among, unique

_HIDDEN = re.compile(r"\.(tmp|old)-(step_\d{8,})(-deleted)?-[0-9a-f]+")

log = logging.getLogger("forgekit")


@attrs.frozen
class LocalStorage:
    """A directory on a file system that all ranks share."""

    directory: Path

    def __str__(self) -> str:
        return str(self.directory)

    def steps(self) -> dict[int, Path]:
        """Return every ``step_*`` directory by step, committed or not."""
        named = steps_among(path.name for path in self._entries())
        return {step: self.directory / name for step, name in named.items()}

    def load_manifest(self, path: Path) -> dict[str, Any]:
        """Read the manifest of a checkpoint; raises ``ManifestError`` if it is not one."""
        return load_manifest(path)

    def opened(self, path: Path, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a checkpoint."""
        return open_regular(path / name)

    @contextmanager
    def reading(self, path: Path, folder: str) -> Iterator[tuple[Path, None]]:
        """Lock a checkpoint against retention; yield the folder of its shards.

        Yields:
            The folder, and None: torch opens local files by itself.
        """
        with locked(path, shared=True):
            yield path / folder, None

    @contextmanager
    def workspace(self, ranks: Ranks, step: int) -> Iterator[tuple[Path, str]]:
        """Make a directory for the files of a save, and remove it unless it was committed.

        Yields:
            The directory, which all ranks share, and the folder of the checkpoint in which the
            files will be; empty for the checkpoint itself.
        """
        with ExitStack() as stack:
            fresh = self._temporary(step)
            yield ranks.first(lambda: stack.enter_context(fresh)), ""

    def deliver(self, path: Path, _folder: str, _step: int, names: list[str]) -> None:
        """Sync this rank's files, which are where they belong."""
        # Not left to torch, which syncs its index before the buffer is flushed.
        for name in names:
            sync(path / name)

    def commit(self, path: Path, manifest: dict[str, Any]) -> Path:
        """Turn a written directory into a checkpoint and point ``latest`` at it."""
        final = self.directory / step_name(manifest["step"])
        # Each of these is durable before the next one starts: contents (synced by their writers),
        # manifest, the directory that lists them, the new name, latest. A crash between any two
        # leaves either a directory without a name or a checkpoint that is whole.
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

    def check_directory(self) -> None:
        """Refuse a path that cannot hold checkpoints because it is something else.

        Raises:
            CheckpointError: If it is a file or a checkpoint itself.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(
                f"{self} is a file; name the directory that holds the checkpoints."
            )
        with contextlib.suppress(ManifestError):
            load_manifest(self.directory)
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
                    load_manifest(path)
                    path.rename(final)

    def remove_leftovers(self) -> None:
        """Delete what dead processes left; directories of living ones are locked."""
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
        """Return the directories of unfinished saves, with the parts of their names."""
        folders = (p for p in self._entries() if p.is_dir() and not p.is_symlink())
        return {path: match for path in folders if (match := _HIDDEN.fullmatch(path.name))}


@contextmanager
def only_warns(what: str) -> Iterator[None]:
    """Log what goes wrong once a checkpoint is committed: it is good whatever comes after."""
    try:
        yield
    except Exception as error:
        log.warning("%s: %s", what, error)
