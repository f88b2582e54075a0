"""What a run directory holds, read for looking at: whatever is missing or broken is said."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forgekit.inputs import parse_json
from forgekit.run.reporting.growing_files import GrowingFile, Metrics

SAMPLES = 6
"""The newest samples that are shown."""

LEGEND = 32
"""Characters of all names that fit into the legend of a small chart."""

SAMPLE_LENGTH = 2000
"""Characters of a sample that are shown."""


@attrs.define
class RunData:
    """A run as far as its files tell; ``refresh`` reads what is new in them.

    Attributes:
        label: A short name, unique among the runs of a page.
        tag: What small charts call it: its label, or its number where labels are long.
        folder: The run directory.
        metrics: The rows of ``metrics.jsonl``.
        config: ``config.json``; empty without one.
        changes: Lines of ``config_changes.jsonl``.
        status: ``status.json``; empty without one.
        history: Lines of ``history.jsonl``.
        bad_steps: Lines of ``bad_steps.jsonl``.
        samples: Step, as text, and text of the newest samples.
        notes: What could not be read, and what to do about it.
    """

    label: str
    folder: Path
    _file: GrowingFile
    metrics: Metrics = attrs.field(factory=Metrics)
    config: dict[str, Any] = attrs.field(factory=dict)
    changes: list[dict[str, Any]] = attrs.field(factory=list)
    status: dict[str, Any] = attrs.field(factory=dict)
    history: list[dict[str, Any]] = attrs.field(factory=list)
    bad_steps: list[dict[str, Any]] = attrs.field(factory=list)
    samples: list[tuple[str, str]] = attrs.field(factory=list)
    notes: list[str] = attrs.field(factory=list)
    tag: str = ""
    _seen: dict[Path, tuple[int, ...]] = attrs.field(factory=dict)

    @property
    def title(self) -> str:
        """Its label, after the tag if that is another."""
        return self.label if self.tag == self.label else f"{self.tag}: {self.label}"

    @property
    def file(self) -> Path:
        """The file of its metrics."""
        return self._file.path

    @property
    def ends_in_half_a_line(self) -> bool:
        """Whether the last line of its metrics has no end."""
        return self._file.ends_in_half_a_line

    @property
    def is_running(self) -> bool:
        """Whether more may come: nothing says that the run has ended."""
        return self.status.get("status", "running") == "running"

    def refresh(self) -> bool:
        """Read what is new; return whether anything was."""
        is_void, lines = self._file.read()
        if is_void:
            self.metrics = Metrics()
        elif lines:
            self.metrics.forget_last()
        self.metrics.add(lines)
        others = [
            *(self.folder / name for name in _OTHERS),
            *sorted((self.folder / "samples").glob("*.txt")),
        ]
        seen = {path: _stamp(path) for path in others}
        is_new = seen != self._seen
        if is_new:
            self._seen = seen
            self._read_others()
        return bool(lines) or is_void or is_new

    def steps_of(self, samples: float) -> float:
        """The step before which so many samples were consumed; NaN if no row says."""
        steps, consumed = self.metrics.column("samples")
        if not len(steps) or not np.isfinite(consumed).all():
            return float("nan")
        return float(np.interp(samples, [0, *consumed], [0, *steps]))

    def setting(self, dotted: str, default: Any = None) -> Any:
        """A value of the configuration, such as ``mesh.pp``."""
        found: Any = self.config
        for part in dotted.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return default if found is None else found

    def _read_others(self) -> None:
        self.notes = []
        self.config = self._read("config.json", _object) or {}
        self.status = self._read("status.json", _object) or {}
        self.changes = self._read("config_changes.jsonl", _objects) or []
        self.history = self._read("history.jsonl", _objects) or []
        self.bad_steps = self._read("bad_steps.jsonl", _objects) or []
        paths = sorted((self.folder / "samples").glob("*.txt"))[-SAMPLES:]
        self.samples = [(path.stem, _text(path)) for path in reversed(paths)]

    def _read(self, name: str, parse: Callable[[bytes], Any]) -> Any:
        """A file of the run; None, with a note, if it is there and cannot be read."""
        path = self.folder / name
        if not path.is_file():
            return None
        try:
            return parse(path.read_bytes())
        except (OSError, ValueError) as error:
            self.notes.append(f"{path} is left out, it cannot be read: {error}")
            return None


_OTHERS = (
    *("config.json", "config_changes.jsonl", "status.json"),
    *("history.jsonl", "bad_steps.jsonl"),
)


def open_runs(paths: list[Path]) -> list[RunData]:
    """Find and read runs.

    Args:
        paths: Run directories, or ``metrics.jsonl`` files alone.

    Returns:
        The runs, each with a name of its own.

    Raises:
        ValueError: If a path is no run, or one stands twice.
    """
    files = [_metrics_file(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if files.count(file) > 1:
            raise ValueError(f"{path} is named twice; name each run once.")
    labels = _labels([file.absolute().parent for file in files])
    is_short = sum(map(len, labels)) <= LEGEND
    runs = [
        RunData(label, file.parent, GrowingFile(file), tag=label if is_short else f"run {number}")
        for number, (label, file) in enumerate(zip(labels, files, strict=True), start=1)
    ]
    for run in runs:
        run.refresh()
    return runs


def check_content(run: RunData) -> None:
    """Refuse a run of which nothing can be shown.

    Raises:
        ValueError: If it has neither a row of metrics nor a status.
    """
    if run.metrics.rows or run.status:
        return
    first = "".join(f" Line {n} is {text!r}." for n, text in run.metrics.broken[:1])
    raise ValueError(
        f"{run.file} has no row yet.{first} A row is a JSON object with a "
        '"step"; a run writes one each log_every steps. --watch waits for it.'
    )


def _metrics_file(path: Path) -> Path:
    """The metrics of a run directory; a file is taken as them."""
    if path.is_file():
        return path
    if not path.exists():
        raise ValueError(f"{path} is not there. Name a run directory: what a recipe's out= was.")
    if (path / "metrics.jsonl").is_file() or (path / "status.json").is_file():
        return path / "metrics.jsonl"
    inside = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
    there = f"Runs in it: {', '.join(inside[:8])}. " if inside else ""
    raise ValueError(
        f"{path} is no run directory: it has no metrics.jsonl. {there}Name a run directory, what a "
        "recipe's out= was, or a metrics.jsonl."
    )


def _labels(folders: list[Path]) -> list[str]:
    """Names of folders, with as many of their parents as tell them apart.

    Examples:
        >>> _labels([Path("/runs/a/1"), Path("/runs/b/1"), Path("/runs/c")])
        ['a/1', 'b/1', 'c']
    """
    labels = []
    for number, folder in enumerate(folders):
        ends = [other.parts for other in folders if other != folder]
        depths = range(1, len(folder.parts) + 1)
        fits = (d for d in depths if all(end[-d:] != folder.parts[-d:] for end in ends))
        label = "/".join(folder.parts[-next(fits, len(folder.parts)) :])
        labels.append(label if folders.count(folder) == 1 else f"{label} ({number + 1})")
    return labels


def _object(content: bytes) -> dict[str, Any]:
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__} where an object belongs")
    return found


def _objects(content: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a file's lines; one that a crash cut short is left out."""
    found = []
    for line in content.splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return [record for record in found if isinstance(record, dict)]


def _text(path: Path) -> str:
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return text if len(text) <= SAMPLE_LENGTH else f"{text[:SAMPLE_LENGTH]}..."


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
