"""Directories that appear whole or not at all.

Whoever reads a directory written here never sees half of it: it is filled under a temporary name
beside its place, brought to the disk, and renamed. An older one stays until that moment.
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

__all__ = ["UNSUPPORTED", "atomic_directory", "held", "is_held", "sync"]

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
"""What file systems answer that cannot lock, or cannot sync a directory."""

log = logging.getLogger("forgekit")


@contextmanager
def atomic_directory(
    path: str | os.PathLike[str], *, is_replaceable: Callable[[Path], bool], key: str | None = None
) -> Iterator[Path]:
    """Fill a new directory in the body of ``with``; it takes the name ``path`` at the end.

    If the body raises, nothing is left of the new directory and ``path`` is what it was before.
    Under a ``key`` what the body has filled is kept, and the next one with the same key, for the
    same ``path``, finds it and may go on; one with another key clears it.

    Args:
        path: Where the directory shall appear; its parents are made.
        is_replaceable: Says of an existing, filled directory whether it may be replaced. Only the
            caller knows what it wrote itself, and nothing else may be deleted.
        key: Twelve hexadecimal digits that name the work.

    Yields:
        The temporary directory to fill.

    Raises:
        FileExistsError: Before the body runs, if ``path`` is a file or must not be replaced, or if
            another process is at the same work.
    """
    path = Path(os.path.realpath(path_of("the path", path)))  # a link keeps pointing as it does
    if path.is_symlink():  # realpath has followed all others
        raise FileExistsError(f"{path} is a link that leads to itself; name another directory.")
    if path.exists():
        _check_replaceable(path, is_replaceable)
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = f".{path.name}.{key or uuid.uuid4().hex[:12]}"
    new, old = path.parent / f"{hidden}.new", path.parent / f"{hidden}.old"
    if is_held(new):
        raise FileExistsError(
            f"another process is writing {path}. Wait until it is done, or stop it."
        )
    _clear_leftovers(path, but=new)
    new.mkdir(exist_ok=key is not None)
    with held(new):
        try:
            yield new
            _sync_tree(new)
            _replace(path, new, old)
        finally:
            if key is None or not (new.is_dir() and any(new.iterdir())):
                shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def held(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock a directory while it is written, so that others can tell it from a dead writer's.

    Args:
        path: The directory.
        shared: Let others hold it too, as those who read it do.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    lock = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems cannot lock; then two writers must not share a directory.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of a directory."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def sync(path: Path) -> None:
    """Bring a file or directory to the disk; warn where directories cannot be."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED or not path.is_dir():
            raise
        log.warning("%s: this file system cannot sync directories (%s)", path, error.strerror)
    finally:
        os.close(handle)


def _clear_leftovers(path: Path, *, but: Path) -> None:
    """Delete what killed writers of ``path`` left, after putting back what one had set aside."""
    name = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{12}\.(new|old)")
    left = [p for p in path.parent.iterdir() if name.fullmatch(p.name) and p != but]
    if any(is_held(p) for p in left):
        return  # another writer is between its two renames, or will be
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
    sync(path.parent)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
