"""A recipe's configuration: defaults, then one TOML file, then KEY=VALUE, into attrs classes.

The class that a recipe defines is the whole schema. Its defaults are a tree of plain values, into
which the file and the command line are merged key by key: ``model.dim=512`` keeps the other keys of
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
from cattrs import Converter

from forgekit.checks import parse_json, path_problem
from forgekit.environment import end_launcher
from forgekit.remote.urls import Url, is_url, path_or_url
from forgekit.terminal import printable, tell_once

__all__ = ["ConfigError", "key", "load_config", "structure", "to_dict"]

ConfigT = TypeVar("ConfigT")
Problems = list[tuple[str, str]]
"""Pairs of dotted path and message; the path is empty for the whole configuration."""
UNKNOWN, REQUIRED = "unknown key", "required, but not given"
SCALARS = (bool, int, float, str, Path, Url)
LONGEST = 60


class ConfigError(ValueError):
    """All mistakes of a configuration, not only the first.

    Attributes:
        problems: Pairs of dotted path and text.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.errors))

    @property
    def errors(self) -> list[str]:
        """One sentence per problem, beginning with its path; nothing that a terminal would obey."""
        texts = [f"{path}: {text}" if path else text for path, text in self.problems]
        return [printable(f"{text.rstrip('.')}.").replace("\n", "\\n") for text in texts]


def key(default: Any, text: str, *, at_least: float | None = None, inf: bool = False) -> Any:
    """Declare a key of a configuration class with its ``--help`` text.

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
    files, overrides, problems = _split(arguments)
    tree, file_problems = _read_files(cls, files)
    problems += file_problems
    for path, value in overrides:
        tree = _put(cls, tree, path.split("."), _parse(value))
    config, wrong = _read_all(cls, tree)
    # A file that could not be read would make keys seem missing.
    problems += [p for p in wrong if not (file_problems and p[1].startswith(REQUIRED))]
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


def to_dict(config: Any) -> dict[str, Any]:
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
    return _plain(config)


def keys_of(
    cls: Any, tree: Mapping[str, Any] | None = None, prefix: str = ""
) -> Iterator[tuple[str, Any, str, str]]:
    """List the dotted keys of ``cls`` with type, default and description, in field order."""
    tree, texts = _defaults(cls) if tree is None else tree, _descriptions(cls)
    for alias, field in _fields(cls).items():
        name, section = f"{prefix}{alias}", _section(field.type)
        default = tree.get(alias, attrs.NOTHING)
        if section is None or default is None:
            shown = "required" if field.default is attrs.NOTHING else "computed"
            shown = shown if default is attrs.NOTHING else _show(default)
            text = field.metadata.get("help", texts.get(field.name, ""))
            yield name, field.type, shown, text
        if section is not None:
            yield from keys_of(
                section, default if isinstance(default, Mapping) else None, f"{name}."
            )
        for item in filter(attrs.has, get_args(field.type) if section is None else ()):
            middle = ".NAME." if get_origin(field.type) is dict else "[]."
            yield from keys_of(item, None, f"{name}{middle}")


def name_of(kind: Any) -> str:
    """Format a type; choices and ``none`` as they are typed on the command line."""
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
    """Return the fields that a configuration may set, by key, with resolved types."""
    return {field.alias: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}


def _arms(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union that a file can express, so no functions."""
    if get_origin(kind) not in (Union, UnionType):
        return (kind,)
    return tuple(arm for arm in get_args(kind) if get_origin(arm) is not Callable)


def _section(kind: Any) -> Any:
    """Return the attrs class of ``kind``, which may be optional; else None."""
    arms = [arm for arm in _arms(kind) if arm is not NoneType]
    return arms[0] if len(arms) == 1 and attrs.has(arms[0]) else None


def _defaults(cls: Any) -> dict[str, Any]:
    """Return the defaults as plain values; a required section has the defaults of its own keys."""
    tree = {}
    for alias, field in _fields(cls).items():
        default: Any = field.default
        if isinstance(default, attrs.Factory):  # pyright: ignore[reportArgumentType]
            default = attrs.NOTHING if default.takes_self else default.factory()
        elif default is attrs.NOTHING and (section := _section(field.type)) is not None:
            default = _defaults(section)
        if default is not attrs.NOTHING:
            tree[alias] = _plain(default)
    return tree


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {k: _plain(getattr(value, field.name)) for k, field in _fields(type(value)).items()}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path | Url) else value


