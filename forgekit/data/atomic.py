"""Directories that appear whole or not at all.

Whoever reads a directory written here never sees half of it: it is filled under a temporary name
beside its place, brought to the disk, and renamed. An older one stays until that moment.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_directory"]


@contextmanager
def atomic_directory(
    path: str | os.PathLike[str], *, is_replaceable: Callable[[Path], bool]
) -> Iterator[Path]:
    """Fill a new directory in the body of ``with``; it takes the name ``path`` at the end.

    If the body raises, nothing is left of the new directory and ``path`` is what it was before.

    Args:
        path: Where the directory shall appear; its parents are made.
        is_replaceable: Says of an existing, filled directory whether it may be replaced. Only the
            caller knows what it wrote itself, and nothing else may be deleted.

    Yields:
        The temporary directory to fill.

    Raises:
        FileExistsError: Before the body runs, if ``path`` is a file or must not be replaced.
    """
    path = Path(os.path.realpath(path))  # a link keeps pointing where it points
    if path.exists():
        _check_replaceable(path, is_replaceable)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of its own: what a killed writer has left behind must not stand in the way.
    hidden = f".{path.name}.{uuid.uuid4().hex[:12]}"
    new, old = path.parent / f"{hidden}.new", path.parent / f"{hidden}.old"
    new.mkdir()
    try:
        yield new
        _sync_tree(new)
        _replace(path, new, old)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _check_replaceable(path: Path, is_replaceable: Callable[[Path], bool]) -> None:
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file; name a directory that does not exist yet.")
    if any(path.iterdir()) and not is_replaceable(path):
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:5])
        raise FileExistsError(
            f"{path} holds files that were not written here ({entries}) and would be deleted. "
            "Name another directory, or empty this one."
        )


def _replace(path: Path, new: Path, old: Path) -> None:
    """Rename ``new`` to ``path``; the one that stood there keeps the name ``old``, if any."""
    had_one = path.exists()
    if had_one:
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if had_one:
            old.rename(path)
        raise
    _sync(path.parent)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
