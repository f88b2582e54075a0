"""Formulas as MathML, which browsers draw by themselves: no script, no network, no LaTeX."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def inline(writer: Any, node: nodes.math) -> None:
    """Write a formula in a sentence."""
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block(writer: Any, node: nodes.math_block) -> None:
    """Write a formula on a line of its own; it scrolls where the screen is narrow."""
    formula = convert(node.astext(), display="block")
    writer.body.append(f'<div style="overflow: auto hidden; padding: 0.3em 0">{formula}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))  # pyright: ignore[reportArgumentType]
    return {"parallel_read_safe": True}
