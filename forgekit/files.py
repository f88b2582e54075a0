"""Files and directories that a crash leaves whole: the old content or the new, never a part.

A directory is filled under a temporary name beside its final path, synced to disk, and exchanged
with an older one. A file is written beside its final path, synced and renamed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from forgekit.checks import path_of

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK)
"""Error numbers of file systems without locks, exchange of names, or sync of directories."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of linux/fs.h

log = logging.getLogger("forgekit")


@contextmanager
def atomic_directory(
    path: str | os.PathLike[str], *, is_replaceable: Callable[[Path], bool], key: str | None = None
) -> Iterator[Path]:
    """Yield a new directory to fill; it is renamed to ``path`` at the end of the block.

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
    if path.exists():
        _check_replaceable(path, is_replaceable)
    make_folder(path.parent)
    hidden = f".{path.name}.{key or uuid.uuid4().hex[:12]}"
    new, old = path.parent / f"{hidden}.new", path.parent / f"{hidden}.old"
    if is_locked(new):
        raise FileExistsError(
            f"another process is writing {path}. Wait until it is done, or stop it."
        )
    clear_leftovers(path.parent, re.escape(path.name), but=new)
    new.mkdir(exist_ok=key is not None)
    with locked(new):
        try:
            yield new
            _sync_tree(new)
            replace(path, new, old)
        except BaseException:
            if key is None or not (new.is_dir() and any(new.iterdir())):
                shutil.rmtree(new, ignore_errors=True)
            raise
        for previous in (new, old):  # after an exchange it is at the new one's name
            shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Lock a directory, so that others can distinguish its writer from a dead one.

    Where another process has the lock, or the file system has none, the body runs without it.

    Args:
        path: The directory.
        shared: Let others share the lock, as readers do.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    lock = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def is_locked(path: Path) -> bool:
    """Whether a living process has locked a directory or a file."""
    with contextlib.suppress(OSError):  # it is not there, or the file system has no locks
        lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
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


def make_folder(path: Path) -> None:
    """Make a directory and its parents, durably: each parent, which holds the name, is synced."""
    if not path.is_dir():
        if not path.parent.exists():
            make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def replace(path: Path, new: Path, old: Path) -> None:
    """Rename ``new`` to ``path``, durably; a previous directory is left at ``new`` or ``old``.

    Both are exchanged at once, so that one of them always has the name. Where the file system
    cannot do that, the older one is renamed to ``old`` first; ``restore_replaced`` puts it back if
    the process dies in between.
    """
    if not path.exists():
        new.rename(path)
    elif not _exchange(path, new):
        path.rename(old)  # rename cannot replace a directory that is not empty
        try:
            new.rename(path)
        except OSError:
            old.rename(path)
            raise
    sync(path.parent)


def restore_replaced(path: Path) -> Path:
    """Return ``path``, after restoring a directory whose replacement died half-way."""
    if not path.exists():
        final = Path(os.path.realpath(path))
        for old in final.parent.glob(f".{glob.escape(final.name)}.*.old"):
            if not is_locked(old.with_suffix(".new")):  # else its writer is alive
                with contextlib.suppress(OSError):  # another rank was faster
                    old.rename(final)
    return path


def clear_leftovers(folder: Path, names: str, *, but: Path | None = None) -> None:
    """Delete the leftovers of killed writers, after restoring directories that they had renamed.

    Args:
        folder: The folder.
        names: Of the directories that they were writing; a regular expression.
        but: One that stays.
    """
    hidden = re.compile(rf"\.({names})\.[0-9a-f]{{12}}\.(new|old)")
    paths = [path for path in folder.iterdir() if path != but]
    left = {path: match[1] for path in paths if (match := hidden.fullmatch(path.name))}
    alive = [path for path in left if is_locked(path.with_suffix(".new"))]
    for name in set(left.values()) - {left[path] for path in alive}:
        # Else its writer may be between its two renames.
        restore_replaced(folder / name)
    for path in left.keys() - set(alive):
        shutil.rmtree(path, ignore_errors=True)  # not what a link points to


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file; raise for pipes and devices, whose reading may never end.

    Raises:
        OSError: If it cannot be opened, or is not a file.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait for one.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Read a whole file; see ``open_regular``."""
    with open_regular(Path(path)) as file:
        return file.read()


def write_atomic(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file so that readers, and a crash, find the old content or the new, never a part.

    Which of the two a crash of the machine leaves is settled by ``sync(path.parent)`` only: no
    caller but a checkpoint's depends on it, and that one syncs its folder.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def overwrite(file: FileIO, start: int, new: bytes, old: bytes = b"") -> None:
    """Overwrite the end of a file: it holds all of ``new`` or the old content, never a part.

    A full disk takes the first bytes of a write and refuses the rest. What was written then goes
    away again, so that the next writer does not begin in the midst of a line.

    Args:
        file: Opened unbuffered for reading and writing.
        start: Where the end begins.
        new: What is to stand there.
        old: What stands there; it is put back if ``new`` does not fit.

    Raises:
        OSError: If ``new`` could not be written.
    """
    try:
        _write_all(file, start, new)
    except OSError:
        _write_all(file, start, old)
        raise


def append_lines(path: str | os.PathLike[str], lines: Sequence[str]) -> None:
    """Append lines durably, all or none; a torn last line gets a newline first."""
    path = Path(path)
    if is_new := not path.exists():
        path.touch()
    with path.open("r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        is_torn = file.read(1) not in (b"", b"\n")  # by a crash, or by a version before this one
        content = "".join([*(["\n"] if is_torn else []), *(f"{line}\n" for line in lines)])
        overwrite(file, end, content.encode())
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names at once; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = [_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second)]
    if rename is None or rename(*names, _RENAME_EXCHANGE) == 0:
        return rename is not None
    if (number := ctypes.get_errno()) in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(second), None, str(first))


def _write_all(file: FileIO, start: int, content: bytes) -> None:
    file.seek(start)
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    file.truncate()


def _check_replaceable(path: Path, is_replaceable: Callable[[Path], bool]) -> None:
    if not path.is_dir():
        raise FileExistsError(f"{path} is a file; choose a directory that does not exist yet.")
    if any(path.iterdir()) and not is_replaceable(path):
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:5])
        raise FileExistsError(
            f"{path} contains files that were not written here ({entries}) and would be deleted. "
            "Choose another directory, or empty this one."
        )


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))
