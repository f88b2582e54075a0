"""Write the table of layouts with their errors: ``python tests/distributed/table.py``.

It takes a few cells of each layout; ``make oracle`` holds all of them to the bounds.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
TARGET = TESTS.parent / "docs" / "layout_errors.md"
HEAD = """\
| layout | ranks | cells | gradient, fp32 | 5 SGD steps | 5 AdamW steps | gradient, fp64 |
|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Run some cells of every layout and write the worst error of each."""
    sys.path.insert(0, str(TESTS))
    from distributed.matrix import LAYOUTS

    TARGET.write_text(HEAD + "".join(_row(layout) for layout in LAYOUTS))


def _row(layout: str) -> str:
    import attrs
    from distributed.cells import merge, run_layout
    from distributed.compare import BOUNDS, errors
    from distributed.matrix import LAYOUTS, some_cells

    cells = some_cells(layout)
    cells.insert(0, attrs.evolve(cells[0], dtype="fp64"))
    worst: dict[tuple[str, str], float] = {}
    for cell, found in zip(cells, run_layout(cells), strict=True):
        bounds = BOUNDS[cell.dtype]
        for what, ratio in errors(cell, merge(found)).items():
            bound = bounds.gradients if what == "gradients" else bounds.parameters
            key = cell.dtype, what
            worst[key] = max(worst.get(key, 0.0), ratio * bound)
    shown = [("fp32", what) for what in ("gradients", "sgd parameters", "adamw parameters")]
    numbers = " | ".join(f"{worst[key]:.0e}" for key in (*shown, ("fp64", "gradients")))
    return f"| `{layout}` | {LAYOUTS[layout].world} | {len(cells)} | {numbers} |\n"


if __name__ == "__main__":
    main()