def _merge(kind: Any, old: Any, new: Any) -> Any:
    """Merge given values into a tree: sections key by key, all else replaced."""
    section = _section(kind)
    if section is None or not isinstance(new, Mapping):
        return new
    fields, base = _fields(section), old if isinstance(old, Mapping) else _defaults(section)
    types = {name: fields[name].type if name in fields else None for name in new}
    return {**base, **{k: _merge(types[k], base.get(k), value) for k, value in new.items()}}


def _put(kind: Any, tree: Any, parts: list[str], value: Any) -> Any:
    """Set a value at a dotted key; its siblings stay."""
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
    """Build a class from a tree; unknown keys are reported with the nearest known one."""
    config, problems = None, []
    with _collecting(problems):
        config = _CONVERTER.structure(tree, cls)
    names = [name for name, *_ in keys_of(cls)]
    names += {name.rpartition(".")[0] for name in names if "." in name}
    suggest = [
        (p, UNKNOWN + _nearest(p, names) if text is UNKNOWN else text) for p, text in problems
    ]
    return config, suggest


def _nearest(path: str, names: list[str]) -> str:
    """Suggest the same key in another section, else the most similar path, else the last word."""
    lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
    last = path.rpartition(".")[2]
    close = difflib.get_close_matches(path, names, n=1)
    similar = difflib.get_close_matches(last, lasts, n=1)
    nearest = lasts.get(last) or (close or [lasts[word] for word in similar] or [None])[0]
    return f"; the nearest is {nearest}" if nearest else "; no key resembles it"


@contextmanager
def _collecting(problems: Problems, prefix: str = "") -> Iterator[None]:
    """Add the problems of a ``ConfigError`` to the list, with their paths below a prefix."""
    try:
        yield
    except ConfigError as error:
        for path, text in error.problems:
            dot = "." if prefix and path and not path.startswith("[") else ""
            problems.append((f"{prefix}{dot}{path}", text))


