"""Plain values to attrs classes and back, without coercion and with every mistake named."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from itertools import repeat
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import attrs
from cattrs import Converter

from forgekit.config.schema import (
    arms_of,
    default_of,
    fields_of,
    keys_of,
    name_of,
    section_of,
    show,
)
from forgekit.inputs import LARGEST, brief, path_problem
from forgekit.terminal import printable

ConfigT = TypeVar("ConfigT")

UNKNOWN = "unknown key"

LONGEST_KEY = 100
"""Characters of a dotted path in a message."""

_SCALARS = (bool, int, float, str, Path)
_ABSENT = object()


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, not only the first mistake.

    Attributes:
        problems: Pairs of dotted path and text; the path is empty for the configuration as a whole.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.errors))

    @property
    def errors(self) -> list[str]:
        """One sentence per problem, beginning with its path; nothing that a terminal would obey."""
        sentences = [f"{_cut(path)}: {text}" if path else text for path, text in self.problems]
        ended = [text if text.endswith(".") else f"{text}." for text in sentences]
        return [printable(text).replace("\n", "\\n") for text in ended]


def _cut(path: str) -> str:
    return path if len(path) <= LONGEST_KEY else f"{path[: LONGEST_KEY - 3]}..."


def structure(cls: type[ConfigT], mapping: Mapping[str, Any]) -> ConfigT:
    """Build ``cls`` from nested mappings, such as a parsed TOML file or what ``to_dict`` returned.

    Args:
        cls: An attrs class.
        mapping: Keys and plain values. A section is merged into the default that ``cls`` has for
            it, and so is a table; a list replaces its default.

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
        forgekit.config.strict.ConfigError: step: unknown key; the nearest is steps.
        steps: expected int, read 7.9 (float).
    """
    try:
        return _build(cls, mapping)
    except ConfigError as error:
        problems = error.problems
    names = [key.name for key in keys_of(cls)]
    names += {name.rpartition(".")[0] for name in names if "." in name}
    raise ConfigError(
        (path, UNKNOWN + _nearest_key(path, names) if text is UNKNOWN else text)
        for path, text in problems
    )


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


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {
            key: _plain(getattr(value, field.name)) for key, field in fields_of(type(value)).items()
        }
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _nearest_key(path: str, names: list[str]) -> str:
    """Suggest the same key in another section, else the most similar path, else the last word."""
    lasts = {name.rpartition(".")[2]: name for name in reversed(names)}
    last = path.rpartition(".")[2]
    close = difflib.get_close_matches(path, names, n=1)
    similar = difflib.get_close_matches(last, lasts, n=1)
    nearest = lasts.get(last) or (close or [lasts[word] for word in similar] or [None])[0]
    return f"; the nearest is {nearest}" if nearest else "; no key resembles it"


def _build(cls: Any, given: Mapping[str, Any], base: Any = None) -> Any:
    """Build ``cls`` from ``given``; keys that are not given are as in ``base``, where there is one.

    Raises:
        ConfigError: With paths relative to ``cls``.
    """
    cls = cls if base is None else type(base)
    fields = fields_of(cls)
    unknown = [(key, UNKNOWN) for key in given if key not in fields]
    problems: list[tuple[str, str]] = []
    values: dict[str, Any] = {}
    for key, field in fields.items():
        if key in given or (base is None and field.default is attrs.NOTHING):
            with collecting(problems, key):
                values[key] = _read(field, given.get(key, _ABSENT), default_of(field, base))
    partial = cls.__new__(cls) if base is None else copy(base)
    for key, value in values.items():
        object.__setattr__(partial, fields[key].name, value)
    for key, value in values.items():
        with collecting(problems, key):
            _validate(fields[key], partial, value)
    built = None
    if not problems:
        with collecting(problems):
            built = _construct(cls, values, base)
    if unknown or problems:
        raise ConfigError(unknown + problems)
    return built


def _read(field: attrs.Attribute[Any], value: Any, default: Any) -> Any:
    section = section_of(field.type)
    if value is _ABSENT:
        if section is None:
            raise _refusal(f"required, but not given; expected {name_of(field.type)}")
        value = {}  # so that the section's own required keys are the ones that are named
    if section is not None and isinstance(value, Mapping):
        return _build(section, value, default if isinstance(default, section) else None)
    if isinstance(default, Mapping) and isinstance(value, Mapping):
        value = {**default, **value}
    return _CONVERTER.structure(value, field.type)  # pyright: ignore[reportArgumentType]


def _validate(field: attrs.Attribute[Any], partial: Any, value: Any) -> None:
    """Run a field's validator before its class is built, so that no refusal hides the next."""
    if field.validator is None or field.converter is not None:
        return
    try:
        field.validator(partial, field, value)
    except AttributeError:
        return  # it compares with a field that has no value yet; building the class runs it again
    except (TypeError, ValueError) as error:
        raise _refusal(str(error.args[0])) from None


def _construct(cls: Any, values: dict[str, Any], base: Any) -> Any:
    try:
        return cls(**values) if base is None else attrs.evolve(base, **values)
    except ValueError as error:
        raise _refusal(str(error.args[0]) if error.args else repr(error)) from None


def _refusal(text: str) -> ConfigError:
    return ConfigError([("", text)])


