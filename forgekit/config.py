"""A recipe's configuration: defaults, then TOML files, then KEY=VALUE, into attrs classes.

The class that a recipe defines is the whole schema. Its defaults are a tree of plain values, into
which files and the command line are merged key by key: ``model.dim=512`` keeps the other keys of
the default ``model``. The whole tree is then read strictly, so a default that was edited in a copy
is checked like a value. Nothing is coerced but ``1`` to ``1.0`` and text to a path, and nothing is
skipped: a run that trains for a day on a mistyped key costs more than a refusal, so every mistake
is named at once, before anything else has started.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs

from forgekit.checks import path_problem
from forgekit.environment import end_launcher
from forgekit.remote.urls import Url, is_url
from forgekit.terminal import printable, tell_once

__all__ = ["ConfigError", "key", "load_config", "structure", "to_dict"]

ConfigT = TypeVar("ConfigT")
Problems = list[tuple[str, str]]
"""Pairs of dotted path and text; the path is empty for the configuration as a whole."""
UNKNOWN, REQUIRED = "unknown key", "required, but not given"
SCALARS = (bool, int, float, str, Path, Url)
LONGEST = 60


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, not only the first mistake.

    Attributes:
        errors: A sentence per mistake, beginning with its path; nothing that a terminal would obey.
    """

    def __init__(self, problems: Problems) -> None:
        texts = [f"{path}: {text}" if path else text for path, text in problems]
        self.errors = [printable(f"{text.rstrip('.')}.").replace("\n", "\\n") for text in texts]
        super().__init__("\n".join(self.errors))


def key(default: Any, text: str, *, at_least: float | None = None, inf: bool = False) -> Any:
    """Declare a key of a configuration class with what ``--help`` says about it.

    Args:
        default: Its default value; ``attrs.NOTHING`` if it has to be given.
        text: One line.
        at_least: Smallest value that is accepted; of text, the fewest characters.
        inf: Whether a number may be infinite: where that means "no bound".

    Returns:
        A field, for the right side of ``name: type = key(...)``.

    Examples:
        >>> @attrs.frozen
        ... class Config:
        ...     steps: int = key(100, "Optimizer steps of the whole run.", at_least=0)
        >>> Config().steps
        100
    """

    def check(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
        for one in value.values() if isinstance(value, Mapping) else [value]:
            if not inf and isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"{field.name!r} must be finite: {one}.")
            if at_least is not None and isinstance(one, str) and len(one) < at_least:
                raise ValueError(f"Length of {field.name!r} must be >= {at_least}: {len(one)}.")
            if at_least is not None and isinstance(one, int | float) and not one >= at_least:
                raise ValueError(f"{field.name!r} must be >= {at_least}: {one}.")

    return attrs.field(default=default, validator=check, metadata={"help": text})


