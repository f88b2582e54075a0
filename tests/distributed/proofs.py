"""Write the page of what is proven where: ``python tests/distributed/proofs.py``.

It is drawn from the tables that the tests themselves walk, and a test compares the two, so a cell
says what runs: on every change (``make test``), or in the long run (``make oracle``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
TARGET = TESTS.parent / "docs" / "proofs.md"
HEAD = """\
# What is proven where

This page answers whether your layout is tested together with your options.

1. Find the row of your layout: `fsdp2-tp2-cp2` is `mesh.dp_shard=2 mesh.tp=2 mesh.cp=2`.
2. Read your options' columns: **●** runs in `make test`, ○ in `make oracle`, an empty cell never.
3. No such row? `forgekit verify my.py mesh.tp=2` tests your model in your layout ({doc}`verify`).

Each cell is a test on real ranks. It compares every parameter's gradient, and the parameters after
optimizer steps, with one process in full batch. The errors are in {doc}`layouts`. `python
tests/distributed/proofs.py` writes this page from the tables that the tests walk.

"""
COLUMNS: dict[str, Callable[[Any], bool]] = {
    "ragged": lambda cell: cell.targets == "ragged",
    "rank without targets": lambda cell: cell.targets == "rank_without",
    "packed": lambda cell: cell.packed,
    "recompute full": lambda cell: cell.recompute == "full",
    "recompute selective": lambda cell: cell.recompute == "selective",
    "logits": lambda cell: cell.loss == "logits",
    "chunked head": lambda cell: cell.loss == "head",
    "fp32": lambda cell: cell.dtype == "fp32",
    "bf16": lambda cell: cell.dtype == "bf16",
    "fp64": lambda cell: cell.dtype == "fp64",
}
"""What a cell of the oracle's table shows."""


def page() -> str:
    """The whole page."""
    from distributed.matrix import (
        LAYOUTS,
        ROUTED,
        default_cells,
        full_cells,
        routed_cells,
        routed_default,
    )

    dense = _marks(COLUMNS, list(LAYOUTS), default_cells(), full_cells())
    columns = {name: shows for name, shows in COLUMNS.items() if name not in ("fp32", "bf16")}
    routed = _marks(columns, list(ROUTED), routed_default(), routed_cells())
    parts = {"Dense models": _table([*COLUMNS], dense)}
    parts |= {"Mixtures of experts": _table([*columns], routed), "Adapters": _adapters()}
    return HEAD + "\n".join(f"## {title}\n\n{table}" for title, table in parts.items())


def _marks(
    columns: Mapping[str, Callable[[Any], bool]],
    layouts: Iterable[str],
    default: list[Any],
    full: list[Any],
) -> dict[str, list[str]]:
    def mark(layout: str, shows: Callable[[Any], bool]) -> str:
        for cells, sign in ((default, "●"), (full, "○")):
            if any(cell.layout == layout and shows(cell) for cell in cells):
                return sign
        return ""

    return {name: [mark(name, shows) for shows in columns.values()] for name in layouts}


def _adapters() -> str:
    """LoRA on dense models and experts, and on a base in 4 bits."""
    from distributed.test_adapters import CASES, LONG, ranks_of

    columns = ["dense", "experts", "base in 4 bits"]
    kinds = {"experts": 1, "uneven": 1, "packed": 2}
    rows: dict[tuple[int, str], list[str]] = {}
    for case, (kind, sizes, _) in CASES.items():
        name = " ".join(f"{name}={size}" for name, size in sizes.items())
        row = rows.setdefault((ranks_of(sizes), name), [""] * len(columns))
        row[kinds.get(kind, 0)] = row[kinds.get(kind, 0)] or ("○" if case in LONG else "●")
    return _table(columns, {name: rows[ranks, name] for ranks, name in sorted(rows)})


def _table(columns: list[str], rows: Mapping[str, list[str]]) -> str:
    lines = [f"| layout | {' | '.join(columns)} |", f"|---{'|:---:' * len(columns)}|"]
    lines += [f"| `{name}` | {' | '.join(marks)} |" for name, marks in rows.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    TARGET.write_text(page())
