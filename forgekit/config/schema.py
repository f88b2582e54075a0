"""The keys of a configuration class: names, types, defaults and descriptions."""

from __future__ import annotations

import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs


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
    rules: list[Any] = [] if inf else [_check_finite]
    if at_least is not None:
        rules.append(partial(_check_least, at_least))
    return attrs.field(default=default, validator=rules or None, metadata={"help": text})


def _check_finite(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
    """Refuse a number that is not finite, in a table as well."""
    values = value.values() if isinstance(value, Mapping) else [value]
    if wrong := [one for one in values if isinstance(one, float) and not math.isfinite(one)]:
        raise ValueError(f"{field.name!r} must be finite: {wrong[0]}.")


def _check_least(least: float, config: Any, field: attrs.Attribute[Any], value: Any) -> None:
    """Refuse a number or a length below the least, in a table as well; None is above it."""
    for one in value.values() if isinstance(value, Mapping) else [value]:
        rule: Any = attrs.validators.min_len if isinstance(one, str) else attrs.validators.ge
        if one is not None:
            rule(least)(config, field, one)


def fields_of(cls: Any) -> dict[str, attrs.Attribute[Any]]:
    """The fields that a configuration may give, by key, with their types as objects."""
    return {field.alias: field for field in attrs.fields(attrs.resolve_types(cls)) if field.init}


def arms_of(kind: Any) -> tuple[Any, ...]:
    """The types of a union that a file can give, so no functions; one type alone is one of one."""
    if get_origin(kind) not in (Union, UnionType):
        return (kind,)
    return tuple(arm for arm in get_args(kind) if get_origin(arm) is not Callable)


def section_of(kind: Any) -> Any:
    """The attrs class that ``kind`` is, or is when it is not None; else None."""
    arms = [arm for arm in arms_of(kind) if arm is not NoneType]
    return arms[0] if len(arms) == 1 and attrs.has(arms[0]) else None


def default_of(field: attrs.Attribute[Any], base: Any) -> Any:
    """The value of an untouched field; ``NOTHING`` if it is required or computed from others."""
    if base is not None:
        return getattr(base, field.name)
    default: Any = field.default
    if isinstance(default, attrs.Factory):  # pyright: ignore[reportArgumentType]
        return attrs.NOTHING if default.takes_self else default.factory()
    return default


@attrs.frozen
class Key:
    """One line of ``--help``."""

    name: str
    kind: Any
    default: str
    text: str


def keys_of(cls: Any, base: Any = None, prefix: str = "") -> Iterator[Key]:
    """All dotted keys of ``cls``, in the order of its fields."""
    texts = _descriptions(cls)
    for alias, field in fields_of(cls).items():
        name, section = f"{prefix}{alias}", section_of(field.type)
        default = default_of(field, base)
        if section is None or default is None:
            text = field.metadata.get("help", texts.get(field.name, ""))
            yield Key(name, field.type, _show_default(field, default), text)
        if section is not None:
            default = default if isinstance(default, section) else None
            yield from keys_of(section if default is None else type(default), default, f"{name}.")
        for item in filter(attrs.has, get_args(field.type) if section is None else ()):
            middle = ".NAME." if get_origin(field.type) is dict else "[]."
            yield from keys_of(item, None, f"{name}{middle}")


def _show_default(field: attrs.Attribute[Any], default: Any) -> str:
    if default is attrs.NOTHING:
        return "required" if field.default is attrs.NOTHING else "computed"
    return show(default)


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


def name_of(kind: Any) -> str:
    """Write a type; choices and ``none`` as they are typed on the command line."""
    if kind in (NoneType, ...):
        return "none" if kind is NoneType else "..."
    if get_origin(kind) is Literal:
        return " | ".join(str(choice) for choice in get_args(kind))
    if len(arms_of(kind)) > 1:
        return " | ".join(name_of(arm) for arm in arms_of(kind))
    if get_origin(kind) is not None:
        return f"{get_origin(kind).__name__}[{', '.join(name_of(arm) for arm in get_args(kind))}]"
    return getattr(kind, "__name__", str(kind))


def show(value: Any) -> str:
    """Write a value as a user would in TOML."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {show(item)}' for key, item in value.items())}}}"
    return str(value)
