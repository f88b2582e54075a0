"""The ``index.json`` of a directory of arrays: its kind, its version and its content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgekit.inputs import brief, parse_json

INDEX = "index.json"


def write_index_file(folder: Path, magic: str, version: int, entries: Mapping[str, Any]) -> None:
    """Write the index of a directory whose other files are complete."""
    index = {"magic": magic, "version": version, **entries}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read_index_file(
    file: Path, wanted: Mapping[str, Any], kinds: Mapping[str, type], remedy: str
) -> dict[str, Any]:
    """Read an index and check that it is one.

    Args:
        file: The index.
        wanted: Entries that it must have: magic, version, and what identifies the data.
        kinds: The types of other entries.
        remedy: What to do about a damaged one, without its full stop.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, foreign, or of another version.
    """
    try:
        index = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}). {remedy}.") from None
    for name, value in wanted.items():
        found = index.get(name) if isinstance(index, dict) else index
        if found != value:
            raise ValueError(f"{file} has {name} {brief(found)}, not {value!r}. {remedy}.")
    for name, kind in kinds.items():
        if type(index.get(name)) is not kind:
            what = f'{brief(index.get(name))} as "{name}"; it must be of type {kind.__name__}'
            raise ValueError(f"{file} has {what}. {remedy}.")
    return index
