"""Checks of a folder and of a job's ranks, before a run depends on them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from os.path import lexists
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from forgekit.environment import identity
from forgekit.files import sync
from forgekit.mesh import build_mesh, shutdown


class Check(NamedTuple):
    """One check; "note" is something a run can do without, "BAD" would end it."""

    name: str
    outcome: Literal["ok", "note", "BAD"]
    text: str


def sections(out: Path) -> Iterator[tuple[str, Iterable[Check]]]:
    """Run all checks; in a job the first rank reports for all.

    Args:
        out: A run directory, or where one is to be.

    Yields:
        A title, and checks that are made on request; nothing on all ranks but the
        first.
    """
    rank, world, _ = identity(os.environ)
    if rank == 0:
        yield f"folder {out.absolute()}", check_folder(out)
    if world == 1:
        return
    try:
        checks = check_ranks(str(out))  # last, since ranks that do not meet wait
    finally:
        shutdown()
    if rank == 0:
        yield f"{world} ranks", checks


def check_folder(directory: Path) -> Iterator[Check]:
    """Try a run's file operations in a directory; nothing is left behind.

    Args:
        directory: A run directory, or where one is to be; the nearest parent that is there is used.
    """
    paths = directory.absolute(), *directory.absolute().parents
    there = next(path for path in paths if lexists(path))
    try:
        folder = Path(tempfile.mkdtemp(prefix=".forgekit-doctor-", dir=there))
    except OSError as error:
        remedy = "Make it a folder that can be written, or choose another out=."
        yield Check("writable", "BAD", f"{error.strerror}: {there}. {remedy}")
        return
    other = "Make room, if it is full. Checkpoints need it: choose an out= on another file system."
    lock = "Make sure that no second run writes into the directory."
    try:
        yield _tried("rename", lambda: _rename(folder), other)
        yield _tried("lock", lambda: _lock(folder), lock, otherwise="note")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check_ranks(directory: str, device: str | None = None) -> list[Check]:
    """All-reduce and look at a shared folder; every rank calls it.

    Args:
        directory: A run directory, which all ranks have to see.
        device: As for ``build_mesh``.

    Returns:
        What was found, the same on every rank.
    """
    mesh = build_mesh(device=device)
    return [*_sums(mesh.device_type), _shared(Path(directory).absolute())]


def _tried(
    name: str,
    look: Callable[[], str],
    remedy: str,
    otherwise: Literal["note", "BAD"] = "BAD",
) -> Check:
    try:
        return Check(name, "ok", look())
    except Exception as error:  # drivers, networks and file systems raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return Check(name, otherwise, f"{reason}. {remedy}")


def _rename(folder: Path) -> str:
    """Check renames of files and folders, and that both are synced."""
    new, step = folder / "file.new", folder / "step.writing"
    (folder / "file").write_bytes(b"old")
    new.write_bytes(bytes(2**22))
    sync(new)
    new.replace(folder / "file")
    step.mkdir()
    step.rename(folder / "step")
    sync(folder)
    if (folder / "file").stat().st_size != 2**22 or not (folder / "step").is_dir():
        raise OSError("a renamed file has other bytes")
    return "files are replaced, folders renamed, and both synced"


def _lock(folder: Path) -> str:
    path = folder / "lock"
    with path.open("w") as first, path.open("w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "a second run is refused"
    raise OSError("a file was locked twice")


def _sums(kind: str) -> Iterator[Check]:
    for device in dict.fromkeys((kind, "cpu")):
        total = torch.ones((), device=device)
        dist.all_reduce(total)
        is_right = total.item() == dist.get_world_size()
        text = f"{dist.get_world_size()} ranks added ones up to {total.item():g}"
        text += "" if is_right else ". Update the driver and torch."
        yield Check(f"sum on {device}", "ok" if is_right else "BAD", text)


def _shared(folder: Path) -> Check:
    """Whether every rank sees a file written by the first."""
    while not folder.is_dir():
        folder = folder.parent
    names: list[str | None] = [f".forgekit-doctor-{uuid.uuid4().hex}"]
    dist.broadcast_object_list(names)
    file, rank = folder / str(names[0]), dist.get_rank()
    with suppress(OSError):  # the other ranks wait for it even if it cannot write
        if rank == 0:
            file.touch()
    dist.barrier()
    seen = torch.zeros(dist.get_world_size())
    seen[rank] = file.exists()
    dist.all_reduce(seen)  # no rank leaves before all have looked
    if rank == 0:
        file.unlink(missing_ok=True)
    if seen.all():
        return Check("shared folder", "ok", f"{len(seen)} of {len(seen)} ranks see {folder}")
    blind = ", ".join(str(rank) for rank, value in enumerate(seen) if not value)
    remedy = "Make it writable, or choose an out= that all machines share."
    text = f"ranks {blind} do not see a file that rank 0 writes into {folder}. {remedy}"
    return Check("shared folder", "BAD", text)
