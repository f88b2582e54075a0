"""Bins kept on disk, so that they are made once and no rank holds them in memory.

Where they lie follows from what they are made of, so what is found is never made from something
else; every byte is compared with a checksum before it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forgekit.data.atomic_directory import atomic_directory
from forgekit.data.corpus.token_files import TokenFile
from forgekit.data.packing.bins import Bins, bins_files, open_bins, save_bins
from forgekit.data.packing.pack import LongDocuments, PackingMethod, pack
from forgekit.inputs import check_integers, path_of

__all__ = ["cached_bins"]

PACKING = 1
"""Counts up when ``pack`` gives other bins for the same arguments."""


def cached_bins(
    folder: str | os.PathLike[str],
    documents: TokenFile | ArrayLike,
    capacity: int,
    *,
    method: PackingMethod = "best_fit",
    group: ArrayLike | None = None,
    align: int = 1,
    long: LongDocuments = "split",
) -> Bins:
    """Open the bins that ``pack`` makes of these arguments, and make them if they are not there.

    Each set of arguments has a directory of its own, named by a hash of the tokens, the tokenizer
    beside them, and every argument; there is no seed, because packing draws nothing. A directory
    that is damaged, or was made from something else, is made anew. It appears whole or not at all;
    of several processes that ask at once, one packs and the others wait for it (on a file system
    that cannot lock, let one process ask before the others start).

    Args:
        folder: Where the bins of all arguments lie. Not in a token file's own directory, which
            could not be replaced then.
        documents: A token file, or ``[documents]`` lengths.
        capacity: Places in a bin, as for ``pack``.
        method: As for ``pack``.
        group: As for ``pack``.
        align: As for ``pack``.
        long: As for ``pack``.

    Returns:
        The bins, mapped from the disk.

    Raises:
        FileExistsError: If files that were not written here stand where they belong.
        ValueError: As for ``pack``.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bins = cached_bins(folder, [3, 6, 4, 2, 9], capacity=8)
        ...     len(bins), cached_bins(folder, [3, 6, 4, 2, 9], capacity=8).path == bins.path
        (3, True)
    """
    check_integers(capacity=(capacity, 1), align=(align, 1))
    options: dict[str, Any] = {"method": method, "align": align, "long": long}
    key = _key(documents, capacity, group, options)
    path = path_of("folder", folder) / f"bins-{key[:16]}"
    if (found := _find(path, key)) is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with _turn(path.parent):
        if (found := _find(path, key)) is not None:
            return found
        lengths = np.diff(documents.offsets) if isinstance(documents, TokenFile) else documents
        bins = pack(lengths, capacity, group=group, **options)
        with atomic_directory(path, is_replaceable=_is_ours) as new:
            save_bins(bins, new, {"key": key})
    return open_bins(path, key=key)


def _find(path: Path, key: str) -> Bins | None:
    """Open what is there; None if there is nothing, or nothing that can be trusted."""
    try:
        return open_bins(path, key=key)
    except (OSError, ValueError):
        return None


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait until no other process packs into this folder. A killed one's turn ends with it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_ours(path: Path) -> bool:
    return bins_files() >= {entry.name for entry in path.iterdir()}


def _key(
    documents: TokenFile | ArrayLike, capacity: int, group: ArrayLike | None, options: Any
) -> str:
    facts = {
        "packing": PACKING,
        "content": _content(documents),
        "tokenizer": _tokenizer(documents),
        "capacity": capacity,
        "group": None if group is None else _hash(group),
        **options,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _content(documents: TokenFile | ArrayLike) -> str:
    return documents.fingerprint if isinstance(documents, TokenFile) else _hash(documents)


def _tokenizer(documents: TokenFile | ArrayLike) -> str | None:
    """Hash the tokenizer that ``forgekit prepare`` puts beside the tokens."""
    if not isinstance(documents, TokenFile):
        return None
    file = documents.path / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _hash(values: ArrayLike) -> str:
    array = np.ascontiguousarray(values)
    return hashlib.sha256(
        f"{array.dtype.str} {array.shape} ".encode() + array.tobytes()
    ).hexdigest()
