"""Names for the parts of a step in a profiler's trace; without a profiler they cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")

PREFIX = "forgekit."
NOTHING = nullcontext()
"""A context manager that does nothing."""


def named(name: str) -> AbstractContextManager[object]:
    """Name the block ``forgekit.<name>`` in the trace of a running profiler."""
    return record_function(PREFIX + name) if _profiler_enabled() else NOTHING


def ranged(function: Callable[P, R]) -> Callable[P, R]:
    """Name each call of a function in the trace of a running profiler."""

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if not _profiler_enabled():
            return function(*args, **keywords)
        with named(function.__name__):
            return function(*args, **keywords)

    return call
