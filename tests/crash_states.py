"""Every directory that a crash of the machine may leave while something is written into it.

``recorded`` notes what happens under a root: each namespace change and each sync, with the content
of all files before and after it, in any number of processes. What native code writes is seen as
well, at the next change; a sync by native code is not seen, which only makes the replay stricter.

``replay`` builds the states that a journaling file system may show after a crash. For each prefix
of the operations:

- a file's content is durable as it was when it was last synced; what came after may be there, be
  lost, or be torn; a file that was never synced may be empty;
- a new name, a new folder, a rename or a deletion is durable once its folder was synced. Those
  before may be lost one by one, in any order in which they could have been applied.

Each state is loaded by the caller. What was reported as written must be there, or what was begun
after it; before anything was reported, nothing may be there.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import pickle
import stat
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs

CHANGES = (
    *("rename", "replace", "unlink", "remove", "rmdir", "mkdir", "symlink", "link", "truncate"),
    "ftruncate",
)
SYNCS = ("fsync", "fdatasync")
MOST_SUBSETS = 6
"""Up to so many changes that are not durable, every subset of them is tried."""

Entry = tuple[str, int, bytes]
"""Kind (dir, file, link), inode, and the content or the target."""
Key = tuple[int, str]
"""The folder's identity and the name in it."""


@attrs.frozen
class Recorder:
    """Appends what happens under a root to a log that several processes share."""

    root: Path
    log: Path
    lock: Any = attrs.field(factory=threading.RLock)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Note what is there, and keep other threads and ranks from changing it meanwhile."""
        with self.lock, open(f"{self.log}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.note("tree", snapshot(self.root))
            yield

    def note(self, kind: str, value: Any) -> None:
        """Append one record."""
        with self.log.open("ab") as file:
            pickle.dump((kind, value), file)

    def mark(self, kind: str, value: Hashable) -> None:
        """Say that something was ``begun`` or ``reported``, by the value that loading returns."""
        with self.alone():
            self.note(kind, value)

    def change(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a function of ``os`` and note what it changed."""
        with self.alone():
            result = function(*args, **options)
            self.note("tree", snapshot(self.root))
        return result

    def sync(self, function: Callable[..., Any], handle: Any) -> None:
        """Sync, and note what the file holds at this moment."""
        with self.alone():
            function(handle)
            number = handle if isinstance(handle, int) else handle.fileno()
            self.note("sync", os.fstat(number).st_ino)


@contextmanager
def recorded(root: Path, log: Path) -> Iterator[Recorder]:
    """Record this process's changes under a root; the log is outside of it."""
    recorder = Recorder(root, log)
    with mock.patch.multiple(
        os,
        **{n: functools.partial(recorder.change, getattr(os, n)) for n in CHANGES},
        **{n: functools.partial(recorder.sync, getattr(os, n)) for n in SYNCS},
    ):
        yield recorder


def snapshot(root: Path) -> dict[str, Entry]:
    """Read all that is under a root, the root itself as ``"."``."""
    tree: dict[str, Entry] = {".": ("dir", root.stat().st_ino, b"")}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            path = Path(folder, name)
            try:
                info = path.lstat()
                kind, content = "dir", b""
                if stat.S_ISLNK(info.st_mode):
                    kind, content = "link", os.fsencode(os.readlink(path))
                elif stat.S_ISREG(info.st_mode):
                    kind, content = "file", path.read_bytes()
            except FileNotFoundError:  # another rank's native code
                continue
            tree[str(path.relative_to(root))] = (kind, info.st_ino, content)
    return tree


@attrs.define
class Change:
    """Names that changed at once; durable when all their folders were synced."""

    names: list[tuple[Key, int | None, int | None]]
    unsynced: set[int]

    def apply(self, entries: dict[Key, int]) -> bool:
        """Change the names, if all are as it found them; return whether they are."""
        if is_there := all(entries.get(key) == before for key, before, _ in self.names):
            for key, _, after in self.names:
                entries.pop(key, None)
                if after is not None:
                    entries[key] = after
        return is_there


