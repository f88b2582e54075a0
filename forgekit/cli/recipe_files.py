"""Finds recipes and their settings, and reads what a recipe defines and its setup returns."""

from __future__ import annotations

import difflib
import runpy
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forgekit.cli.usage import UsageError
from forgekit.terminal import printable


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


def names_of(script: Path, *wanted: str) -> dict[str, Any]:
    """Run a recipe without its main part and return its names; modules beside it are found.

    Raises:
        UsageError: If it cannot be run, with the line, or lacks one of the wanted names.
    """
    sys.path.insert(0, str(script.resolve().parent))
    try:
        recipe = runpy.run_path(str(script), run_name="set_up")
    except Exception as error:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(
            f"{_line_of(error, script)} raised {type(error).__name__}: {printable(text)}; correct "
            f"it, `python {script}` shows the traceback."
        ) from error
    if missing := [name for name in wanted if name not in recipe]:
        raise UsageError(
            f"{script} has no {', '.join(missing)}; a recipe that this command can set up has "
            f"{', '.join(wanted)}, as pretrain.py does."
        )
    return recipe


def _line_of(error: Exception, script: Path) -> str:
    """Where a script, or a module that it imports and that is none, raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno},"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(script)]
    return f"{script}, line {lines[-1]}," if lines else str(script)


def named(recipe: dict[str, Any], built: Any) -> Any:
    """What ``setup`` returned, by name; copies of older recipes return a tuple."""
    if type(built) is not tuple:
        return built
    names = ("state", "step", "loader")
    return SimpleNamespace(**dict(zip(names, built, strict=False)), loss_fn=recipe["loss_fn"])
