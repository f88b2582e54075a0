"""Usage errors of commands, and exit codes."""

from __future__ import annotations

import argparse
from pathlib import Path

from forgekit.checks import path_of
from forgekit.remote.urls import Location, is_url, path_or_url


class UsageError(Exception):
    """A mistake in the arguments, shown without a traceback."""


def file_path(text: str) -> Path:
    """Convert to a path; an empty one is refused, as it would be the current folder."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL; copy it, and pass the copy")
    return path_of("path", text)


def location(text: str) -> Location:
    """Convert to a path, which may not be empty, or a URL."""
    return path_or_url(text) if is_url(text) else file_path(text)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare a recipe's own settings: all arguments after its name."""
    option = parser.add_argument("settings", metavar="KEY=VALUE", nargs=argparse.REMAINDER)
    option.help = "settings of the recipe, which its --help lists"
    option.required = False


def script_file(script: Path, remedy: str) -> Path:
    """Check that a script is a regular file; reading a device or pipe may never end.

    Raises:
        UsageError: If there is no such file.
    """
    if not script.is_file():
        reason = "is a folder" if script.is_dir() else "is not there"
        raise UsageError(f"{script} {reason}; {remedy}")
    return script
