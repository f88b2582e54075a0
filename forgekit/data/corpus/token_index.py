"""``index.json`` of a token file: which files there are, what is in them, and what wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgekit.data.corpus.number_files import VERSION
from forgekit.inputs import LARGEST, brief, parse_json

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

_RANGES = {
    "vocab_size": (1, 2**32),
    "eos_id": (0, 2**32 - 1),
    "tokens": (1, LARGEST),
    "documents": (1, LARGEST),
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
        index = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}). Write the token file again.") from None
    magic = index.get("magic") if isinstance(index, dict) else None
    if magic != MAGIC:
        raise ValueError(
            f'{file} has magic {brief(magic)}, not "{MAGIC}": it is no token file\'s index.'
        )
    if index.get("version") != VERSION:
        raise ValueError(
            f"{file} is version {brief(index.get('version'))}; this forgekit reads version "
            f"{VERSION}. Write the token file again, or use the forgekit that wrote it."
        )
    _check_entries(file, index)
    return index


def _check_entries(file: Path, index: dict[str, Any]) -> None:
    for name, kind in _ENTRIES.items():
        if type(index.get(name)) is not kind:
            raise _damaged(file, index, name, f"it must be of type {kind.__name__}")
    for name, (least, most) in _RANGES.items():
        if not least <= index[name] <= most:
            raise _damaged(file, index, name, f"it must be {least} to {most:,}")
    if index["eos_id"] >= index["vocab_size"]:
        raise _damaged(file, index, "eos_id", f"the vocabulary has {index['vocab_size']} ids")
    if not all(type(count) is int and count > 0 for count in index["shards"]):
        raise _damaged(file, index, "shards", "it must list the tokens of each shard")
    if type(index.get("checksums", {})) is not dict:
        raise _damaged(file, index, "checksums", "it must be of type dict")
    if index["dtype"] not in DTYPES:
        raise ValueError(
            f"{file} has dtype {brief(index['dtype'])}; token ids are {' or '.join(DTYPES)}. "
            "Write the token file again."
        )
    if sum(index["shards"]) != index["tokens"]:
        raise ValueError(
            f"{file} names {index['tokens']:,} tokens and shards of {sum(index['shards']):,} in "
            "all. Write the token file again."
        )


def _damaged(file: Path, index: dict[str, Any], name: str, rule: str) -> ValueError:
    return ValueError(
        f'{file} has {brief(index.get(name))} as "{name}"; {rule}. Write the token file again.'
    )
