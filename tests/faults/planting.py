"""Ways to plant a fault that outlive a rewrite of what they break.

Most faults wrap a public function, a function of torch's, or what a user passes. The few that
need a function of a room's own name it; a name that is gone, or that is not called any more, fails
the table instead of passing for a fault that nothing sees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import attrs

import forgekit as fk


@attrs.define
class Count:
    """How often what was planted was called."""

    calls: int = 0


Plant = Callable[[], AbstractContextManager[Count]]


@contextmanager
def nothing() -> Iterator[Count]:
    """No fault: the control."""
    yield Count(1)


def _counting(by: Callable[..., Any], original: Any, count: Count) -> Callable[..., Any]:
    @wraps(original)
    def planted(*args: Any, **options: Any) -> Any:
        count.calls += 1
        return by(original, *args, **options)

    return planted


def function(name: str, by: Callable[..., Any]) -> Plant:
    """Call ``by(original, *args, **options)`` wherever forgekit calls its function ``name``."""

    @contextmanager
    def plant() -> Iterator[Count]:
        getattr(fk, name, None)  # its file is imported where it is used first
        modules = [m for n, m in [*sys.modules.items()] if n.split(".")[0] == "forgekit"]
        originals = {
            value
            for module in modules
            if callable(value := vars(module).get(name)) and value.__module__ == module.__name__
        }
        assert len(originals) == 1, f"forgekit has {len(originals)} functions {name!r}, not one"
        (original,) = originals
        count = Count()
        planted = _counting(by, original, count)
        with ExitStack() as stack:
            for module in modules:
                for key in [key for key, value in vars(module).items() if value is original]:
                    stack.enter_context(mock.patch.object(module, key, planted))
            yield count

    return plant


def result(name: str, change: Callable[[Any], Any]) -> Plant:
    """Change what forgekit's function ``name`` returns, wherever it is called."""
    return function(name, lambda original, *args, **options: change(original(*args, **options)))


def method(owner: Any, name: str, by: Callable[..., Any]) -> Plant:
    """Call ``by(original, *args, **options)`` in place of a function of a class or module."""

    @contextmanager
    def plant() -> Iterator[Count]:
        count = Count()
        planted = _counting(by, getattr(owner, name), count)
        with mock.patch.object(owner, name, planted):
            yield count

    return plant


def value(owner: Any, name: str, by: Any) -> Plant:
    """Give what a user passes, such as a loss or a spec, another value."""

    @contextmanager
    def plant() -> Iterator[Count]:
        if isinstance(owner, dict):
            assert name in owner
            patch: Any = mock.patch.dict(owner, {name: by})
        else:
            patch = mock.patch.object(owner, name, by)
        with patch:
            yield Count(1)

    return plant


def both(*plants: Plant) -> Plant:
    """Several at once, each of which has to be called."""

    @contextmanager
    def plant() -> Iterator[Count]:
        least = Count()
        with ExitStack() as stack:
            counts = [stack.enter_context(plant()) for plant in plants]
            yield least
        least.calls = min(count.calls for count in counts)

    return plant
