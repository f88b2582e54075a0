"""Checks of what users and files provide (numbers, paths, JSON), and values for messages.

Python takes more than a run can use: ``True`` is an integer to it, and ``""`` a path: this folder.
Each rule stands here once, with the words of its refusal.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

LARGEST = 2**63 - 1
"""The largest int64."""

SHOWN = 60
"""Maximum length of a value in a message, in characters."""

NAMES_SHOWN = 3
"""Maximum number of names of each kind that a message about differences lists."""


_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")


class RankCountError(ValueError):
    """This number of ranks cannot share the run; another number may."""


def is_integer(value: Any) -> bool:
    """Whether a value is a single integer of Python, numpy or torch; a bool is not one.

    Examples:
        >>> is_integer(3), is_integer(True), is_integer(3.0)
        (True, False, False)
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"
    with suppress(TypeError, ValueError, RuntimeError):  # arrays, and tensors without a value
        operator.index(value)
        return not is_bool
    return False


def check_integers(**numbers: tuple[Any, int] | tuple[Any, int, int]) -> None:
    """Raise for values that are not integers, too small or too large.

    Args:
        **numbers: By the argument's name its value, the least and, if it is not ``LARGEST``, the
            most that it may be.

    Raises:
        TypeError: If a value is not an integer.
        ValueError: If it is out of range.

    Examples:
        >>> check_integers(seq_len=(0, 1))
        Traceback (most recent call last):
        ValueError: seq_len 0 must be at least 1.
    """
    for name, (value, least, *most) in numbers.items():
        if not is_integer(value):
            raise wrong_type(name, value, "an integer")
        if value < least:
            raise ValueError(f"{name} {brief(value)} must be at least {least}.")
        if value > (most or [LARGEST])[0]:
            largest = f"{most[0]:,}" if most else "2**63 - 1"
            raise ValueError(f"{name} {brief(value)} must be at most {largest}.")


def check_numbers(**numbers: tuple[Any, float]) -> None:
    """Raise for values that are not numbers, not finite or too small.

    Args:
        **numbers: By the argument's name its value and the least that it may be.

    Raises:
        TypeError: If a value is not a number.
        ValueError: If it is out of range.

    Examples:
        >>> check_numbers(peak=(float("nan"), 0))
        Traceback (most recent call last):
        ValueError: peak is nan; it must be finite and not negative.
    """
    for name, (value, least) in numbers.items():
        number = _number(value)
        if number is None:
            raise wrong_type(name, value, "a number")
        if not least <= number < math.inf:
            bound = {0: "not negative", -math.inf: "a number"}.get(least, f"at least {least}")
            raise ValueError(f"{name} is {brief(value)}; it must be finite and {bound}.")


def _number(value: Any) -> float | None:
    """Convert a real number to float, ``inf`` if it is too large; None for anything else."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):  # text has none
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # arrays, and tensors of several numbers
        return None


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise unless a value is one of the allowed words.

    Examples:
        >>> check_choice("method", "best", ["zigzag", "contiguous"])
        Traceback (most recent call last):
        ValueError: method is 'best'; it must be one of "zigzag", "contiguous".
    """
    if value not in (allowed := tuple(choices)):
        raise ValueError(f"{name} is {brief(value)}; it must be one of {quoted(allowed)}.")


def check_rank(rank: Any, world: Any) -> None:
    """Raise for a rank outside ``range(world)``.

    Raises:
        TypeError: If one of them is not an integer.
        ValueError: If there is no such rank.
    """
    check_integers(rank=(rank, -LARGEST), world=(world, -LARGEST))
    if not 0 <= rank < world:
        raise ValueError(
            f"rank {rank} must lie in range(world={world}). "
            "rank, world = forgekit.data_ranks(mesh) gives both."
        )


def wrong_type(name: str, value: Any, wanted: str) -> TypeError:
    """Build the TypeError for a value of the wrong type, with the remedy."""
    return TypeError(f"{name} is {brief(value)}, a {type(value).__name__}; pass {wanted}.")