@attrs.define
class Disk:
    """What is in memory and what is durable."""

    kinds: dict[int, str] = attrs.field(factory=dict)
    data: dict[int, bytes] = attrs.field(factory=dict)
    synced: dict[int, bytes] = attrs.field(factory=dict)
    now: dict[Key, int] = attrs.field(factory=dict)
    base: dict[Key, int] = attrs.field(factory=dict)
    changes: list[Change] = attrs.field(factory=list)
    live: dict[int, int] = attrs.field(factory=dict)  # inodes are used again
    ids: Iterator[int] = attrs.field(factory=itertools.count)

    def see(self, tree: dict[str, Entry], *, first: bool = False) -> None:
        """Take over a snapshot; what changed since the one before is not durable."""
        inodes = {inode for _, inode, _ in tree.values()}
        self.live = {inode: own for inode, own in self.live.items() if inode in inodes}
        old = set(self.live.values())
        for kind, inode, content in tree.values():
            own = self.live.setdefault(inode, -1)
            if own < 0:
                own = self.live[inode] = next(self.ids)
            self.kinds[own], self.data[own] = kind, content
        where = {path: self.live[inode] for path, (_, inode, _) in tree.items()}
        names = {
            (where[os.path.dirname(path) or "."], os.path.basename(path)): own
            for path, own in where.items()
            if path != "."
        }
        if first:
            self.base, self.synced = dict(names), dict(self.data)
        else:
            self._add(names, old)
        self.now = names

    def _add(self, names: dict[Key, int], old: set[int]) -> None:
        keys = [k for k in names.keys() | self.now.keys() if names.get(k) != self.now.get(k)]
        moved = [(k, self.now.get(k), names.get(k)) for k in keys]
        # What was made since is independent of the rest; what was renamed changed at once.
        groups = [[one] for one in moved if one[2] is not None and one[2] not in old]
        if together := [one for one in moved if one[2] is None or one[2] in old]:
            groups.append(together)
        self.changes += [Change(group, {key[0] for key, _, _ in group}) for group in groups]

    def sync(self, inode: int) -> None:
        """Make a file's content, or a folder's names, durable."""
        if (own := self.live.get(inode)) is None:
            return  # outside of the root
        if self.kinds[own] == "file":
            self.synced[own] = self.data[own]
        for change in self.changes:
            change.unsynced.discard(own)
        while self.changes and not self.changes[0].unsynced:
            self.changes.pop(0).apply(self.base)

    def trees(self) -> Iterator[dict[str, tuple[str, bytes]]]:
        """Build every directory that a crash now may leave."""
        for entries in self._namespaces():
            reachable = dict(self._paths(entries))
            dirty = {
                own
                for own in reachable.values()
                if self.kinds[own] == "file" and self.synced.get(own, b"") != self.data[own]
            }
            halves = {own: self.data[own][: len(self.data[own]) // 2] for own in dirty}
            lost = {own: self.synced.get(own, b"") for own in dirty}
            variants = [{}, lost, halves] if dirty else [{}]
            for content in [*variants, *({own: lost[own]} for own in dirty)]:
                yield {
                    path: (self.kinds[own], content.get(own, self.data[own]))
                    for path, own in reachable.items()
                }

    def _namespaces(self) -> Iterator[dict[Key, int]]:
        loose = [number for number, change in enumerate(self.changes) if change.unsynced]
        sizes = range(len(loose) + 1)
        if len(loose) > MOST_SUBSETS:
            sizes = (0, 1, len(loose) - 1, len(loose))
        chosen = [set(some) for n in sizes for some in itertools.combinations(loose, n)]
        chosen += [set(loose[:n]) for n in range(len(loose)) if n not in sizes]
        for some in chosen:
            entries = dict(self.base)
            for number, change in enumerate(self.changes):
                is_durable = not change.unsynced
                if (number in some or is_durable) and not change.apply(entries) and is_durable:
                    break  # what it needs is durable too
            else:
                yield entries

    def _paths(self, entries: dict[Key, int], folder: int = 0, at: str = "") -> Iterator[Any]:
        for (parent, name), own in entries.items():
            if parent == folder:
                yield at + name, own
                yield from self._paths(entries, own, f"{at}{name}/")


def replay(log: Path, scratch: Path, load: Callable[[Path], Hashable]) -> int:
    """Load every state that a crash may leave, and compare it with what had been reported.

    Args:
        log: What was recorded.
        scratch: A folder to build the states in.
        load: Loads from a root; returns a value as given to ``mark``, None for nothing.

    Returns:
        The number of different states.

    Raises:
        AssertionError: If a state loads anything but what was reported last or begun since.
    """
    disk, allowed, results, seen = Disk(), {None}, {}, None
    for number, (kind, value) in enumerate(_records(log)):
        if kind == "begun":
            allowed = allowed | {value}
        elif kind == "reported":
            allowed = {value}
        elif kind == "sync":
            disk.sync(value)
        elif value == seen:
            continue  # with the same states as before
        else:
            disk.see(value, first=number == 0)
            seen = value
        for tree in disk.trees():
            key = pickle.dumps(sorted(tree.items()))
            if key not in results:
                results[key] = _load(tree, scratch, load)
            assert results[key] in allowed, (
                f"after {number} operations a crash may leave {sorted(tree)}, which loads "
                f"{results[key]!r} and not one of {allowed}"
            )
    return len(results)


def _records(log: Path) -> Iterator[tuple[str, Any]]:
    with log.open("rb") as file:
        while file.peek(1):
            yield pickle.load(file)


def _load(tree: dict[str, tuple[str, bytes]], scratch: Path, load: Any) -> Hashable:
    _clear(scratch, {name for name, (kind, _) in tree.items() if kind == "dir"})
    for name, (kind, content) in tree.items():
        path = scratch / name
        if kind == "dir":
            path.mkdir(exist_ok=True)
        elif kind == "link":
            path.symlink_to(os.fsdecode(content))
        else:
            path.write_bytes(content)
    try:
        return load(scratch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _clear(scratch: Path, kept: set[str]) -> None:
    """Delete all but some folders: deleting a folder takes longer than all the rest of a state."""
    scratch.mkdir(exist_ok=True)
    for folder, folders, files in os.walk(scratch, topdown=False):
        for name in files + folders:
            path = Path(folder, name)
            if name in files or path.is_symlink():
                path.unlink()
            elif str(path.relative_to(scratch)) not in kept:
                path.rmdir()
