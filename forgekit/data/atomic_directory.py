"""Directories that appear whole or not at all.

A reader never sees half a directory: it is filled under a temporary name beside its final path,
synced to disk, and renamed. An older one stays until that moment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forgekit.inputs import path_of

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
"""Errors of file systems that cannot lock, or cannot sync a directory."""

log = logging.getLogger("forgekit")


@contextmanager
def atomic_directory(
    path: str | os.PathLike[str], *, is_replaceable: Callable[[Path], bool], key: str | None = None
) -> Iterator[Path]:
    """Fill a new directory in the body of ``with``; it is renamed to ``path`` at the end.

    If the body raises, the new directory is deleted and ``path`` is unchanged. With a ``key`` it is
    kept: the next call with the same path and key finds it and may continue; one with another key
    deletes it.

    Args:
        path: The final path; its parents are made.
        is_replaceable: Whether an existing, filled directory may be replaced. Only the caller knows
            which files it wrote, and no others may be deleted.
        key: Twelve hexadecimal digits that identify the work.

    Yields:
        The temporary directory to fill.

    Raises:
        FileExistsError: Before the body runs, if ``path`` is a file or must not be replaced, or if
            another process is writing it under the same key.
    """
    path = Path(os.path.realpath(path_of("the path", path)))  # a link stays a link
    if path.is_symlink():  # realpath has followed all others
        raise FileExistsError(f"{path} is a link that leads to itself; name another directory.")
    if path.exists():
        _check_replaceable(path, is_replaceable)
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = f".{path.name}.{key or uuid.uuid4().hex[:12]}"
    new, old = path.parent / f"{hidden}.new", path.parent / f"{hidden}.old"
    if is_locked(new):
        raise FileExistsError(
            f"another process is writing {path}. Wait until it is done, or stop it."
        )
    _clear_leftovers(path, but=new)
    new.mkdir(exist_ok=key is not None)
    with locked(new):
        try:
            yield new
            _sync_tree(new)
            replace(path, new, old)
            sync(path.parent)
        finally:
            if key is None or not (new.is_dir() and any(new.iterdir())):
                shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Lock a directory, so that others can distinguish its writer from a dead one.

    Where another process has the lock, or the file system has none, the body runs without it.

    Args:
        path: The directory.
        shared: Let others share the lock, as readers do.
        wait: Wait until no other process has it.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    lock = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, kind if wait else kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def is_locked(path: Path) -> bool:
    """Whether a living process has locked a directory."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(lock)
    return False


def sync(path: Path) -> None:
    """Sync a file or directory to disk; warn if the file system cannot sync directories."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            raise
        log.warning("%s: this file system cannot sync directories (%s)", path, error.strerror)
    finally:
        os.close(handle)


def replace(path: Path, new: Path, old: Path) -> None:
    """Rename ``new`` to ``path``, after renaming an existing directory to ``old``."""
    had_one = path.exists()
    if had_one:
        path.rename(old)  # rename cannot replace a directory that is not empty
    try:
        new.rename(path)
    except OSError:
        if had_one:
            old.rename(path)
        raise


def _clear_leftovers(path: Path, *, but: Path) -> None:
    """Delete what killed writers of ``path`` left, after restoring a directory one had renamed."""
    name = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{12}\.(new|old)")
    left = [p for p in path.parent.iterdir() if name.fullmatch(p.name) and p != but]
    if any(is_locked(p) for p in left):
        return  # another writer may be between its two renames
    for leftover in left:
        if leftover.suffix == ".old" and not path.exists():
            leftover.rename(path)
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def _check_replaceable(path: Path, is_replaceable: Callable[[Path], bool]) -> None:
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file; name a directory that does not exist yet.")
    if os.path.ismount(path) or Path.cwd().is_relative_to(path):
        what = "a mount point" if os.path.ismount(path) else "the folder that this runs in"
        raise FileExistsError(f"{path} is {what} and cannot be replaced; name a folder inside it.")
    if any(path.iterdir()) and not is_replaceable(path):
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:5])
        raise FileExistsError(
            f"{path} holds files that were not written here ({entries}) and would be deleted. "
            "Name another directory, or empty this one."
        )


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
