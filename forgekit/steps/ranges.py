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


def named(name: str) -> AbstractContextManager[object]:
    """What happens inside is ``forgekit.<name>`` in the trace of a profiler that runs."""
    return record_function(PREFIX + name) if _profiler_enabled() else nullcontext()


def ranged(function: Callable[P, R]) -> Callable[P, R]:
    """Give each call of a function its name in the trace of a profiler that runs."""

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        with named(function.__name__):
            return function(*args, **keywords)

    return call
