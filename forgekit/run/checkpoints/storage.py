"""Where checkpoints are kept: a directory that all ranks share, or a URL; the same words for both.

Two classes with the same methods. A save fills a *workspace*, each rank its own files, delivers
them, and commits. What counts as a checkpoint, and what a crash leaves, is the business of
``commit.py`` and ``remote_storage.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, overload

import attrs

import forgekit.run.checkpoints.commit as files
from forgekit.data.atomic_directory import held
from forgekit.run.checkpoints.commit import Workspace
from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.run.checkpoints.manifest import open_regular
from forgekit.run.checkpoints.ranks import Ranks
from forgekit.run.checkpoints.retention import Keep

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystem

    from forgekit.run.checkpoints.remote_storage import Remote

__all__ = ["latest_checkpoint"]

Place: TypeAlias = "Disk | Remote"
Checkpoint: TypeAlias = Any
"""The directory of a checkpoint on a ``Disk``, its URL on a ``Remote``."""


@attrs.frozen
class Disk:
    """A directory on a file system that all ranks share."""

    directory: Path

    def __str__(self) -> str:
        return str(self.directory)

    def committed(self) -> dict[int, Path]:
        """Return the checkpoints by step."""
        return files.committed(self.directory)

    def torn(self) -> dict[Path, str]:
        """Return what looks like a checkpoint and does not count, after putting back what does."""
        files.put_back(self.directory)
        return files.torn(self.directory)

    def check_empty(self) -> None:
        """Refuse to take a directory for that of a new run when it is something else.

        A save renames a whole checkpoint into place, so a bad manifest was damaged later.

        Raises:
            CheckpointError: If it is a file or a checkpoint itself, or holds damaged ones only.
        """
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(
                f"{self} is a file; name the directory that holds the checkpoints."
            )
        if files.read_manifest(self.directory) is not None:
            raise CheckpointError(
                f"{self} is a checkpoint itself; name the directory that holds it, "
                f"{self.directory.parent}, and choose it with step=."
            )
        for torn, fault in self.torn().items():
            if os.path.lexists(torn / files.MANIFEST):
                raise CheckpointError(
                    f"no whole checkpoint to load: {torn / files.MANIFEST} is damaged. Restore it, "
                    f"or delete {torn} to start over. It {fault}."
                )

    def manifest(self, path: Path) -> dict[str, Any] | None:
        """Read a checkpoint's manifest; None if it is missing or not one."""
        return files.read_manifest(path)

    def find_damage(self, path: Path, name: str, expected: dict[str, Any]) -> str | None:
        """Compare a file with its manifest entry; return what is wrong, or None."""
        file = path / name
        size, opened = lambda: file.stat().st_size, lambda: open_regular(file)
        return files.find_damage(file, expected, size, opened)

    def opened(self, path: Path, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a checkpoint."""
        return open_regular(path / name)

    @contextmanager
    def reading(self, path: Path, folder: str) -> Iterator[tuple[Path, FileSystem | None]]:
        """Keep a checkpoint while it is read.

        Yields:
            Where its shards are, and what torch reads them through; None for its own way.
        """
        with held(path, shared=True):  # nobody's retention deletes it meanwhile
            yield path / folder, None

    @contextmanager
    def workspace(self, ranks: Ranks, step: int) -> Iterator[Workspace]:
        """Make room for a checkpoint, and clear what was not committed in the end."""
        with ExitStack() as stack:
            fresh = files.temporary_directory(self.directory, step)
            yield Workspace(ranks.first(lambda: stack.enter_context(fresh)))

    def deliver(self, workspace: Workspace, step: int, names: list[str]) -> None:
        """Bring this rank's files to where they belong: they are, all share the directory."""

    def commit(self, workspace: Workspace, manifest: dict[str, Any]) -> Path:
        """Make a checkpoint of what all ranks delivered, as the last act."""
        return files.commit(workspace.path, manifest)

    def retain(self, keep: Keep | None, saved: int) -> None:
        """Delete the checkpoints that a rule does not name."""
        files.retain(self.directory, keep, saved)

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints after a step, to which a run was rolled back."""
        files.discard_after(self.directory, step)


def place_of(directory: str | os.PathLike[str]) -> Place:
    """Find what keeps the checkpoints of a directory or a URL.

    Raises:
        ValueError: If it is a URL that became a path.
        ImportError: If it is a URL and fsspec, or what it needs for it, is not installed.
    """
    if not files.is_url(directory):
        return Disk(Path(directory))
    from forgekit.run.checkpoints.remote_storage import Remote

    return Remote.at(os.fspath(directory))


@overload
def latest_checkpoint(directory: Path) -> Path | None: ...


@overload
def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | str | None: ...


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | str | None:
    """Find the newest committed checkpoint by looking, not by trusting the ``latest`` symlink.

    Args:
        directory: What ``checkpoint_save`` was given.

    Returns:
        The directory with the highest step whose manifest is there, or None; for a URL its URL.

    Examples:
        >>> latest_checkpoint("/nowhere") is None
        True
    """
    found: dict[int, Any] = place_of(directory).committed()
    return found[max(found)] if found else None
