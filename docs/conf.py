"""Sphinx configuration."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "forgekit"
author = "The forgekit authors"
copyright = "2026, the forgekit authors"
release = version = version_of("forgekit")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "directives",
    "entries",
    "mathml",
]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath"]
html_theme = "furo"
html_theme_options = {"light_css_variables": {"code-font-size": "73%"}}  # 100 columns fit
exclude_patterns = ["_build", "layout_errors.md", "description.md"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # names that several modules use, such as `Totals.sums`