def _read_section(value: Any, cls: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _mismatch(value, cls)
    fields, values = _fields(cls), {}
    problems: Problems = [(name, UNKNOWN) for name in value if name not in fields]
    for alias, field in fields.items():
        with _collecting(problems, alias):
            if alias in value:
                read = _CONVERTER.structure(value[alias], field.type)  # pyright: ignore[reportArgumentType]
                values[alias] = read
                if field.validator and not field.converter:  # now: no error hides the next
                    with suppress(AttributeError):  # it compares with a field not yet read
                        _refusing(field.validator, SimpleNamespace(**values), field, read)
            elif field.default is attrs.NOTHING:
                raise _refusal(f"{REQUIRED}; expected {name_of(field.type)}")
    if problems:
        raise ConfigError(problems)
    return _refusing(cls, **values)


def _refusing(call: Callable[..., Any], *args: Any, **values: Any) -> Any:
    """Call a class's own checks; what they raise are mistakes of the configuration."""
    try:
        return call(*args, **values)
    except (TypeError, ValueError) as error:
        raise _refusal(str(error.args[0]) if error.args else repr(error)) from None


def _read_union(value: Any, kind: Any) -> Any:
    arms = [arm for arm in _arms(kind) if arm is not NoneType]
    is_text = str in arms or any("none" in get_args(arm) for arm in arms)
    if NoneType in _arms(kind) and (value is None or (value == "none" and not is_text)):
        return None
    if Path in arms and Url in arms:  # each would refuse with less to say
        arms.remove(Path if is_url(value) else Url)
    if len(arms) == 1:
        return _CONVERTER.structure(value, arms[0])
    for arm in arms:
        with suppress(ConfigError):
            return _CONVERTER.structure(value, arm)
    raise _mismatch(value, kind)


def _read_choice(value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if any(type(choice) is type(value) and choice == value for choice in choices):
        return value
    names = list(map(str, choices))
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    nearest = f"; the nearest is {close[0]}" if close else ""
    raise _refusal(f"expected one of {', '.join(names)}, read {_typed(value)}{nearest}")


def _read_sequence(value: Any, kind: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _mismatch(value, kind)
    container, kinds = get_origin(kind) or kind, get_args(kind) or (Any, ...)
    kinds = (kinds[0],) * len(value) if container is list or kinds[-1] is ... else kinds
    if len(kinds) != len(value):
        raise _refusal(f"expected {len(kinds)} values for {name_of(kind)}, read {_typed(value)}")
    labels = (f"[{index}]" for index in range(len(value)))
    return container(_read_items(zip(labels, value, kinds, strict=True)).values())


def _read_table(value: Any, kind: Any) -> dict[str, Any]:
    if isinstance(value, str):  # a table as JSON writes it, which is no TOML
        with suppress(ValueError):
            value = parse_json(value)
    if not isinstance(value, Mapping):
        raise _mismatch(value, kind)
    inner = get_args(kind)[1] if get_args(kind) else Any
    return _read_items((name, item, inner) for name, item in value.items())


def _read_items(items: Iterable[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Convert labelled values, each to its type; collect all mistakes."""
    problems: Problems = []
    read = {}
    for label, value, kind in items:
        with _collecting(problems, label):
            read[label] = _CONVERTER.structure(value, kind)
    if problems:
        raise ConfigError(problems)
    return read


def _read_scalar(value: Any, kind: Any) -> Any:
    if kind is Url and is_url(value):
        return Url(value.rstrip("/"))
    if kind is Path and isinstance(value, str | Path):
        if is_url(value):
            raise _refusal(
                f"expected a path, read the URL {value}; declare a key that also takes URLs "
                "as forgekit.Location in the recipe's Config"
            )
        if wrong := path_problem(str(value)):
            raise _refusal(f"the path {wrong}")
        _refusing(path_or_url, value)
        return Path(value).expanduser()
    if kind is float and (type(value) is int or value in ("inf", "-inf")):  # config.json's
        return float(value)
    if type(value) is not kind or value != value:  # nan is not a value of any key
        raise _mismatch(value, kind)
    return value


def _read_unsupported(value: Any, kind: Any) -> Any:
    if isinstance(value, (*SCALARS, list, tuple, Mapping, NoneType)) and kind is not Any:
        raise TypeError(
            f"a configuration class cannot have a field of type {name_of(kind)}; use int, float, "
            "bool, str, Path, Literal, list, tuple, dict[str, ...], None, or an attrs class."
        )
    return value  # no file holds it: a default such as a function


def _refusal(text: str) -> ConfigError:
    return ConfigError([("", text)])


def _mismatch(value: Any, kind: Any) -> ConfigError:
    hint = ""
    if kind is bool:
        hint = "; write true or false"
    elif kind in (str, Path) and not isinstance(value, Mapping | list):
        hint = f"; quotes make it text: '\"{value}\"'"
    elif (get_origin(kind) or kind) in (list, tuple):
        hint = """; write TOML, such as '[1, 2]' or '["a", "b"]'"""
    return _refusal(f"expected {name_of(kind)}, read {_typed(value)}{hint}")


def _strict_converter() -> Converter:
    """Make a converter that coerces nothing: cattrs reads 7.9 as 7 and text as a list."""
    converter = Converter()
    hooks = (  # hooks are tried last registered first
        (lambda _: True, _read_unsupported),
        (lambda kind: get_origin(kind) is Literal, _read_choice),
        (lambda kind: get_origin(kind) in (Union, UnionType), _read_union),
        (lambda kind: (get_origin(kind) or kind) in (list, tuple), _read_sequence),
        (lambda kind: (get_origin(kind) or kind) is dict, _read_table),
        (attrs.has, _read_section),
    )
    for accepts, hook in hooks:
        converter.register_structure_hook_func(accepts, hook)
    for kind in SCALARS:
        converter.register_structure_hook(kind, _read_scalar)
    return converter


_CONVERTER = _strict_converter()


def _typed(value: Any) -> str:
    text = _show(value)
    kind = "table" if isinstance(value, Mapping) else type(value).__name__
    return f"{text if len(text) <= LONGEST else f'{text[: LONGEST - 3]}...'} ({kind})"


def _show(value: Any) -> str:
    """Format a value as TOML; tables as JSON, which reads alike."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _split(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]], Problems]:
    """Divide arguments into configuration files, overrides and problems."""
    files, overrides, problems = [], [], []
    rest = list(arguments)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.removeprefix("--").partition("=")
        # The argument after --KEY is its value, unless it can only be the next override.
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


def _read_files(cls: Any, files: list[str]) -> tuple[dict[str, Any], Problems]:
    """Merge files into the defaults, later ones on top; collect their problems."""
    tree: dict[str, Any] = _defaults(cls)
    for file in files:
        try:  # some editors begin a file with a mark
            tree = _merge(cls, tree, tomllib.loads(Path(file).read_text(encoding="utf-8-sig")))
        except OSError as error:
            return tree, [("--config", f"cannot read {file} ({error.strerror})")]
        except ValueError as error:  # neither TOML nor, perhaps, UTF-8
            return tree, [("--config", f"{file} is not valid TOML: {error}")]
    return tree, []


def _parse(text: str) -> Any:
    """Parse a TOML value; anything else is text.

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
    """Return the first sentence on each name under ``Attributes:`` or ``Args:`` of a docstring."""
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
