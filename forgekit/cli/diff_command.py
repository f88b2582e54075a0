"""``forgekit diff``: what a copied recipe changed, and what its origin changed since."""

from __future__ import annotations

import argparse
import codecs
import difflib
import shlex
from pathlib import Path
from typing import Any

from forgekit.cli.recipe_origin import VERSION, Origin, digest_of, read_stamp
from forgekit.cli.usage import UsageError, file_path, script_file
from forgekit.terminal import printable


def add_diff(commands: Any) -> None:
    """Declare ``forgekit diff`` and its arguments."""
    diff = commands.add_parser("diff", help="what a copied recipe changed, and its origin since")
    option = diff.add_argument
    option("copy", metavar="COPY", type=file_path, help="what `forgekit cp` wrote")
    option("--origin", metavar="FILE", type=file_path, help="the recipe as it was when copied")
    diff.set_defaults(command=_diff)


def _diff(options: argparse.Namespace) -> int:
    copy: Path = options.copy
    stamp = read_stamp(_text_of(copy, "name a file that `forgekit cp` wrote."))
    if stamp is None:
        raise UsageError(
            f"{copy} does not say which recipe it was copied from: no line '# Copied from forgekit "
            "...' stands at its top. `forgekit cp` writes it."
        )
    origin, text = stamp
    now = next(iter(sorted(options.recipes.rglob(origin.file))), None)
    if now is None:
        raise UsageError(
            f"{copy} was copied from recipes/{origin.file} of forgekit {origin.version}, and "
            f"forgekit {VERSION} has no such recipe; `forgekit ls` shows those it has."
        )
    then = now if options.origin is None else options.origin
    before, upstream = _text_of(then, "name the recipe as it was."), now.read_bytes()
    if digest_of(before) != origin.digest:
        raise UsageError(_other_text(copy, then, origin, is_given=options.origin is not None))
    old, new = (f"recipes/{origin.file} of forgekit {v}" for v in (origin.version, VERSION))
    print(f"{printable(copy.name)} was copied from {printable(old)}.")
    _show(f"What {copy.name} changed", old, before, copy.name, text)
    _show(f"What forgekit {VERSION} changed since", old, before, new, upstream)
    if upstream != before:
        merge = shlex.join(["git", "merge-file", *map(str, (copy, then, now))])
        print(f"\nTo merge both: {printable(merge)}")
        print(f"then its first line is of forgekit {VERSION} (sha256 {digest_of(upstream)}).")
    return 0


def _text_of(file: Path, remedy: str) -> bytes:
    """A text as recipes are written, whatever an editor or git has made of its line ends."""
    content = script_file(file, remedy).read_bytes()
    return content.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n")


def _other_text(copy: Path, then: Path, origin: Origin, *, is_given: bool) -> str:
    name = f"recipes/{origin.file} of forgekit {origin.version}"
    if is_given:
        return f"{copy} was copied from {name} with sha256 {origin.digest}; {then} has another one."
    return (
        f"recipes/{origin.file} has changed since forgekit {origin.version}. Get {name} (`pip "
        f"download --no-deps forgekit=={origin.version}`, unzip it) and name it with --origin."
    )


def _show(title: str, old_name: str, old: bytes, new_name: str, new: bytes) -> None:
    before, after = (text.decode(errors="replace").splitlines() for text in (old, new))
    lines = [*difflib.unified_diff(before, after, old_name, new_name, lineterm="")]
    added = sum(line.startswith("+") for line in lines[2:])
    removed = sum(line.startswith("-") for line in lines[2:])
    counts = f"+{added} -{removed} lines" if lines else "nothing"
    print(f"\n{printable(title)}: {counts}")
    for line in lines:
        print(printable(line))
