"""Finds recipes and their settings by name."""

from __future__ import annotations

import difflib
from pathlib import Path

from forgekit.cli.usage import UsageError


def recipes_folder() -> Path:
    """Where the recipes are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_files(folder: Path) -> dict[str, Path]:
    """The recipes by name; at least one."""
    found = {path.stem: path for path in sorted(folder.glob("*.py"))}
    if not found:
        raise UsageError(f"there are no recipes in {folder}; is forgekit installed completely?")
    return found


def settings_files(folder: Path) -> dict[str, Path]:
    """Settings of a recipe for one kind of machine by name, and a batch script by its folder."""
    found = {path.stem: path for path in folder.glob("*.toml")}
    found = {name: path for name, path in found.items() if not path.with_suffix(".py").exists()}
    return found | {path.parent.name: path for path in folder.glob("*/*.sh")}


def recipe_file(folder: Path, name: str) -> Path:
    """The file of a recipe.

    Raises:
        UsageError: If there is none of that name; the nearest is named.
    """
    recipes = recipe_files(folder)
    if name in recipes:
        return recipes[name]
    close = difflib.get_close_matches(name, recipes, n=1)
    nearest = f"; the nearest is {close[0]!r}" if close else ""
    raise UsageError(f"no recipe {name!r}{nearest}. There are: {', '.join(recipes)}.")


def recipe_or_settings(folder: Path, name: str) -> Path:
    """The file of a recipe, of settings for a machine, or of a batch script.

    Raises:
        UsageError: If there is none of that name.
    """
    settings = settings_files(folder).get(name.removesuffix(".toml"))
    return settings or recipe_file(folder, name)
