"""Mistakes in the arguments of a command, and exit codes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from forgekit.inputs import brief, path_problem
from forgekit.terminal import tell


class UsageError(Exception):
    """A mistake in the arguments; its text is all that the user needs to see."""


def integer(text: str) -> int:
    """Read a whole number that fits into 64 bits.

    Raises:
        argparse.ArgumentTypeError: If it is none.
    """
    if re.fullmatch("[+-]?[0-9]{1,18}", text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{brief(text)} is not a whole number of at most 18 digits")


def exit_code(code: object) -> int:
    """What the interpreter makes of a ``SystemExit``: text goes to stderr and counts as 1."""
    if code is None or isinstance(code, int):
        return int(code or 0)
    tell(code)
    return 1


def file_path(text: str) -> Path:
    """Read a path that a file system could hold.

    Raises:
        argparse.ArgumentTypeError: If none could, for example for its length.
    """
    if wrong := path_problem(text):
        raise argparse.ArgumentTypeError(f"the path {wrong}")
    return Path(text)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare a recipe's own settings, all that follows its name; there may be none."""
    option = parser.add_argument("settings", metavar="KEY=VALUE", nargs=argparse.REMAINDER)
    option.help = "settings of the recipe, which its --help lists"
    option.required = False


def script_file(script: Path, remedy: str) -> Path:
    """Check that a script can be read: reading a file of the system that has no size may not end.

    Raises:
        UsageError: If there is no such file, or it is empty.
    """
    if not script.is_file():
        what = "is a folder" if script.is_dir() else "is not there"
        raise UsageError(f"{script} {what}; {remedy}")
    if not script.stat().st_size:
        raise UsageError(f"{script} is empty; {remedy}")
    return script
