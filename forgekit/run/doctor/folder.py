"""What a run directory's file system can do: runs lean on rename, fsync, links and locks."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from os.path import lexists
from pathlib import Path

from forgekit.run.doctor.check import Check, tried

MIB, GIB = 2**20, 2**30
WRITTEN_MIB = 64


def check_folder(directory: Path) -> Iterator[Check]:
    """Try on a directory's file system what runs do there; nothing is left behind.

    Args:
        directory: A run directory, or where one is to be; the nearest parent that is there is used.
    """
    paths = directory.absolute(), *directory.absolute().parents
    there = next(path for path in paths if lexists(path))
    if not there.is_dir():
        yield Check("writable", "bad", f"{there} is no folder. Move it, or choose another out=.")
        return
    parent = nearest(directory)
    remedy = f"Make {parent} writable, or choose another out=."
    try:
        folder = Path(tempfile.mkdtemp(prefix=".forgekit-doctor-", dir=parent))
    except OSError as error:
        yield Check("writable", "bad", f"{error.strerror}: {parent}. {remedy}")
        return
    try:
        yield from _checks(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def nearest(directory: Path) -> Path:
    """The directory, or its nearest parent that is there."""
    path = directory.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _checks(folder: Path) -> Iterator[Check]:
    other = "Checkpoints need it: choose an out= on another file system."
    yield tried("free space", lambda: _free(folder), other)
    yield tried("write speed", lambda: _speed(folder), "Make room, or choose another out=.")
    yield tried("rename", lambda: _rename(folder), f"Make room, if it is full. {other}")
    yield tried("fsync", lambda: _sync(folder), "A power cut may take what was saved last.")
    link = "Checkpoints are found without it; only `latest` is missing."
    yield tried("symlink", lambda: _link(folder), link, otherwise="note")
    lock = "See to it yourself that no second run writes into the directory."
    yield tried("lock", lambda: _lock(folder), lock, otherwise="note")


def _free(folder: Path) -> str:
    usage = shutil.disk_usage(folder)
    return f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB"


def _speed(folder: Path) -> str:
    block = os.urandom(MIB)
    start = time.perf_counter()
    with (folder / "speed").open("wb") as file:
        for _ in range(WRITTEN_MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    return f"{WRITTEN_MIB / seconds:,.0f} MiB/s, {WRITTEN_MIB} MiB written and synced"


def _rename(folder: Path) -> str:
    """Files replace files, and a folder gets its final name: how a checkpoint is committed."""
    old, new = folder / "file", folder / "file.new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    new.replace(old)
    (folder / "step.writing").mkdir()
    (folder / "step.writing" / "part").write_bytes(b"part")
    (folder / "step.writing").rename(folder / "step")
    if old.read_bytes() != b"new" or (folder / "step" / "part").read_bytes() != b"part":
        raise OSError("a renamed file has other bytes")
    return "files are replaced and folders renamed in one go"


def _sync(folder: Path) -> str:
    handle = os.open(folder, os.O_RDONLY)
    try:
        start = time.perf_counter()
        os.fsync(handle)
        return f"files and folders reach the disk, {1000 * (time.perf_counter() - start):.1f} ms"
    finally:
        os.close(handle)


def _link(folder: Path) -> str:
    (folder / "target").mkdir()
    (folder / "latest").symlink_to("target")
    if (folder / "latest").resolve() != (folder / "target").resolve():
        raise OSError("a link leads elsewhere")
    return "links lead where they should"


def _lock(folder: Path) -> str:
    path = folder / "lock"
    with path.open("w") as first, path.open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "a second run is refused"
    raise OSError("a file was locked twice")
