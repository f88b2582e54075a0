"""``forgekit ls | cp | run``: what recipes there are, a copy to edit, a run as it is."""

from __future__ import annotations

import argparse
import ast
import errno
import os
import runpy
import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forgekit.cli.recipe_files import (
    recipe_file,
    recipe_files,
    recipe_or_settings,
    settings_files,
)
from forgekit.cli.recipe_origin import origin_of, stamped
from forgekit.cli.usage import UsageError, exit_code
from forgekit.terminal import printable


def add_ls(commands: Any) -> None:
    """Declare ``forgekit ls``."""
    ls = commands.add_parser("ls", help="list the recipes, and settings for machines")
    ls.set_defaults(command=_ls)


def _ls(options: argparse.Namespace) -> int:
    shown = {**recipe_files(options.recipes), **settings_files(options.recipes)}
    width = max(map(len, shown))
    for name in sorted(shown):
        print(f"{name:<{width}}  {_summary(shown[name])}")
    return 0


def _summary(path: Path) -> str:
    """First line of a module's docstring, or of the comment that settings begin with."""
    if path.suffix != ".py":
        lines = path.read_text().splitlines()
        return lines[lines[0].startswith("#!")].lstrip("# ")
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0]


def add_cp(commands: Any) -> None:
    """Declare ``forgekit cp`` and its arguments."""
    cp = commands.add_parser("cp", help="copy a recipe and its settings, to edit")
    cp.add_argument("name", metavar="NAME", help="a recipe that `forgekit ls` shows")
    cp.add_argument("target", metavar="TARGET", nargs="?", help="a folder or a .py file")
    cp.add_argument("--force", action="store_true", help="overwrite existing files")
    cp.set_defaults(command=_cp)


def _cp(options: argparse.Namespace) -> int:
    try:
        return _copy(options)
    except OSError as error:
        path = error.filename or options.target
        raise UsageError(f"nothing was copied, {path}: {error.strerror}.") from None


def _copy(options: argparse.Namespace) -> int:
    recipe = recipe_or_settings(options.recipes, options.name)
    target = _target(recipe, options.target)
    settings = recipe.with_suffix(".toml")
    content = recipe.read_bytes()
    copies = {target: stamped(content, origin_of(content, recipe.name), target.name)}
    if settings.exists() and settings != recipe:
        copies[target.with_suffix(".toml")] = settings.read_bytes()
    there = [str(path) for path in copies if path.exists()]
    if there and not options.force:
        raise UsageError(f"{' and '.join(there)} would be overwritten; --force does it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_files(copies)
    for path in copies:
        print(f"wrote {printable(path)}")
    if b"load_config" in content:
        print(f"Its settings: python {printable(shlex.quote(str(target)))} --help")
    return 0


def replace_files(copies: Mapping[Path, bytes]) -> None:
    """Write files, all or none: each is complete under another name before the first is renamed."""
    with ExitStack() as stack:
        complete = {}
        for target, content in copies.items():
            path = Path(os.path.realpath(target))  # a link keeps pointing where it points
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
            complete[path] = path.with_name(f".{path.name}.{os.getpid()}")
            stack.callback(complete[path].unlink, missing_ok=True)
            complete[path].write_bytes(content)
            if path.exists():
                shutil.copymode(path, complete[path])
        for path, new in complete.items():
            new.replace(path)


def _target(recipe: Path, target: str | None) -> Path:
    """The file to write."""
    if target is None:
        return Path(recipe.name)
    path = Path(target)
    if path.is_dir() or target.endswith(os.sep):
        return path / recipe.name
    if path.suffix != recipe.suffix:
        raise UsageError(f"{target} is neither a {recipe.suffix} file nor a folder that exists.")
    return path


def add_run(commands: Any) -> None:
    """Declare ``forgekit run`` and its argument."""
    parser = commands.add_parser("run", help="run a recipe as it is; further arguments are its own")
    parser.add_argument("name", metavar="NAME", help="a recipe that `forgekit ls` shows")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Run a recipe in this process, as if it had been started by itself."""
    recipe = str(recipe_file(options.recipes, options.name))
    before = sys.argv
    sys.argv = [recipe, *options.arguments]
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as stop:
        return exit_code(stop.code)
    finally:
        sys.argv = before
    return 0
