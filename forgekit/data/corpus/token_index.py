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
AGAIN = "Write the token file again"

_TYPES = {"dtype": str, "shards": list, "fingerprint": str, "metadata": dict, "checksums": dict}
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
        raise ValueError(f"{file} is not JSON ({error}). {AGAIN}.") from None
    magic = index.get("magic") if isinstance(index, dict) else None
    if magic != MAGIC:
        raise ValueError(
            f'{file} has magic {brief(magic)}, not "{MAGIC}": it is no token file\'s index.'
        )
    if index.get("version") != VERSION:
        raise ValueError(
            f"{file} is version {brief(index.get('version'))}; this forgekit reads version "
            f"{VERSION}. {AGAIN}, or use the forgekit that wrote it."
        )
    index.setdefault("checksums", {})  # absent in files that were written before there were any
    if broken := _broken_rule(index):
        name, rule = broken
        raise ValueError(f'{file} has {brief(index.get(name))} as "{name}"; {rule}. {AGAIN}.')
    if index["dtype"] not in DTYPES:
        kinds = " or ".join(DTYPES)
        raise ValueError(
            f"{file} has dtype {brief(index['dtype'])}; token ids are {kinds}. {AGAIN}."
        )
    if (total := sum(index["shards"])) != index["tokens"]:
        raise ValueError(
            f"{file} names {index['tokens']:,} tokens and shards of {total:,} in all. {AGAIN}."
        )
    return index


def _broken_rule(index: dict[str, Any]) -> tuple[str, str] | None:
    """Return the first field that breaks its rule, and the rule."""
    for name, kind in (_TYPES | dict.fromkeys(_RANGES, int)).items():
        if type(index.get(name)) is not kind:
            return name, f"it must be of type {kind.__name__}"
    for name, (least, most) in _RANGES.items():
        if not least <= index[name] <= most:
            return name, f"it must be {least} to {most:,}"
    if index["eos_id"] >= index["vocab_size"]:
        return "eos_id", f"the vocabulary has {index['vocab_size']} ids"
    if not all(type(count) is int and count > 0 for count in index["shards"]):
        return "shards", "it must list the tokens of each shard"
    return None