def quoted(names: Iterable[Any]) -> str:
    """List names in quotes for a message; "nothing" if there are none.

    Examples:
        >>> print(quoted(["labels", "doc_ids"]), "and", quoted([]))
        "labels", "doc_ids" and nothing
    """
    return ", ".join(f'"{name}"' for name in names) or "nothing"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun.

    Examples:
        >>> counted(1, "bad step"), counted(1200, "bad step")
        ('1 bad step', '1,200 bad steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check_phases(phases: Iterable[Any]) -> None:
    """Raise unless each phase starts after the one before it."""
    for before, after in itertools.pairwise(phases):
        if after.start <= before.start:
            raise ValueError(
                f"a phase at sample {after.start} follows one at sample {before.start}; sort them."
            )


def nearest_multiples(size: int, divisor: int) -> str:
    """Format the nearest multiples of ``divisor``, for an error message.

    Examples:
        >>> nearest_multiples(13, 4), nearest_multiples(3, 4)
        ('the nearest are 12 and 16', 'the nearest is 4')
    """
    lower = max(size, 0) // divisor * divisor
    if not lower:
        return f"the nearest is {divisor}"
    return f"the nearest are {lower} and {lower + divisor}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number."""
    return [size for size in range(1, number + 1) if number % size == 0]


def brief(value: Any) -> str:
    r"""Format a value for a message, truncated if it is long.

    Examples:
        >>> print(brief("red: \x1b[31m"), "and", brief("a" * 100))
        'red: \x1b[31m' and 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...
    """
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """Describe the first few differences of each kind by name; "" if all is equal.

    Examples:
        >>> differences({"up": 1, "norm": 2}, {"upp": 1, "norm": 3})
        "it lacks 'up' (nearest: 'upp'); only it has 'upp'; 'norm' is 3 there and 2 here"
    """
    kinds = {
        "it lacks ": [_with_nearest(name, there) for name in here if name not in there],
        "only it has ": [repr(name) for name in there if name not in here],
        "": [
            f"{name!r} is {there[name]} there and {value} here"
            for name, value in here.items()
            if name in there and value != there[name]
        ],
    }
    return "; ".join(
        kind
        + ", ".join(names[:NAMES_SHOWN])
        + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")
        for kind, names in kinds.items()
        if names
    )


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a configuration.

    Examples:
        >>> dict(flat({"model": {"dim": 8}, "seed": 1}))
        {'model.dim': 8, 'seed': 1}
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def path_of(name: str, value: Any) -> Path:
    """Convert to a path; raise if it is empty, a URL, or invalid on a file system.

    Args:
        name: The argument's name.
        value: Text or an ``os.PathLike`` of text.

    Raises:
        TypeError: If it is neither.
        ValueError: If it is empty: as a path that would be the current folder; or if it is a URL.

    Examples:
        >>> path_of("out", "")
        Traceback (most recent call last):
        ValueError: out is empty; pass a file or folder. "." is the current folder.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise wrong_type(name, value, "a path")
    if wrong := path_problem(text):
        raise ValueError(f"{name} {wrong}.")
    if _URL.match(text):  # a path would merge its slashes, into folders of this machine
        raise ValueError(f"{name} {text} is a URL; copy it, and pass a folder of this machine.")
    return Path(text)


def path_problem(text: str) -> str | None:
    """Return why a path is refused: an empty one would be the current folder; else None."""
    return None if text else 'is empty; pass a file or folder. "." is the current folder'


def parse_json(content: str | bytes) -> Any:
    """Parse JSON; raise if an object has a key twice.

    Args:
        content: One value; bytes are UTF-8.

    Returns:
        The value.

    Raises:
        ValueError: If it is no JSON, names a key twice, or is nested too deeply.

    Examples:
        >>> parse_json('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ValueError: the key "a" appears twice in one object
    """
    try:
        return _JSON.decode(content if isinstance(content, str) else content.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _with_nearest(name: str, names: Iterable[str]) -> str:
    """Format a name for a message, with the most similar known one."""
    nearest = difflib.get_close_matches(name, [*names], n=1)
    return f"{name!r} (nearest: {nearest[0]!r})" if nearest else f"{name!r}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, inner in pairs:
        if name in value:
            raise ValueError(f"the key {json.dumps(name)} appears twice in one object")
        value[name] = inner
    return value


_JSON = json.JSONDecoder(object_pairs_hook=_object)