def load_config(
    cls: type[ConfigT], argv: Sequence[str] | None = None, *, program: str | None = None
) -> ConfigT:
    """Read ``[--config FILE.toml] [KEY=VALUE | --KEY=VALUE | --KEY VALUE ...]`` into ``cls``.

    A value is read as TOML and, where it is not TOML, as text; so ``optim.lr=1e-4`` is a float and
    ``precision=bf16`` needs no quotes. ``none`` empties a key that may be None, unless text is
    allowed there. The last of repeated files and overrides counts.

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
    files, overrides, problems = _split(arguments)
    tree, unread = _defaults(cls), []
    for file in files:
        try:  # some editors begin a file with a mark
            tree = _merge(cls, tree, tomllib.loads(Path(file).read_text(encoding="utf-8-sig")))
        except OSError as error:
            unread.append(("--config", f"cannot read {file} ({error.strerror})"))
        except ValueError as error:  # neither TOML nor, perhaps, UTF-8
            unread.append(("--config", f"{file} is not valid TOML: {error}"))
    for path, value in overrides:
        tree = _put(cls, tree, path.split("."), _parse(value))
    config, wrong = _read_all(cls, tree)
    # Keys may be missing only because a file could not be read.
    problems += [*unread, *(p for p in wrong if not (unread and p[1].startswith(REQUIRED)))]
    if problems:
        lines = [f"{program}: the configuration was refused.", *ConfigError(problems).errors]
        tell_once("\n  ".join(lines) + f"\n{program} --help lists every key.")
        end_launcher()
        raise SystemExit(2)
    return config


def structure(cls: type[ConfigT], mapping: Mapping[str, Any]) -> ConfigT:
    """Build ``cls`` from nested mappings, such as a parsed TOML file or what ``to_dict`` returned.

    Args:
        cls: An attrs class.
        mapping: Keys and plain values. A section is merged into the default that ``cls`` has for
            it; a table or list replaces its default.

    Returns:
        An instance of ``cls``.

    Raises:
        ConfigError: If anything is unknown, missing, of another type, or refused by a validator or
            ``__attrs_post_init__``. A class is only built, and its own checks only run, once all
            of its keys could be read.

    Examples:
        >>> @attrs.frozen
        ... class Config:
        ...     steps: int = 100
        >>> structure(Config, {"step": 7, "steps": 7.9})
        Traceback (most recent call last):
            ...
        forgekit.config.ConfigError: step: unknown key; the nearest is steps.
        steps: expected int, read 7.9 (float).
    """
    config, problems = _read_all(cls, _merge(cls, _defaults(cls), mapping))
    if problems:
        raise ConfigError(problems)
    return config


def to_dict(config: Any) -> Any:
    """Turn a configuration into plain values for ``config.json``; ``structure`` reads them back.

    Args:
        config: An instance of an attrs class.

    Returns:
        Nested dicts and lists of numbers, text, bools and None; paths become text.

    Examples:
        >>> @attrs.frozen
        ... class Config:
        ...     out: Path = Path("runs")
        ...     betas: tuple[float, float] = (0.9, 0.95)
        >>> to_dict(Config())
        {'out': 'runs', 'betas': [0.9, 0.95]}
    """
    if attrs.has(type(config)):
        fields = _fields(type(config)).items()
        return {alias: to_dict(getattr(config, field.name)) for alias, field in fields}
    if isinstance(config, Mapping):
        return {name: to_dict(item) for name, item in config.items()}
    if isinstance(config, list | tuple):
        return [to_dict(item) for item in config]
    return str(config) if isinstance(config, Path | Url) else config


def keys_of(
    cls: Any, tree: Mapping[str, Any] | None = None, prefix: str = ""
) -> Iterator[tuple[str, Any, str, str]]:
    """All dotted keys of ``cls`` in the order of its fields: name, type, default, description."""
    tree, texts = _defaults(cls) if tree is None else tree, _descriptions(cls)
    for alias, field in _fields(cls).items():
        name, section = f"{prefix}{alias}", _section(field.type)
        default = tree.get(alias, attrs.NOTHING)
        if section is None or default is None:
            shown = "required" if field.default is attrs.NOTHING else "computed"
            shown = shown if default is attrs.NOTHING else _show(default)
            yield name, field.type, shown, field.metadata.get("help", texts.get(field.name, ""))
        if section is not None:
            inner = default if isinstance(default, Mapping) else None
            yield from keys_of(section, inner, f"{name}.")
        for item in filter(attrs.has, get_args(field.type) if section is None else ()):
            middle = ".NAME." if get_origin(field.type) is dict else "[]."
            yield from keys_of(item, None, f"{name}{middle}")


def name_of(kind: Any) -> str:
    """Write a type; choices and ``none`` as they are typed on the command line."""
    if kind in (NoneType, ...):
        return "none" if kind is NoneType else "..."
    if get_origin(kind) is Literal:
        return " | ".join(map(str, get_args(kind)))
    if len(_arms(kind)) > 1:
        return " | ".join(map(name_of, _arms(kind)))
    if get_origin(kind) is not None:
        return f"{get_origin(kind).__name__}[{', '.join(map(name_of, get_args(kind)))}]"
    return getattr(kind, "__name__", str(kind))


def _fields(cls: Any) -> dict[str, attrs.Attribute[Any]]:
    """The fields that a configuration may give, by key, with their types as objects."""
    return {field.alias: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}


def _arms(kind: Any) -> tuple[Any, ...]:
    """The types of a union that a file can give, so no functions; one type alone is one of one."""
    if get_origin(kind) not in (Union, UnionType):
        return (kind,)
    return tuple(arm for arm in get_args(kind) if get_origin(arm) is not Callable)


def _section(kind: Any) -> Any:
    """The attrs class that ``kind`` is, or is when it is not None; else None."""
    arms = [arm for arm in _arms(kind) if arm is not NoneType]
    return arms[0] if len(arms) == 1 and attrs.has(arms[0]) else None


def _defaults(cls: Any) -> dict[str, Any]:
    """Plain values of the defaults; a section that has to be given has those of its own keys."""
    tree = {}
    for alias, field in _fields(cls).items():
        default: Any = field.default
        if isinstance(default, attrs.Factory):  # pyright: ignore[reportArgumentType]
            default = attrs.NOTHING if default.takes_self else default.factory()
        elif default is attrs.NOTHING and (section := _section(field.type)) is not None:
            default = _defaults(section)
        if default is not attrs.NOTHING:
            tree[alias] = to_dict(default)
    return tree


def _merge(kind: Any, old: Any, new: Any) -> Any:
    """Put what was given over what is there: key by key in a section, else in its place."""
    section = _section(kind)
    if section is None or not isinstance(new, Mapping):
        return new
    fields, base = _fields(section), old if isinstance(old, Mapping) else _defaults(section)
    types = {name: fields[name].type if name in fields else None for name in new}
    return {**base, **{k: _merge(types[k], base.get(k), value) for k, value in new.items()}}


def _put(kind: Any, tree: Any, parts: list[str], value: Any) -> Any:
    """Put a value at a dotted key; what lies beside it stays."""
    if not parts:
        return _merge(kind, tree, value)
    section = _section(kind)
    if section is not None and not (isinstance(tree, Mapping) or tree in (None, "none")):
        return tree  # model=3 model.dim=4: reading the tree names the 3
    first, *rest = parts
    base = tree if isinstance(tree, Mapping) else _defaults(section) if section else {}
    fields = _fields(section) if section else {}
    inner = fields[first].type if first in fields else None
    return {**base, first: _put(inner, base.get(first), rest, value)}


def _read_all(cls: Any, tree: Mapping[str, Any]) -> tuple[Any, Problems]:
    """Read a whole tree; unknown keys get the nearest one."""
    problems: Problems = []
    config = _read(tree, cls, "", problems)
    names = [name for name, *_ in keys_of(cls)]
    names += {name.rpartition(".")[0] for name in names if "." in name}
    return config, [(p, UNKNOWN + _nearest(p, names) if t is UNKNOWN else t) for p, t in problems]


def _nearest(path: str, names: list[str]) -> str:
    """Suggest the same key in another section, else the most similar path, else the last word."""
    lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
    last = path.rpartition(".")[2]
    close = difflib.get_close_matches(path, names, n=1)
    similar = difflib.get_close_matches(last, lasts, n=1)
    nearest = lasts.get(last) or (close or [lasts[word] for word in similar] or [None])[0]
    return f"; the nearest is {nearest}" if nearest else "; no key resembles it"


def _read(value: Any, kind: Any, path: str, problems: Problems) -> Any:
    """Read a value as its type says, coercing nothing: cattrs would read 7.9 as 7.

    Every mistake is added to ``problems``; what is returned beside one is of no use.
    """
    container, kinds = get_origin(kind) or kind, get_args(kind)
    if container in (Union, UnionType):
        return _read_union(value, kind, path, problems)
    if attrs.has(kind) and isinstance(value, Mapping):
        return _read_section(value, kind, path, problems)
    if container is dict and isinstance(value, Mapping):
        inner = kinds[1] if kinds else Any
        return {k: _read(item, inner, f"{path}.{k}", problems) for k, item in value.items()}
    if container in (list, tuple) and isinstance(value, list | tuple):
        kinds = kinds or (Any, ...)
        kinds = (kinds[0],) * len(value) if container is list or kinds[-1] is ... else kinds
        if len(kinds) == len(value):
            items = enumerate(zip(value, kinds, strict=True))
            return container(_read(item, k, f"{path}[{i}]", problems) for i, (item, k) in items)
        text = f"expected {len(kinds)} values for {name_of(kind)}, read {_typed(value)}"
        problems.append((path, text))
        return None
    if container is Literal:
        if any(type(choice) is type(value) and choice == value for choice in kinds):
            return value
        close = difflib.get_close_matches(str(value), map(str, kinds), n=1, cutoff=0.5)
        nearest = f"; the nearest is {close[0]}" if close else ""
        choices = ", ".join(map(str, kinds))
        problems.append((path, f"expected one of {choices}, read {_typed(value)}{nearest}"))
        return None
    return _read_scalar(value, kind, path, problems)


def _read_section(value: Mapping[str, Any], cls: Any, path: str, problems: Problems) -> Any:
    fields, values, before = _fields(cls), {}, len(problems)
    dot = f"{path}." if path else ""
    problems += [(f"{dot}{name}", UNKNOWN) for name in value if name not in fields]
    for alias, field in fields.items():
        if alias in value:
            wrong: Problems = []
            read = _read(value[alias], field.type, f"{dot}{alias}", wrong)
            problems += wrong
            if wrong:
                continue
            values[alias] = read
            if field.validator and not field.converter:  # now: no refusal hides the next
                given = SimpleNamespace(**values)
                with suppress(AttributeError):  # it compares with a field not yet read
                    _call(f"{dot}{alias}", problems, field.validator, given, field, read)
        elif field.default is attrs.NOTHING:
            problems.append((f"{dot}{alias}", f"{REQUIRED}; expected {name_of(field.type)}"))
    return _call(path, problems, partial(cls, **values)) if len(problems) == before else None


def _call(path: str, problems: Problems, check: Callable[..., Any], *args: Any) -> Any:
    """Call what a class checks itself with; its refusals are mistakes of the configuration."""
    try:
        return check(*args)
    except (TypeError, ValueError) as error:
        problems.append((path, str(error.args[0]) if error.args else repr(error)))
        return None


def _read_union(value: Any, kind: Any, path: str, problems: Problems) -> Any:
    arms = [arm for arm in _arms(kind) if arm is not NoneType]
    is_text = str in arms or any("none" in get_args(arm) for arm in arms)
    if NoneType in _arms(kind) and (value is None or (value == "none" and not is_text)):
        return None
    if Path in arms and Url in arms:  # each would refuse with less to say
        arms.remove(Path if is_url(value) else Url)
    wrong: Problems = []
    for arm in arms:
        wrong = []
        read = _read(value, arm, path, wrong)
        if not wrong:
            return read
    problems.extend(wrong if len(arms) == 1 else [(path, _mismatch(value, kind))])
    return None


def _read_scalar(value: Any, kind: Any, path: str, problems: Problems) -> Any:
    if kind is Url and is_url(value):
        return Url(value.rstrip("/"))
    if kind is Path and is_url(value):  # as a path it would be a folder of this machine
        text = f"expected a path, read the URL {value}; a key that takes URLs too is declared as "
        problems.append((path, f"{text}forgekit.Location in the recipe's Config"))
        return None
    if kind is Path and isinstance(value, str | Path):
        if wrong := path_problem(str(value)):
            problems.append((path, f"the path {wrong}"))
            return None
        return Path(value).expanduser()
    if kind is float and (type(value) is int or value in ("inf", "-inf")):  # config.json's
        return float(value)
    if kind is Any or (type(value) is kind and value == value):  # nan does not
        return value
    if kind not in SCALARS and not isinstance(value, (*SCALARS, list, tuple, Mapping, NoneType)):
        return value  # no file holds it: a default such as a function
    problems.append((path, _mismatch(value, kind)))
    return None


def _mismatch(value: Any, kind: Any) -> str:
    hint = ""
    if kind is bool:
        hint = "; write true or false"
    elif kind in (str, Path) and not isinstance(value, Mapping | list):
        hint = f"; quotes make it text: '\"{value}\"'"
    elif (get_origin(kind) or kind) in (list, tuple):
        hint = """; write TOML, such as '[1, 2]' or '["a", "b"]'"""
    return f"expected {name_of(kind)}, read {_typed(value)}{hint}"


def _typed(value: Any) -> str:
    text = _show(value)
    kind = "table" if isinstance(value, Mapping) else type(value).__name__
    return f"{text if len(text) <= LONGEST else f'{text[: LONGEST - 3]}...'} ({kind})"


def _show(value: Any) -> str:
    """Write a value as a user would in TOML; tables as JSON, which reads alike."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]], Problems]:
    """Sort arguments into configuration files, overrides and problems."""
    files, overrides, problems = [], [], []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.removeprefix("--").partition("=")
        # What follows --KEY is its value unless it can only be the next override.
        is_flag = token.startswith("--") and not equals
        if is_flag and rest and not re.match(r"--|[A-Za-z_][\w.\-]*=", rest[0]):
            equals, value = "=", rest.pop(0)
        if not equals or not re.fullmatch(r"[^\s.\-][^\s.]*(\.[^\s.]+)*", name):
            problems.append((token, "write KEY=VALUE, --KEY=VALUE or --config FILE.toml"))
        elif token.startswith("--") and name == "config":
            files.append(value)
        else:
            overrides.append((name, value))
    return files, overrides, problems


