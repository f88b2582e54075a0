"""Mistakes in the arguments of a command, and exit codes."""

from __future__ import annotations

import argparse
from pathlib import Path

from forgekit.checks import path_of
from forgekit.remote.urls import Location, is_url, path_or_url


class UsageError(Exception):
    """A mistake in the arguments; its text is all that the user needs to see."""


def file_path(text: str) -> Path:
    """Read a path that is not empty: as a path that would be the current folder."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL; copy what is there, and name the copy")
    return path_of("path", text)


def location(text: str) -> Location:
    """Read a path that is not empty, or a URL."""
    return path_or_url(text) if is_url(text) else file_path(text)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare a recipe's own settings, all that follows its name; there may be none."""
    option = parser.add_argument("settings", metavar="KEY=VALUE", nargs=argparse.REMAINDER)
    option.help = "settings of the recipe, which its --help lists"
    option.required = False


def script_file(script: Path, remedy: str) -> Path:
    """Check that a script can be read; a device or a pipe in its place may not end.

    Raises:
        UsageError: If there is no such file.
    """
    if not script.is_file():
        reason = "is a folder" if script.is_dir() else "is not there"
        raise UsageError(f"{script} {reason}; {remedy}")
    return script
