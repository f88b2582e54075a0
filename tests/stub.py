"""Write the types of what ``forgekit`` imports on use: ``python tests/stub.py``."""

from __future__ import annotations

from pathlib import Path

import forgekit as fk

STUB = Path(fk.__file__).with_suffix(".pyi")


def text() -> str:
    """The stub: rooms, the names of a first week, and those of rooms that are flat names too."""
    lines = [f"from forgekit import {room} as {room}" for room in fk._FLAT]
    for table in (fk._NAMES, fk._FLAT):
        for module, names in table.items():
            lines += [f"from forgekit.{module} import {name} as {name}" for name in names.split()]
    return "\n".join([*lines, "", "__version__: str", ""])


if __name__ == "__main__":
    STUB.write_text(text())
