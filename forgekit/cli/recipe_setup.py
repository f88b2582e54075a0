"""Sets a recipe up as it is run, with other settings: what plan, verify and replay share."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from forgekit.cli.recipe_files import recipe_file
from forgekit.cli.usage import UsageError, script_file
from forgekit.terminal import printable

MODULE = "forgekit_recipe"
"""Name of the recipe among the modules while it is set up; annotations are resolved by it."""


def script_of(given: Path, recipes: Path) -> Path:
    """The file of a recipe that was given as a file, or by a name of ``forgekit ls``."""
    script = given if given.suffix == ".py" else recipe_file(recipes, str(given))
    return script_file(script, "name a recipe's file, or one of `forgekit ls`.")


@contextmanager
def opened(script: Path) -> Iterator[ModuleType]:
    """Import a recipe; modules beside it are found within the block only."""
    path = sys.path.copy()
    try:
        yield import_recipe(script)
    finally:
        sys.path[:] = path
        sys.modules.pop(MODULE, None)


def import_recipe(script: Path) -> ModuleType:
    """Import a recipe without its main part, for as long as this process lives.

    Raises:
        UsageError: If it cannot be imported, with the line, or has no ``Config`` and ``setup``.
    """
    recipe = sys.modules[MODULE] = ModuleType(MODULE)
    recipe.__file__ = str(script)
    sys.path.insert(0, str(script.resolve().parent))
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), vars(recipe))
    except (Exception, SystemExit) as error:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UsageError(
            f"{_line_of(error, script)} raised {type(error).__name__}: {printable(text)}; correct "
            f"it, `python {script}` shows the traceback."
        ) from error
    if missing := [name for name in ("Config", "setup") if not hasattr(recipe, name)]:
        raise UsageError(
            f"{script} has no {', '.join(missing)}; a recipe that this command can set up has "
            "Config, setup, as pretrain.py does."
        )
    return recipe


def build(recipe: ModuleType, config: Any) -> Any:
    """Run a recipe's ``setup``; its record has what a step takes.

    Raises:
        UsageError: If something is missing.
    """
    built = recipe.setup(config)
    wanted = ("state", "step", "loader", "loss_fn")
    if missing := [name for name in wanted if getattr(built, name, None) is None]:
        raise UsageError(
            f"setup returned a {type(built).__name__} without {', '.join(missing)}; a step takes "
            "them: return fk.Setup(state=..., step=..., loader=..., loss_fn=...)."
        )
    return built


def micro_batches(built: Any, config: Any) -> int:
    """Count the micro-batches of a step, by the record, the loader or the configuration."""
    if (count := getattr(built, "micro_batches", None)) is not None:
        return count
    of_loader = getattr(built.loader, "micro_batches", None)
    if callable(of_loader) and hasattr(config, "global_batch_size"):
        return of_loader(config.global_batch_size)  # pyright: ignore[reportReturnType]
    return getattr(config, "micro_batches", 1)


def _line_of(error: BaseException, script: Path) -> str:
    """Where a script, or a module that it imports and that is none, raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno},"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(script)]
    return f"{script}, line {lines[-1]}," if lines else str(script)
