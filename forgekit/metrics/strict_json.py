"""Numbers as strict JSON has them, in which there is no NaN and no infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """Put None in place of what is not finite, in lists and dicts too.

    Examples:
        >>> finite({"loss": float("nan"), "losses": (1.0, float("inf"))})
        {'loss': None, 'losses': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
