"""``metrics.jsonl`` as columns, read on from where the last look at it ended."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

LARGEST_STEP = 2**63 - 1

HUGE = 2**1023
"""Integers from here on may be too large for a float."""


@attrs.define
class GrowingFile:
    """The whole lines of a file that a run writes to; each look reads what is new.

    A run may write its last line again, longer, and a resumed run replaces the file by a shorter
    one. So each look begins at the last line of the look before, and at the start if that line is
    another one now.

    Attributes:
        path: The file, which need not be there yet.
        ends_in_half_a_line: Whether something followed the last whole line at the last look.
    """

    path: Path
    ends_in_half_a_line: bool = False
    _start: int = 0
    _last: bytes = b""
    _seen: tuple[int, ...] = ()

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether all lines read before are void, and the lines from there on.

        If they are not void, the first line replaces the last one of the look before. An unchanged
        file has no lines.
        """
        try:
            file = self.path.open("rb")
        except OSError:
            return False, []
        with file:
            found = os.fstat(file.fileno())
            now = (found.st_ino, found.st_size, found.st_mtime_ns)
            if now == self._seen:
                return False, []
            file.seek(self._start)
            content = file.read()
            is_same = bool(self._last) and _begins_alike(content, self._last)
            if not is_same:
                file.seek(0)
                self._start, content = 0, file.read()
        self._seen = now
        end = content.rfind(b"\n") + 1  # what follows it is half a line
        self.ends_in_half_a_line = end < len(content)
        lines = content[:end].splitlines()
        if lines:
            self._start += content.rfind(b"\n", 0, end - 1) + 1
            self._last = lines[-1]
        return not is_same, lines


def _begins_alike(content: bytes, line: bytes) -> bool:
    """Whether a line, such as ``{"step": 20, ...``, is the old one or the old one with more."""
    return content.partition(b",")[0] == line.partition(b",")[0]


@attrs.define
class Column:
    """One metric: ``values`` at ``steps``, NaN where a row says null."""

    steps: array[int] = attrs.field(factory=lambda: array("q"))
    values: array[float] = attrs.field(factory=lambda: array("d"))


@attrs.define
class Metrics:
    """The rows of a ``metrics.jsonl`` by metric.

    Attributes:
        numbers: Metrics that are one number per row.
        lists: Metrics that are several, such as the loads of a layer's experts: steps and rows.
        rows: How many rows there are.
        broken: Lines that are no row, as number and beginning.
    """

    numbers: dict[str, Column] = attrs.field(factory=dict)
    lists: dict[str, list[tuple[int, array[float]]]] = attrs.field(factory=dict)
    rows: int = 0
    broken: list[tuple[int, str]] = attrs.field(factory=list)
    _lengths: dict[str, int] = attrs.field(factory=dict)
    _was_row: bool = False

    def add(self, lines: Sequence[bytes]) -> None:
        """Take more lines of the file."""
        for number, line in enumerate(lines, start=1):
            if number == len(lines):
                self._lengths = {name: len(c.steps) for name, c in self.numbers.items()}
                self._lengths |= {name: len(rows) for name, rows in self.lists.items()}
            row = _row(line)
            self._was_row = row is not None
            if row is None:
                self.broken.append((self.rows + len(self.broken) + 1, _shown(line)))
            else:
                self._keep(row)
                self.rows += 1

    def forget_last(self) -> None:
        """Take the last line back: it comes again, maybe with more in it."""
        if self._was_row:
            self.rows -= 1
        else:
            self.broken.pop()
        for name, column in self.numbers.items():
            length = self._lengths.get(name, 0)
            del column.steps[length:], column.values[length:]
        for name, rows in self.lists.items():
            del rows[self._lengths.get(name, 0) :]

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps, increasing, and values of a metric; of a step that stands twice the last one."""
        column = self.numbers.get(name, Column())
        steps, values = np.array(column.steps, np.int64), np.array(column.values, np.float64)
        values[~np.isfinite(values)] = np.nan
        if np.any(np.diff(steps) <= 0):  # rows of another tool, or of two runs in one file
            steps, first = np.unique(steps[::-1], return_index=True)
            values = values[::-1][first]
        return steps, values

    def gaps(self) -> list[tuple[str, int, int]]:
        """Metrics with numbers that are not finite: name, how many rows, the first one's step."""
        columns = {name: self.column(name) for name in self.numbers}
        lost = {name: steps[np.isnan(values)] for name, (steps, values) in columns.items()}
        return [(name, len(steps), int(steps[0])) for name, steps in lost.items() if len(steps)]

    def _keep(self, row: dict[str, Any]) -> None:
        step, numbers = row["step"], self.numbers
        for name, value in row.items():
            try:
                column = numbers[name]
                column.values.append(value)
            except (KeyError, TypeError, OverflowError):  # a new metric, or not a number
                self._keep_other(step, name, value)
            else:
                column.steps.append(step)

    def _keep_other(self, step: int, name: str, value: Any) -> None:
        """Keep the first value of a metric, a null as NaN, or a list; leave out what is neither."""
        try:
            if isinstance(value, list):
                self.lists.setdefault(name, []).append((step, array("d", value)))
            elif value is None or isinstance(value, int | float):
                column = self.numbers.setdefault(name, Column())
                is_huge = isinstance(value, int) and abs(value) >= HUGE
                column.values.append(math.nan if value is None or is_huge else value)
                column.steps.append(step)
        except (TypeError, OverflowError):
            return  # texts in the list


def _row(line: bytes) -> dict[str, Any] | None:
    """A line's JSON object with a step; None if it is none."""
    try:
        found = json.loads(line.decode())
        step = found["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if type(step) is int and 0 <= step <= LARGEST_STEP else None


def _shown(line: bytes) -> str:
    return line[:60].decode(errors="replace")
