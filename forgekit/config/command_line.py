"""Command line and TOML file to one tree of plain values, and from there to the class."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from forgekit.config.schema import keys_of, name_of
from forgekit.config.strict import UNKNOWN, ConfigError, collecting, shown, structure, to_dict
from forgekit.inputs import brief, too_deep, too_long
from forgekit.terminal import printable, tell_once

ConfigT = TypeVar("ConfigT")


def load_config(
    cls: type[ConfigT], argv: Sequence[str] | None = None, *, program: str | None = None
) -> ConfigT:
    """Read ``[--config FILE.toml] [KEY=VALUE | --KEY=VALUE | --KEY VALUE ...]`` into ``cls``.

    A value is read as TOML and, where it is not TOML, as text; so ``optim.lr=1e-4`` is a float and
    ``precision=bf16`` needs no quotes. ``none`` empties a key that may be None, unless text is
    allowed there. The last of repeated overrides counts.

    Args:
        cls: An attrs class; a field that holds another attrs class is a section of dotted keys.
        argv: The arguments, without the program. Defaults to those of the process.
        program: Name shown in messages. Defaults to the running script.

    Returns:
        An instance of ``cls``.

    Raises:
        SystemExit: With code 0 after ``--help``, and with code 2 after naming every mistake.

    Examples:
        >>> import attrs
        >>> @attrs.frozen
        ... class Config:
        ...     steps: int = 100
        ...     lr: float = 3e-4
        >>> load_config(Config, ["steps=5", "--lr=1"])
        Config(steps=5, lr=1.0)
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = printable(program or Path(sys.argv[0]).name)
    if "--help" in arguments or "-h" in arguments:
        _print_help(cls, program)
        raise SystemExit(0)
    try:
        return _load(cls, arguments)
    except ConfigError as error:
        lines = [f"{program}: the configuration was refused.", *error.errors]
        tell_once("\n  ".join(lines) + f"\n{program} --help lists every key.")
        raise SystemExit(2) from None


def _load(cls: type[ConfigT], arguments: list[str]) -> ConfigT:
    files, overrides, problems = _split(arguments)
    tree, file_problems = _read_files(files)
    problems += file_problems
    for key, text in overrides:
        with collecting(problems):
            tree = _override(tree, key, _parse(key, text))
    try:
        config = structure(cls, tree)
    except ConfigError as error:
        # Keys may be missing only because the file could not be read; mistakes in what the command
        # line gave are mistakes in any case.
        given = {key for key, _ in overrides}
        problems += [
            (path, text)
            for path, text in error.problems
            if not file_problems or path in given or text.startswith(UNKNOWN)
        ]
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    # A default that was edited in a copy of a recipe is checked as if it had been given. A class
    # with fields that no command line can set, such as functions, raises TypeError: it is left out.
    with suppress(TypeError):
        structure(cls, to_dict(config))
    return config


def _split(
    arguments: Sequence[str],
) -> tuple[list[str], list[tuple[str, str]], list[tuple[str, str]]]:
    """Sort arguments into configuration files, overrides and problems."""
    files, overrides, problems = [], [], []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        key, equals, value = token.removeprefix("--").partition("=")
        if token.startswith("--") and not equals and rest and _is_value(rest[0]):
            equals, value = "=", rest.pop(0)
        if not equals or not re.fullmatch(r"[^\s.\-][^\s.]*(\.[^\s.]+)*", key):
            problems.append((token, _why_refused(token)))
        elif token.startswith("--") and key == "config":
            files.append(value)
        else:
            overrides.append((key, value))
    return files, overrides, problems


def _is_value(token: str) -> bool:
    """Whether the token after ``--KEY`` can only be its value, not the next override."""
    return not token.startswith("--") and not re.match(r"[A-Za-z_][\w.\-]*=", token)


def _why_refused(token: str) -> str:
    if token.endswith(".toml"):
        return f"unknown argument; a file is given as --config {token}"
    if re.fullmatch(r"(--)?[A-Za-z_][\w.]*", token):
        return f"no value; write {token}=VALUE"
    return "unknown argument; write KEY=VALUE, --KEY=VALUE or --config FILE.toml"


def _read_files(files: list[str]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Read at most one file; return its tree and what is wrong with it."""
    if len(files) > 1:
        return {}, [("--config", f"given {len(files)} times, but one file is read; merge them")]
    if not files:
        return {}, []
    try:
        return _toml(_content(files[0])), []
    except OSError as error:
        return {}, [("--config", f"cannot read {files[0]} ({error.strerror})")]
    except ValueError as error:  # neither TOML nor, perhaps, UTF-8
        return {}, [("--config", f"{files[0]} is not valid TOML: {error}")]


def _content(file: str) -> str:
    """Read a file, or what a shell's ``<(command)`` writes; another pipe could keep us waiting.

    Raises:
        OSError: If it is not there, or neither.
    """
    status = os.stat(file)
    mode = status.st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or file.startswith("/dev/fd/")):
        raise OSError(errno.EINVAL, "It is neither a file nor a folder")
    if stat.S_ISREG(mode) and not status.st_size:
        return ""  # so has /proc/kmsg, and reading it never ends
    return Path(file).read_text(encoding="utf-8-sig")  # some editors begin with a mark


def _toml(text: str) -> dict[str, Any]:
    """Parse TOML, with a ``ValueError`` for whatever is wrong with it."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise too_deep() from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # of int(), and nothing else raises one
        raise too_long() from None


def _parse(key: str, text: str) -> Any:
    """Read one TOML value, or take the text as it is.

    The braces turn ``5 # 3`` and ``1, b = 2`` into text, of which no half can get lost.
    """
    try:
        document = _toml(f"outer = {{inner = {text}}}")
    except tomllib.TOMLDecodeError:
        return text
    except ValueError as error:
        raise ConfigError([(key, f"{brief(text)} cannot be read: {error}")]) from None
    if list(document) == ["outer"] and list(document["outer"]) == ["inner"]:
        return document["outer"]["inner"]
    return text


def _override(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return ``tree`` with ``value`` at the dotted ``key``."""
    *sections, _ = parts = key.split(".")
    below: Any = tree
    for depth, section in enumerate(sections, start=1):
        below = below.get(section, {})
        if below == "none":
            break
        if not isinstance(below, Mapping):
            above = ".".join(parts[:depth])
            raise ConfigError([(key, f"{above} was set to {shown(below)}, which has no keys")])
    for part in reversed(parts):
        value = {part: value}
    return _merge(tree, value)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        before = old.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = _merge(before, value)
        merged[key] = value
    return merged


def _print_help(cls: type, program: str) -> None:
    width = shutil.get_terminal_size((100, 24)).columns
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("KEY", no_wrap=True)
    for title in ("TYPE", "DEFAULT", ""):
        table.add_column(title, overflow="fold")
    for key in keys_of(cls):
        table.add_row(key.name, name_of(key.kind), key.default, key.text)
    console.print(f"usage: {program} [--config FILE.toml] [KEY=VALUE | --KEY=VALUE ...]\n")
    console.print(table)
