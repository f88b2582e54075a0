"""Bins kept on disk, so that they are made once and no rank holds them in memory.

Their path is a hash of what they are made from, so existing bins are never those of something else.
Every byte is compared with a checksum before use.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from forgekit.data.corpus.token_files import TokenFile
from forgekit.data.packing.bins import Bins, bins_files, open_bins, save_bins
from forgekit.data.packing.pack import LongDocuments, PackingMethod, pack
from forgekit.files import atomic_directory, locked
from forgekit.inputs import check_integers, path_of

PACKING = 1
"""Incremented when ``pack`` gives other bins for the same arguments."""


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
    """Open the bins that ``pack`` makes of these arguments; make them if they do not exist.

    Each set of arguments has its own directory, named by a hash of the tokens, the tokenizer beside
    them, and every argument; there is no seed, because packing draws no random numbers. A damaged
    directory is written again. It appears whole or not at all. Of several processes that call this
    at once, one packs and the others wait (on a file system without locks, let one process call it
    before the others start).

    Args:
        folder: The directory of the bins of all arguments. Not inside a token file's directory,
            which could then not be replaced.
        documents: A token file, or ``[documents]`` lengths.
        capacity: Positions in a bin, as for ``pack``.
        method: As for ``pack``.
        group: As for ``pack``.
        align: As for ``pack``.
        long: As for ``pack``.

    Returns:
        The bins, mapped from disk.

    Raises:
        FileExistsError: If their directory holds files that were not written here.
        ValueError: As for ``pack``.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     bins = cached_bins(folder, [3, 6, 4, 2, 9], capacity=8)
        ...     len(bins), cached_bins(folder, [3, 6, 4, 2, 9], capacity=8).path == bins.path
        (3, True)
    """
    check_integers(capacity=(capacity, 1), align=(align, 1))
    capacity, align = int(capacity), int(align)  # of numpy or torch JSON takes none
    options: dict[str, Any] = {"method": method, "align": align, "long": long}
    key = _key(documents, capacity, group, options)
    path = path_of("folder", folder) / f"bins-{key[:16]}"
    if (found := _find(path, key)) is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.parent, wait=True):  # until no other process packs into this folder
        if (found := _find(path, key)) is not None:
            return found
        lengths = np.diff(documents.offsets) if isinstance(documents, TokenFile) else documents
        bins = pack(lengths, capacity, group=group, **options)
        with atomic_directory(path, is_replaceable=_is_ours) as new:
            save_bins(bins, new, {"key": key})
    return open_bins(path, key=key)


def _find(path: Path, key: str) -> Bins | None:
    """Open existing bins; None if there are none, or they are damaged or of something else."""
    try:
        return open_bins(path, key=key)
    except (OSError, ValueError):
        return None


def _is_ours(path: Path) -> bool:
    return bins_files() >= {entry.name for entry in path.iterdir()}


def _key(
    documents: TokenFile | ArrayLike, capacity: int, group: ArrayLike | None, options: Any
) -> str:
    tokenizer = None
    if isinstance(documents, TokenFile):
        file = documents.path / "tokenizer.json"  # where `forgekit prepare` writes it
        tokenizer = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    facts = {
        "packing": PACKING,
        "content": documents.fingerprint if isinstance(documents, TokenFile) else _hash(documents),
        "tokenizer": tokenizer,
        "capacity": capacity,
        "group": None if group is None else _hash(group),
        **options,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _hash(values: ArrayLike) -> str:
    array = np.ascontiguousarray(values)
    described = f"{array.dtype.str} {array.shape} ".encode()
    return hashlib.sha256(described + array.tobytes()).hexdigest()
