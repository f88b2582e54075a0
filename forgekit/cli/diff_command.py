"""``forgekit diff``: what a copied recipe changed, what its origin changed since, and a merge."""

from __future__ import annotations

import argparse
import codecs
import difflib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs

from forgekit.cli.recipe_commands import replace_files
from forgekit.cli.recipe_files import recipe_or_settings
from forgekit.cli.recipe_origin import (
    VERSION,
    Origin,
    digest_of,
    keep_origin,
    kept_origin,
    origin_of,
    read_stamp,
    stamped,
)
from forgekit.cli.usage import UsageError, file_path, script_file
from forgekit.terminal import printable, tell


@attrs.frozen(kw_only=True)
class Texts:
    """The three texts that are compared; without stamps, with a line feed at each line's end.

    Attributes:
        origin: Which recipe the copy began as.
        before: The recipe as it was then.
        copy: The copy as it is now.
        upstream: The recipe as this version of forgekit has it.
        is_dos: Whether the copy's lines end in a carriage return and a line feed.
    """

    origin: Origin
    before: bytes
    copy: bytes
    upstream: bytes
    is_dos: bool


def add_diff(commands: Any) -> None:
    """Declare ``forgekit diff`` and its arguments."""
    diff = commands.add_parser("diff", help="what a copied recipe changed, and its origin since")
    option = diff.add_argument
    option("copy", metavar="COPY", type=file_path, help="what `forgekit cp` wrote")
    option("--origin", metavar="FILE", type=file_path, help="the recipe as it was when copied")
    option("--recipe", metavar="NAME", help="the recipe it began as, if its first lines are gone")
    option("--merge", action="store_true", help="write both changes into COPY, without asking")
    diff.set_defaults(command=_diff)


def _diff(options: argparse.Namespace) -> int:
    try:
        return _compare(options)
    except OSError as error:
        raise UsageError(f"nothing was written, {error.filename}: {error.strerror}.") from None


def _compare(options: argparse.Namespace) -> int:
    texts = _read(options)
    origin, copy = texts.origin, options.copy.name
    old, new = (f"recipes/{origin.file} of forgekit {v}" for v in (origin.version, VERSION))
    if options.recipe is not None and options.origin is not None:
        old = options.origin.name
    said = "was copied from" if options.recipe is None else "is compared with"
    print(f"{printable(copy)} {said} {printable(old)}.")
    _show(f"What {copy} changed", old, texts.before, copy, texts.copy)
    _show(f"What forgekit {VERSION} changed since", old, texts.before, new, texts.upstream)
    if texts.upstream == texts.before:
        return 0
    if not options.merge and not _is_wanted(options.copy):
        print(f"\nTo merge both: forgekit diff --merge {printable(str(options.copy))}")
        return 0
    return _merge(options.copy, texts, (copy, old, new))


def _read(options: argparse.Namespace) -> Texts:
    copy = options.copy
    content = script_file(copy, "name a file that `forgekit cp` wrote.").read_bytes()
    text, stamp = _plain(content), read_stamp(_plain(content))
    if stamp is not None and options.recipe is not None:
        raise UsageError(
            f"{copy} says that it was copied from recipes/{stamp[0].file}; leave out --recipe."
        )
    if stamp is not None:
        origin, text = stamp
        upstream = _upstream(copy, origin, options.recipes).read_bytes()
    elif options.recipe is not None:
        recipe = recipe_or_settings(options.recipes, options.recipe)
        upstream = recipe.read_bytes()
        first = upstream if options.origin is None else _named(options.origin)
        origin = origin_of(first, recipe.name)
    else:
        raise UsageError(
            f"{copy} does not say which recipe it was copied from: no line '# Copied from forgekit "
            "...' stands at its top. Name the recipe with --recipe; `forgekit ls` shows them."
        )
    before = _before(copy, origin, options.origin, upstream)
    is_dos = 2 * content.count(b"\r\n") > content.count(b"\n")
    return Texts(origin=origin, before=before, copy=text, upstream=upstream, is_dos=is_dos)


