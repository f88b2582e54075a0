"""What pages read of the repository: the floors of the package, its recipes, its commands.

The floors are those of the contracts that import-linter checks, so the picture cannot differ.
"""

from __future__ import annotations

import ast
import html
import io
import os
import re
import textwrap
import tomllib
from contextlib import redirect_stdout, suppress
from pathlib import Path

from forgekit.cli.program import main

ROOT = Path(__file__).parents[1]
WIDTH, GAP, TITLE, LINE, LETTER = 780, 8, 30, 16, 5.9


def floors() -> list[list[str]]:
    """Return the package's modules by floor, the highest first, as the contract has them."""
    return _layers("forgekit")


def rooms(floor: str) -> list[list[str]]:
    """Return what is inside of a floor in the same order; empty where no contract says."""
    return _layers(f"forgekit.{floor}")


def _layers(container: str) -> list[list[str]]:
    text = (ROOT / "pyproject.toml").read_text()
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    found = [c["layers"] for c in contracts if c.get("containers") == [container]]
    return [[name.strip() for name in layer.split("|")] for layer in (found or [[]])[0]]


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, its paragraph joined."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]


def about(module: str) -> str:
    """Say what a module or a folder of the package is for."""
    folder = ROOT / "forgekit" / module
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return first_line(path).split(":")[0].partition("\n")[0].rstrip(".")


def draw() -> str:
    """Draw the floors as SVG, in the page's own colours."""
    boxes, y = [], GAP
    for names in floors():
        width = (WIDTH - GAP * (len(names) - 1)) / len(names)
        texts = [textwrap.wrap(_text(name), int((width - 3 * GAP) / LETTER)) for name in names]
        height = TITLE + LINE * max(map(len, texts))
        for index, (name, lines) in enumerate(zip(names, texts, strict=True)):
            boxes.append(_box(name, lines, index * (width + GAP), y, width, height))
        y += height + GAP
    start = f'<svg viewBox="-1 0 {WIDTH + 2} {y}" role="img" font-family="inherit"'
    return f'{start} aria-label="floors of the package">{"".join(boxes)}</svg>'


def _text(name: str) -> str:
    """What a floor is for; of one with rooms that follow each other, these."""
    order = [room[0] for room in reversed(rooms(name)) if len(room) == 1]
    return " → ".join(order) if len(order) > 1 else about(name)


def _box(name: str, lines: list[str], x: float, y: int, width: float, height: int) -> str:
    left = f'x="{x + 12:.0f}"'
    colours = 'fill="var(--color-background-secondary)" stroke="var(--color-brand-primary)"'
    shape = f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" rx="6" {colours}/>'
    title = f'<text {left} y="{y + 20}" fill="currentColor" font-weight="bold" font-size="14">'
    said = "".join(
        f'<text {left} y="{y + TITLE + 7 + LINE * index}" fill="currentColor" font-size="11.5">'
        f"{html.escape(line)}</text>"
        for index, line in enumerate(lines)
    )
    return f"{shape}{title}{html.escape(name)}</text>{said}"


def commands() -> dict[str, str]:
    """Return what ``forgekit --help`` says of each command."""
    said, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "200"  # one line each
    try:
        with redirect_stdout(said), suppress(SystemExit):
            main(["--help"])
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return dict(re.findall(r"^    (\w+)  +(\S.*)$", said.getvalue(), re.M))
