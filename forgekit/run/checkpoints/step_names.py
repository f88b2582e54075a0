"""Names of checkpoints: ``step_00000100`` for what is committed, hidden names for all else."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

_STEP = re.compile(r"step_(\d{8,})")


def step_name(step: int) -> str:
    """Name the directory of a step."""
    return f"step_{step:08d}"


def steps_among(names: Iterable[str]) -> dict[int, str]:
    """Return those of the names that are a step's, by step."""
    return {int(match[1]): name for name in names if (match := _STEP.fullmatch(name))}


def unique(stem: str) -> str:
    """Append eight random hexadecimal digits to a name."""
    return f"{stem}-{uuid.uuid4().hex[:8]}"
