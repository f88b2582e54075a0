"""``index.json`` of a token file: which files there are, what is in them, and what wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgekit.data.corpus.numbers import VERSION

__all__ = ["INDEX", "read_index", "write_index"]

INDEX = "index.json"
MAGIC = "forgekit-tokens"
DTYPES = ("uint16", "uint32")

_ENTRIES: dict[str, type] = {
    "dtype": str,
    "vocab_size": int,
    "eos_id": int,
    "tokens": int,
    "documents": int,
    "shards": list,
    "fingerprint": str,
    "metadata": dict,
}


def write_index(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the index of a token file whose other files are complete."""
    index = {"magic": MAGIC, "version": VERSION, **entries}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read_index(folder: Path) -> dict[str, Any]:
    """Read an index and check that it is one.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, foreign, or of another version.
    """
    file = folder / INDEX
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} is not a token file: it has no {INDEX}. "
            "forgekit.write_tokens and `forgekit prepare` make one."
        )
    try:
        index = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}). Write the token file again.") from None
    magic = index.get("magic") if isinstance(index, dict) else None
    if magic != MAGIC:
        raise ValueError(
            f'{file} has magic {magic!r}, not "{MAGIC}": it is no token file\'s index.'
        )
    if index.get("version") != VERSION:
        raise ValueError(
            f"{file} is version {index.get('version')}; this forgekit reads version {VERSION}. "
            "Write the token file again, or use the forgekit that wrote it."
        )
    _check_entries(file, index)
    return index


def _check_entries(file: Path, index: dict[str, Any]) -> None:
    for name, kind in _ENTRIES.items():
        if not isinstance(index.get(name), kind):
            raise ValueError(
                f'{file} has {index.get(name)!r} as "{name}"; it must be of type {kind.__name__}. '
                "Write the token file again."
            )
    if index["dtype"] not in DTYPES:
        raise ValueError(
            f'{file} has dtype "{index["dtype"]}"; token ids are {" or ".join(DTYPES)}. '
            "Write the token file again."
        )
    if sum(index["shards"]) != index["tokens"]:
        raise ValueError(
            f"{file} names {index['tokens']:,} tokens and shards of {sum(index['shards']):,} in "
            "all. Write the token file again."
        )
