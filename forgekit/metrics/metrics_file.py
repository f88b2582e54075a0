"""``metrics.jsonl``: a JSON object per step, which an interrupted run leaves whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgekit.files import overwrite, read_regular, write_atomic
from forgekit.inputs import parse_json
from forgekit.metrics.strict_json import finite


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl`` as a list of rows; a last line that was cut by a crash is left out.

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
        rows = read_metrics(path) if path.exists() else []
        lines = [_line(row) for row in rows if row["step"] <= start_step]
        write_atomic(path, b"".join(lines))
        self._path, self._line = path, lines[-1] if lines else b""
        self._last: dict[str, Any] = json.loads(self._line) if lines else {}
        # Unbuffered, so that one write is one system call.
        self._file = path.open("r+b", buffering=0)
        self._start = self._file.seek(0, os.SEEK_END) - len(self._line)

    @property
    def last(self) -> Mapping[str, Any]:
        """The last row."""
        return self._last

    def write(self, row: dict[str, Any]) -> None:
        """Write a row at the end, or its new keys into the last one; all of it or nothing."""
        is_same = row["step"] == self._last.get("step")
        if is_same:
            row = self._last | row
        else:
            self._start = self._file.seek(0, os.SEEK_END)
        line = _line(row)
        try:
            overwrite(self._file, self._start, line, self._line if is_same else b"")
        except OSError as error:
            what = f"{error.strerror}: no room for the row of step {row['step']}"
            rest = "the rows before it are whole. Make room; the same command resumes the run"
            raise OSError(error.errno, f"{what}; {rest}", str(self._path)) from error
        self._last, self._line = row, line

    def close(self) -> None:
        """Close the file; this may happen twice."""
        self._file.close()


def _line(row: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(finite(row), allow_nan=False)}\n".encode()