def _plain(content: bytes) -> bytes:
    """A text as recipes are written, whatever an editor or git has made of its line ends."""
    return content.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")


def _named(file: Path) -> bytes:
    return _plain(script_file(file, "name the recipe as it was.").read_bytes())


def _upstream(copy: Path, origin: Origin, recipes: Path) -> Path:
    """The recipe as this version of forgekit has it."""
    found = sorted(recipes.rglob(origin.file))
    if not found:
        raise UsageError(
            f"{copy} was copied from recipes/{origin.file} of forgekit {origin.version}, and "
            f"forgekit {VERSION} has no such recipe; `forgekit ls` shows those it has."
        )
    return found[0]


def _before(copy: Path, origin: Origin, file: Path | None, upstream: bytes) -> bytes:
    """The recipe as it was when it was copied, known by its digest."""
    if file is not None:
        content = _named(file)
        if digest_of(content) != origin.digest:
            raise UsageError(
                f"{file} has sha256 {digest_of(content)}, and {copy} was copied from a file with "
                f"{origin.digest}. Name recipes/{origin.file} of forgekit {origin.version}."
            )
        return content
    if digest_of(upstream) == origin.digest:
        return upstream
    kept = kept_origin(origin)
    if kept is None:
        raise UsageError(
            f"recipes/{origin.file} has changed since forgekit {origin.version}, and the text that "
            f"{copy} was copied from is not in this user's cache. Get it (`pip download --no-deps "
            f"forgekit=={origin.version}`, unzip it) and name it with --origin."
        )
    return kept


def _show(title: str, old_name: str, old: bytes, new_name: str, new: bytes) -> None:
    before, after = (text.decode(errors="replace").splitlines() for text in (old, new))
    lines = [*difflib.unified_diff(before, after, old_name, new_name, lineterm="")]
    added = sum(line.startswith("+") for line in lines[2:])
    removed = sum(line.startswith("-") for line in lines[2:])
    counts = f"+{added} -{removed} lines" if lines else "nothing"
    print(f"\n{printable(title)}: {counts}")
    for line in lines:
        print(printable(line))


def _is_wanted(copy: Path) -> bool:
    """Ask on a terminal; elsewhere nothing is written without ``--merge``."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"\nMerge both into {copy}? [y/N] ").strip().lower() in ("y", "yes")


def _merge(copy: Path, texts: Texts, names: tuple[str, str, str]) -> int:
    merged, conflicts = _three_way(texts, names)
    saved = copy.with_name(f"{copy.name}.orig")
    if saved.exists():
        raise UsageError(f"{saved} would be overwritten by the text before the merge; move it.")
    origin = origin_of(texts.upstream, texts.origin.file)
    written = stamped(merged, origin, copy.name)
    written = written.replace(b"\n", b"\r\n") if texts.is_dos else written
    replace_files({saved: copy.read_bytes(), copy: written})
    keep_origin(texts.upstream)
    print(f"wrote {printable(str(copy))}; what it was is {printable(str(saved))}")
    if conflicts:
        many = f"{conflicts} conflict{'s' if conflicts > 1 else ''}"
        tell(f"{copy} has {many}, between <<<<<<< and >>>>>>>; keep what is right of each.")
    return 1 if conflicts else 0


def _three_way(texts: Texts, names: tuple[str, str, str]) -> tuple[bytes, int]:
    if shutil.which("git") is None:
        raise UsageError("merging needs git, which is not installed; nothing was written.")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("copy", "before", "upstream")]
        for file, text in zip(files, (texts.copy, texts.before, texts.upstream), strict=True):
            file.write_bytes(text)
        labels = [word for name in names for word in ("-L", name)]
        command = ["git", "merge-file", "-p", "--diff3", *labels, *map(str, files)]
        done = subprocess.run(command, capture_output=True, check=False)
    if not 0 <= done.returncode <= 127:
        raise UsageError(f"git could not merge: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout, done.returncode
