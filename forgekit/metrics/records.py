"""A run's JSON-lines files: ``metrics.jsonl`` and ``bad_steps.jsonl``.

Both are strict JSON, without NaN and infinities, and an interrupted run leaves their lines whole.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from forgekit.checks import parse_json
from forgekit.files import append_lines, overwrite, read_regular

BAD_STEPS = "bad_steps.jsonl"
Step = tuple[int, int | None, int, tuple[tuple[int, int], ...]]
"""Step (from 1), samples consumed before it (None if unknown) and after it, skips."""


def finite(value: Any) -> Any:
    """Replace values that are not finite by None, in lists and dicts too.

    Examples:
        >>> finite({"loss": float("nan"), "losses": (1.0, float("inf"))})
        {'loss': None, 'losses': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl`` as a list of rows, without a last line torn by a crash.

    Raises:
        OSError: If it cannot be read, or is a pipe, whose reading might never end.
        ValueError: If another line is not a JSON object with a step.
    """
    lines = read_regular(path).splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            row["step"]
        except (ValueError, TypeError, KeyError):
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number}: {line[:60].decode(errors='replace')!r} is not a JSON "
                'object with a "step". Repair or delete that line.'
            ) from None
        rows.append(row)
    return rows


class RowFile:
    """The open ``metrics.jsonl``; a second row for the last step is merged into the first."""

    def __init__(self, out: Path, start_step: int) -> None:
        path = out / "metrics.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._start, self._last = _last_row(path, start_step)
        self._line = _line(self._last) if self._last else b""
        # Unbuffered, so that one write is one system call.
        self._file = path.open("r+b", buffering=0)
        overwrite(self._file, self._start, self._line)  # later steps are redone

    def write(self, row: dict[str, Any]) -> dict[str, Any]:
        """Append a row, or merge its new keys into the last one, all or nothing.

        Returns:
            The numbers that the file did not have of this step, by name.
        """
        is_same = row["step"] == self._last.get("step")
        before = self._last if is_same else {"step": row["step"]}
        new = {name: value for name, value in row.items() if name not in before}
        if not is_same:
            self._start = self._file.seek(0, os.SEEK_END)
        row = before | row
        line = _line(row)
        overwrite(self._file, self._start, line, self._line if is_same else b"")
        self._last, self._line = row, line
        return new

    def close(self) -> None:
        """Close the file; this may happen twice."""
        self._file.close()


def _last_row(path: Path, step: int) -> tuple[int, dict[str, Any]]:
    """Return offset and content of the last row up to a step; (0, {}) if there is none."""
    content = read_regular(path)
    start = len(content)
    for number, line in enumerate(reversed(content.splitlines(keepends=True))):
        start -= len(line)
        try:
            row = parse_json(line)
            if row["step"] <= step:
                return start, row
        except (ValueError, TypeError, KeyError):
            if number > 0:
                read_metrics(path)  # raises, with the number of the line
    return 0, {}


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(finite(row), allow_nan=False)}\n".encode()


def append_bad_steps(
    run: Path, steps: Sequence[Step], numbers: Mapping[str, Tensor], loader: Any = None
) -> None:
    """Append the samples of bad steps, so that they can be inspected and replayed.

    Args:
        run: The run directory.
        steps: Good ones and bad ones.
        numbers: Their metrics by name, each ``[steps]`` on the host; ``skipped`` marks bad steps.
        loader: Its ``locate(first, stop)``, if it has one, gives the source, None if there is only
            one, and the row of each sample.
    """
    lines = []
    for index in numbers["skipped"].nonzero().flatten().tolist():
        step, first, stop, skips = steps[index]
        record = {
            "step": step,
            "samples": [first, stop],
            "skips": skips,
            "spike": "spikes" in numbers and bool(numbers["spikes"][index]),
            "loss": float(numbers["loss"][index]),
            "grad_norm": float(numbers["grad_norm"][index]),
            "script": getattr(sys.modules.get("__main__"), "__file__", None),
        }
        if hasattr(loader, "locate") and first is not None:
            sources, rows = zip(*loader.locate(first, stop), strict=True)
            record |= {"rows": rows} if None in sources else {"sources": sources, "rows": rows}
        lines.append(json.dumps(finite(record), allow_nan=False))
    append_lines(run / BAD_STEPS, lines)


def read_bad_steps(run: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the bad steps of a run, in order.

    Args:
        run: The run directory.

    Returns:
        Of each bad step ``step`` (as in ``metrics.jsonl``), ``samples`` (the first and the one
        after the last), ``skips`` (those of the state), ``spike``, ``loss`` and ``grad_norm`` (None
        if not finite), ``script``, and where the loader knows them ``rows`` and ``sources``.
    """
    return read_objects(Path(run) / BAD_STEPS)


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Read the lines that are JSON objects, not those cut short by a crash; none without a file."""
    records = []
    for line in read_regular(path).splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError):
            records.append({**parse_json(line)})
    return records
