"""``forgekit ls | cp | diff | run``: list recipes, copy, compare and run them.

A copy begins with a stamp that names its recipe, the version that copied it and a digest, so that
``diff`` can tell the user's changes from those of later versions.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import importlib.metadata
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

from forgekit.cli.usage import UsageError, file_path, script_file
from forgekit.files import write_atomic

VERSION = importlib.metadata.version("forgekit")
STAMP = re.compile(
    r"# Copied from forgekit (\S+) recipes/([\w.\-]+) \(sha256 ([0-9a-f]{8})\)\.\n"
    r"(?:# To compare: .*\n)?"
)


def recipes_folder() -> Path:
    """Return the folder of recipes: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def recipe_files(folder: Path) -> dict[str, Path]:
    """Return the recipes by name."""
    return {path.stem: path for path in sorted(folder.glob("*.py"))}


def settings_files(folder: Path) -> dict[str, Path]:
    """Return settings for kinds of machines, batch scripts by folder, and launchers, by name."""
    settings = {path.stem: path for path in folder.glob("*.toml")}
    alone = {name: path for name, path in settings.items() if not path.with_suffix(".py").exists()}
    scripts = {path.parent.name: path for path in folder.glob("*/*.sh")}
    launchers = (path for path in folder.glob("launchers/*") if path.is_file())
    return alone | scripts | {path.stem: path for path in launchers}


