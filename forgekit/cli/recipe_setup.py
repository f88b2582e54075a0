"""Set-up of recipes with other settings, for plan, verify and replay."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from forgekit.cli.recipes import recipe_file
from forgekit.cli.usage import UsageError, script_file

MODULE = "forgekit_recipe"
"""Module name of the recipe during set-up; annotations are resolved by it."""


def script_of(given: Path, recipes: Path) -> Path:
    """Return the file of a recipe, given as a file or by name."""
    script = given if given.suffix == ".py" else recipe_file(recipes, str(given))
    return script_file(script, "name a recipe's file, or one of `forgekit ls`.")


@contextmanager
def opened(script: Path) -> Iterator[ModuleType]:
    """Import a recipe; its sibling modules can be imported within the block."""
    path = sys.path.copy()
    try:
        yield import_recipe(script)
    finally:
        sys.path[:] = path
        sys.modules.pop(MODULE, None)


def import_recipe(script: Path) -> ModuleType:
    """Import a recipe without running its main part, for the life of this process.

    Raises:
        UsageError: If it exits, or has no ``Config`` and ``setup``.
        Exception: What the recipe raises, with its traceback.
    """
    recipe = sys.modules[MODULE] = ModuleType(MODULE)
    recipe.__file__ = str(script)
    sys.path.insert(0, str(script.resolve().parent))
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), vars(recipe))
    except SystemExit as stop:  # whatever its code is, nothing was computed
        raise UsageError(f"{script} called sys.exit({stop.code!r}) when it was imported.") from stop
    if missing := [name for name in ("Config", "setup") if not hasattr(recipe, name)]:
        raise UsageError(
            f"{script} has no {', '.join(missing)}; this command needs a recipe with Config and "
            "setup, such as pretrain.py."
        )
    return recipe


def configured(recipe: ModuleType, settings: Sequence[str], command: str) -> Any:
    """Build the recipe's configuration, which must have a mesh.

    Raises:
        SystemExit: As ``load_config``.
        UsageError: If the recipe has one layout only.
    """
    from forgekit.config import load_config

    script = recipe.__file__
    config = load_config(recipe.Config, settings, program=f"{command} {script}")
    if not hasattr(config, "mesh"):
        raise UsageError(f"{script} has one layout; add mesh: fk.MeshSpec to its Config.")
    return config


def plain_settings(config: Any, out: str | Path) -> dict[str, Any]:
    """Return settings of existing keys with which a recipe needs no device and no compiler."""
    wanted = {"out": out, "device": "cpu", "compile": False}
    if getattr(config, "activation_checkpoint", None) == "budget":  # needs the compiler
        wanted["activation_checkpoint"] = "none"
    return {name: value for name, value in wanted.items() if hasattr(config, name)}


def build(recipe: ModuleType, config: Any) -> Any:
    """Run a recipe's ``setup``; return its record.

    Signals go on ending the command: a setup would have them stop a run, and there is none.

    Raises:
        UsageError: If something is missing.
    """
    with mock.patch.object(signal, "signal", lambda number, _: signal.getsignal(number)):
        built = recipe.setup(config)
    wanted = ("state", "step", "loader", "loss_fn")
    if missing := [name for name in wanted if getattr(built, name, None) is None]:
        raise UsageError(
            f"setup returned a {type(built).__name__} without {', '.join(missing)}; a step needs "
            "them: return fk.Setup(state=..., step=..., loader=..., loss_fn=...)."
        )
    return built


def micro_batches(built: Any, config: Any) -> int | None:
    """Count the micro-batches of a step, from the record, the loader or the configuration.

    None where they change along the way: ``groups`` asks the loader then.
    """
    if getattr(built.loader, "sizes", None) is not None:
        return None
    if (count := getattr(built, "micro_batches", None)) is not None:
        return count
    of_loader = getattr(built.loader, "micro_batches", None)
    if callable(of_loader) and hasattr(config, "global_batch_size"):
        return of_loader(config.global_batch_size)  # pyright: ignore[reportReturnType]
    return getattr(config, "micro_batches", 1)