def _parse(text: str) -> Any:
    """Read one TOML value, or take the text as it is.

    The braces turn ``5 # 3`` and ``1, b = 2`` into text, of which no half can get lost.
    """
    try:
        document = tomllib.loads(f"outer = {{inner = {text}}}")
    except ValueError:
        return text
    if list(document) == ["outer"] and list(document["outer"]) == ["inner"]:
        return document["outer"]["inner"]
    return text


def _descriptions(cls: type) -> dict[str, str]:
    """First sentences of the ``Attributes:`` or ``Args:`` of a Google docstring, by name."""
    entries: dict[str, str] = {}
    for parent in reversed(cls.__mro__):
        doc = inspect.cleandoc(parent.__doc__ or "")
        section = re.search(r"^(?:Attributes|Args):\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE)
        body = textwrap.dedent(section[1]) if section else ""
        for match in re.finditer(r"^(\w+)(?: \(.*\))?:((?:.*)(?:\n[ \t]+.*)*)", body, re.MULTILINE):
            text = " ".join(match[2].split()).replace("``", "`")
            entries[match[1]] = re.split(r"(?<=\.) (?=[A-Z])", text)[0]
    return entries


def _print_help(cls: type, program: str) -> None:
    from rich.console import Console
    from rich.table import Table

    width = shutil.get_terminal_size((100, 24)).columns
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("KEY", no_wrap=True)
    for title in ("TYPE", "DEFAULT", ""):
        table.add_column(title, overflow="fold")
    for name, kind, default, text in keys_of(cls):
        table.add_row(name, name_of(kind), default, text)
    console.print(f"usage: {program} [--config FILE.toml] [KEY=VALUE | --KEY=VALUE ...]\n")
    console.print(table)
