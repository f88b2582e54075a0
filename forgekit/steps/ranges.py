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
"""Does nothing; one for all, as a step enters several for each micro-batch."""


def named(name: str) -> AbstractContextManager[object]:
    """What happens inside is ``forgekit.<name>`` in the trace of a profiler that runs."""
    return record_function(PREFIX + name) if _profiler_enabled() else NOTHING


def ranged(function: Callable[P, R]) -> Callable[P, R]:
    """Give each call of a function its name in the trace of a profiler that runs."""

    @wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        if not _profiler_enabled():
            return function(*args, **keywords)
        with named(function.__name__):
            return function(*args, **keywords)

    return call