@contextmanager
def collecting(problems: list[tuple[str, str]], prefix: str = "") -> Iterator[None]:
    """Add what a ``ConfigError`` carries to ``problems``, its paths below ``prefix``."""
    try:
        yield
    except ConfigError as error:
        for path, text in error.problems:
            dot = "." if prefix and path and not path.startswith("[") else ""
            problems.append((f"{prefix}{dot}{path}", text))


def _scalar(value: Any, kind: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return _path(value)
    if kind is float and type(value) is int:
        with suppress(OverflowError):
            return float(value)
    if kind is float and value in ("inf", "-inf"):  # as config.json has it
        return float(value)
    if type(value) is not kind:
        raise _mismatch(kind, value)
    if kind is int and not -LARGEST <= value <= LARGEST:
        raise _refusal(f"read {brief(value)}; the largest integer is 2**63 - 1 = {LARGEST:,}")
    if value != value:
        raise _refusal("read nan, which is not a number; write one, or inf for no bound")
    return value


def _path(value: str | Path) -> Path:
    """Read a path that a file system could hold."""
    text = value if isinstance(value, str) else str(value)
    if wrong := path_problem(text):
        raise _refusal(f"the path {wrong}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise _refusal(f"{shown(user)} has no home folder here; write ./{user} or a path") from None


def _literal(value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if any(type(choice) is type(value) and choice == value for choice in choices):
        return value
    names = [str(choice) for choice in choices]
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    nearest = f"; the nearest is {close[0]}" if close else ""
    raise _refusal(f"expected one of {', '.join(names)}, read {_read_as(value)}{nearest}")


def _union(value: Any, kind: Any) -> Any:
    arms = [arm for arm in arms_of(kind) if arm is not NoneType]
    is_text = str in arms or any("none" in get_args(arm) for arm in arms)
    if NoneType in arms_of(kind) and (value is None or (value == "none" and not is_text)):
        return None
    if len(arms) == 1:
        return _CONVERTER.structure(value, arms[0])
    for arm in arms:
        with suppress(ConfigError):
            return _CONVERTER.structure(value, arm)
    raise _mismatch(kind, value)


def _sequence(value: Any, kind: Any) -> Any:
    container = get_origin(kind) or kind
    inner = get_args(kind) or (Any, ...)
    if not isinstance(value, list | tuple):
        raise _mismatch(kind, value)
    if container is list or inner[-1] is ...:
        inner = (inner[0],) * len(value)
    if len(inner) != len(value):
        raise _refusal(f"expected {len(inner)} values for {name_of(kind)}, read {shown(value)}")
    labels = (f"[{index}]" for index in range(len(value)))
    return container(_read_items(labels, value, inner))


def _table(value: Any, kind: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _mismatch(kind, value)
    item_kind = get_args(kind)[1] if get_args(kind) else Any
    items = _read_items(value, value.values(), repeat(item_kind))
    return dict(zip(value, items, strict=True))


def _read_items(labels: Iterable[str], values: Iterable[Any], kinds: Iterable[Any]) -> list[Any]:
    problems: list[tuple[str, str]] = []
    items = []
    for label, value, kind in zip(labels, values, kinds, strict=False):
        with collecting(problems, label):
            items.append(_CONVERTER.structure(value, kind))
    if problems:
        raise ConfigError(problems)
    return items


def _nested(value: Any, kind: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise _mismatch(kind, value)
    return _build(kind, value)


def _unsupported(_: Any, kind: Any) -> NoReturn:
    raise TypeError(
        f"a configuration class cannot have a field of type {name_of(kind)}; use int, float, bool, "
        "str, Path, Literal, list, tuple, dict[str, ...], None, or an attrs class."
    )


def _mismatch(kind: Any, value: Any) -> ConfigError:
    hint = ""
    if kind is bool and isinstance(value, str):
        hint = "; write true or false"
    elif kind in (str, Path) and isinstance(value, bool | int | float):
        hint = f"; quotes make it text: '{show(shown(value))}'"
    elif (get_origin(kind) or kind) in (list, tuple) and isinstance(value, str):
        hint = """; write TOML, such as '[1, 2]' or '["a", "b"]'"""
    return _refusal(f"expected {name_of(kind)}, read {_read_as(value)}{hint}")


def _read_as(value: Any) -> str:
    """Write a value as in TOML, shortened, and its type."""
    kind = "table" if isinstance(value, Mapping) else type(value).__name__
    return f"{shown(value)} ({kind})"


def shown(value: Any) -> str:
    """Write a value as in TOML, shortened."""
    try:
        text = show(value)
    except (RecursionError, ValueError):  # too deep, or an integer that Python does not write
        text = brief(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _strict_converter() -> Converter:
    """A converter that coerces nothing: cattrs itself reads 7.9 as 7 and text as a list."""
    converter = Converter()
    hooks = (
        (lambda _: True, _unsupported),  # the hook that was registered last is asked first
        (lambda kind: kind is Any, lambda value, _: value),
        (lambda kind: get_origin(kind) is Literal, _literal),
        (lambda kind: len(arms_of(kind)) > 1, _union),
        (lambda kind: (get_origin(kind) or kind) in (list, tuple), _sequence),
        (lambda kind: (get_origin(kind) or kind) is dict, _table),
        (attrs.has, _nested),
    )
    for accepts, hook in hooks:
        converter.register_structure_hook_func(accepts, hook)
    for kind in _SCALARS:
        converter.register_structure_hook(kind, _scalar)
    return converter


_CONVERTER = _strict_converter()
