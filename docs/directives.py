"""Directives of pages that read the repository: ``river``, ``recipes`` and ``commands``."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from floors import ROOT, commands, draw, first_line
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class River(SphinxDirective):
    """The picture of the floors."""

    def run(self) -> list[nodes.Node]:
        """Draw it."""
        self.env.note_reread()  # the page does not change where its sources do
        return [nodes.raw("", draw(), format="html")]


class Recipes(SphinxDirective):
    """A table of the recipes, each with the first lines of its docstring."""

    def run(self) -> list[nodes.Node]:
        """Write it as reStructuredText and let Sphinx read it."""
        self.env.note_reread()
        paths = sorted((ROOT / "recipes").glob("*.py"))
        return _table(self, {path.name: first_line(path).replace("\n", " ") for path in paths})


class Commands(SphinxDirective):
    """A table of the commands, as their help has them."""

    def run(self) -> list[nodes.Node]:
        """Write it as reStructuredText and let Sphinx read it."""
        self.env.note_reread()
        return _table(self, {f"forgekit {name}": says for name, says in commands().items()})


def _table(directive: SphinxDirective, rows: dict[str, str]) -> list[nodes.Node]:
    lines = [".. list-table::", "   :widths: 25 75", ""]
    for name, says in rows.items():
        lines += [f"   * - ``{name}``", f"     - {says}"]
    node = nodes.container()
    directive.state.nested_parse(StringList(lines, "table"), directive.content_offset, node)
    return node.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    for name, directive in {"river": River, "recipes": Recipes, "commands": Commands}.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True}