def recipe_file(folder: Path, name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        UsageError: If there is none of that name; the nearest is named.
    """
    recipes = recipe_files(folder)
    if name in recipes:
        return recipes[name]
    close = difflib.get_close_matches(name, recipes, n=1)
    nearest = f"; the nearest is {close[0]!r}" if close else ""
    raise UsageError(f"no recipe {name!r}{nearest}. The recipes are {', '.join(recipes)}.")


def recipe_or_settings(folder: Path, name: str) -> Path:
    """Return the file of a recipe, of a machine's settings, or of a batch script."""
    return settings_files(folder).get(name.removesuffix(".toml")) or recipe_file(folder, name)


def add_recipes(commands: Any) -> None:
    """Declare ``forgekit ls``, ``cp``, ``diff`` and ``run``, and their arguments."""
    ls = commands.add_parser("ls", help="list the recipes, and settings for machines")
    ls.set_defaults(command=_ls)
    cp = commands.add_parser("cp", help="copy a recipe and its settings, to edit")
    cp.add_argument("name", metavar="NAME", help="a recipe that `forgekit ls` shows")
    cp.add_argument("target", metavar="TARGET", nargs="?", help="a folder or a .py file")
    cp.add_argument("--force", action="store_true", help="overwrite existing files")
    cp.set_defaults(command=_cp)
    diff = commands.add_parser("diff", help="what a copied recipe changed, and its origin since")
    diff.add_argument("copy", metavar="COPY", type=file_path, help="what `forgekit cp` wrote")
    origin = "the recipe as it was when copied"
    diff.add_argument("--origin", metavar="FILE", type=file_path, help=origin)
    diff.set_defaults(command=_diff)
    parser = commands.add_parser("run", help="run a recipe as it is; further arguments are its own")
    parser.add_argument("name", metavar="NAME", help="a recipe that `forgekit ls` shows")
    parser.set_defaults(command=run)


def _ls(options: argparse.Namespace) -> int:
    files = {**recipe_files(options.recipes), **settings_files(options.recipes)}
    width = max(map(len, files))
    for name in sorted(files):
        print(f"{name:<{width}}  {_summary(files[name])}")
    return 0


def _summary(path: Path) -> str:
    """Return the first line of a module's docstring, or of the first comment of settings."""
    if path.suffix != ".py":
        lines = path.read_text().splitlines()
        return lines[lines[0].startswith("#!")].lstrip("# ")
    return (ast.get_docstring(ast.parse(path.read_bytes())) or "").partition("\n")[0]


def _cp(options: argparse.Namespace) -> int:
    recipe = recipe_or_settings(options.recipes, options.name)
    target = _target(recipe, options.target)
    settings = recipe.with_suffix(".toml")
    text = recipe.read_text()
    copies = {target: _stamped(text, recipe.name)}
    if settings.exists() and settings != recipe:
        copies[target.with_suffix(".toml")] = settings.read_text()
    existing = [str(path) for path in copies if path.exists()]
    if existing and not options.force:
        raise UsageError(f"{' and '.join(existing)} would be overwritten; --force allows it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for path, content in copies.items():
            write_atomic(path, content.encode())
            print(f"wrote {path}")
    except OSError as error:
        raise UsageError(f"{target} was not written: {error.strerror}.") from None
    if "load_config" in text:
        print(f"Its settings: python {shlex.quote(str(target))} --help")
    return 0


def _target(recipe: Path, target: str | None) -> Path:
    """Return the file to write."""
    path = Path(target or recipe.name)
    if target and (path.is_dir() or target.endswith(os.sep)):
        return path / recipe.name
    if path.suffix != recipe.suffix:
        raise UsageError(f"{target} is neither a {recipe.suffix} file nor a folder that exists.")
    return path


def _stamped(text: str, file: str) -> str:
    """Insert the stamp after ``#!`` and before the docstring, which remains one."""
    first, rest = _first_line(text)
    stamp = f"# Copied from forgekit {VERSION} recipes/{file} (sha256 {digest_of(text)}).\n"
    return f"{first}{stamp}# To compare: forgekit diff COPY\n{rest}"


def digest_of(text: str) -> str:
    """Return the digest of a recipe, as in its stamp."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _first_line(text: str) -> tuple[str, str]:
    """Split off a ``#!`` line, which must stay the first one."""
    end = text.find("\n") + 1 if text.startswith("#!") else 0
    return text[:end], text[end:]


def _diff(options: argparse.Namespace) -> int:
    copy: Path = script_file(options.copy, "name a file that `forgekit cp` wrote.")
    first, rest = _first_line(copy.read_text("utf-8-sig", "replace"))
    if (stamp := STAMP.match(rest)) is None:
        raise UsageError(
            f"{copy} has no line '# Copied from forgekit ...' at its top, so its recipe is "
            "unknown. `forgekit cp` writes it."
        )
    version, file, digest = stamp.groups()
    old, new = (f"recipes/{file} of forgekit {v}" for v in (version, VERSION))
    upstream = next(iter(sorted(options.recipes.rglob(file))), None)
    if upstream is None:
        raise UsageError(
            f"{copy} was copied from {old}, but forgekit {VERSION} has no such recipe."
        )
    origin = options.origin or upstream
    before, now = origin.read_text(), upstream.read_text()
    if digest_of(before) != digest:
        raise UsageError(
            f"{origin} is not the file that {copy} was copied from. Get {old} (`pip download "
            f"--no-deps forgekit=={version}`, unzip it) and pass it with --origin."
        )
    print(f"{copy.name} was copied from {old}.")
    _show(f"What {copy.name} changed", old, before, copy.name, first + rest[stamp.end() :])
    _show(f"What forgekit {VERSION} changed since", old, before, new, now)
    if now != before:
        merge = shlex.join(["git", "merge-file", *map(str, (copy, origin, upstream))])
        print(f"\nTo merge both: {merge}")
        print(f"then its first line is of forgekit {VERSION} (sha256 {digest_of(now)}).")
    return 0


def _show(title: str, old_name: str, old: str, new_name: str, new: str) -> None:
    texts = old.splitlines(), new.splitlines()
    lines = [*difflib.unified_diff(*texts, old_name, new_name, lineterm="")]
    added, removed = (sum(line.startswith(sign) for line in lines[2:]) for sign in "+-")
    print(f"\n{title}: {f'+{added} -{removed} lines' if lines else 'nothing'}", *lines, sep="\n")


def run(options: argparse.Namespace) -> int:
    """Run a recipe in this process, as if it were the main script; its exit is the command's."""
    recipe, before = str(recipe_file(options.recipes, options.name)), sys.argv
    sys.argv = [recipe, *options.arguments]
    try:
        runpy.run_path(recipe, run_name="__main__")
    finally:
        sys.argv = before
    return 0
