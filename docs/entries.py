"""A directive for reference pages: a table of names, one line each, then their entries.

::

    .. entries::

       MeshSpec
       data.Bins

Names are those of ``forgekit`` or of one of its modules. The lines are the first of the docstrings,
so a table says what the code says.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, get_args, get_origin

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def find(name: str) -> Any:
    """Return what a name as ``MeshSpec`` or ``data.Bins`` stands for."""
    module, _, attribute = f"forgekit.{name}".rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def summary(thing: Any) -> str:
    """Say in one line what it is: a docstring's first line, or the values of a type."""
    if get_origin(thing) is None:
        return (inspect.getdoc(thing) or "").partition("\n")[0]
    if all(isinstance(value, str) for value in get_args(thing)):
        return "One of " + ", ".join(f'``"{value}"``' for value in get_args(thing)) + "."
    return f"Type: ``{str(thing).replace('typing.', '').replace('collections.abc.', '')}``."


def entry(name: str, thing: Any) -> list[str]:
    """Write the lines that make autodoc document a name."""
    if get_origin(thing) is not None:
        return [f".. py:data:: forgekit.{name}", "", f"   {summary(thing)}", ""]
    if inspect.isclass(thing):
        return [f".. autoclass:: forgekit.{name}", "   :members:", ""]
    return [f".. autofunction:: forgekit.{name}", ""]


class Entries(SphinxDirective):
    """The table and the entries of the names in its content, one name a line."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Write both as reStructuredText and let Sphinx read it."""
        self.env.note_reread()  # what it imports may have changed
        things = {name: find(name) for name in filter(None, map(str.strip, self.content))}
        lines = [".. list-table::", "   :widths: 30 70", "   :class: summary", ""]
        for name, thing in things.items():
            lines += [f"   * - :py:obj:`~forgekit.{name}`", f"     - {summary(thing)}"]
        lines += ["", *(line for name, thing in things.items() for line in entry(name, thing))]
        node = nodes.container()
        self.state.nested_parse(StringList(lines, "entries"), self.content_offset, node)
        return node.children


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("entries", Entries)
    return {"parallel_read_safe": True}
