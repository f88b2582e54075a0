"""How far ``prepare`` has come, beside the files that it is writing, so that a kill costs seconds.

An entry says where the source was read to and where each writer stood at that moment. It is put in
place by renaming, so it is whole or absent; and whoever goes on checks the files against it, so
that it may be wrong after a power cut without any harm.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from forgekit.data.corpus.held_out import Place
from forgekit.data.documents.filters import Account
from forgekit.inputs import parse_json

__all__ = ["JOURNAL", "Entry", "clear", "read_entry", "write_entry"]

JOURNAL = "progress.json"


@attrs.frozen
class Entry:
    """Where ``prepare`` stood between two documents.

    Attributes:
        place: Where reading stood.
        text_bytes: Bytes of text written for training, and held out.
        writers: Positions of the two writers; None before the first document.
    """

    place: Place = attrs.field(factory=Place)
    text_bytes: Sequence[int] = (0, 0)
    writers: Sequence[dict[str, Any] | None] = (None, None)


def read_entry(folder: Path) -> Entry | None:
    """Read the last entry; None if there is none that can be read."""
    try:
        found = parse_json((folder / JOURNAL).read_bytes())
        account = Account(**found["place"].pop("account"))
        account = attrs.evolve(account, first_broken=tuple(account.first_broken))
        place = Place(**found.pop("place"), account=account)
        return Entry(place=place, **found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def write_entry(folder: Path, entry: Entry) -> None:
    """Put an entry in place of the one before."""
    temporary = folder / f"{JOURNAL}.new"
    temporary.write_text(json.dumps(attrs.asdict(entry)))
    os.replace(temporary, folder / JOURNAL)


def clear(folder: Path, *, but: str) -> None:
    """Delete everything in a folder but one file."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != but:
            path.unlink()
