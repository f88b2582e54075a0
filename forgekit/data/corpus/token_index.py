"""``index.json`` of a token file: its sizes, its shards with checksums, the writer's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgekit.data.corpus.number_files import VERSION
from forgekit.data.index_files import INDEX, read_index_file, write_index_file
from forgekit.inputs import LARGEST, brief

MAGIC = "forgekit-tokens"
DTYPES = ("uint16", "uint32")
AGAIN = "Write the token file again"

_TYPES = {"dtype": str, "shards": list, "fingerprint": str, "metadata": dict}
_RANGES = {
    "vocab_size": (1, 2**32),
    "eos_id": (0, 2**32 - 1),
    "tokens": (1, LARGEST),
    "documents": (1, LARGEST),
}


def write_index(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the index of a token file whose other files are complete."""
    write_index_file(folder, MAGIC, VERSION, entries)


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
    wanted = {"magic": MAGIC, "version": VERSION}
    index = read_index_file(file, wanted, _TYPES | dict.fromkeys(_RANGES, int), AGAIN)
    index.setdefault("checksums", {})  # absent in files that were written before there were any
    if broken := _broken_rule(index):
        raise ValueError(f"{file}: {broken}. {AGAIN}.")
    return index


def _broken_rule(index: dict[str, Any]) -> str | None:
    """Return the first rule that the entries break, with the value that breaks it."""
    for name, (least, most) in _RANGES.items():
        if not least <= index[name] <= most:
            return f"{name} {brief(index[name])} must be {least} to {most:,}"
    if index["eos_id"] >= index["vocab_size"]:
        return f"eos_id {index['eos_id']} is not among the {index['vocab_size']} ids"
    if type(index["checksums"]) is not dict:
        return f"checksums {brief(index['checksums'])} must be of type dict"
    if index["dtype"] not in DTYPES:
        return f"dtype {brief(index['dtype'])} must be {' or '.join(DTYPES)}"
    if not all(type(count) is int and count > 0 for count in index["shards"]):
        return f"shards {brief(index['shards'])} must be the tokens of each shard"
    if (total := sum(index["shards"])) != index["tokens"]:
        return f"{index['tokens']:,} tokens and shards of {total:,} in all cannot both be right"
    return None
