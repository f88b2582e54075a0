"""The command line; see ``program.py``."""

from forgekit.cli.program import main
from forgekit.cli.recipes import recipes_folder

__all__ = ["main", "recipes_folder"]
