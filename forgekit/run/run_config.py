"""``config.json``: what a run was really started with, and what has changed since it began."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forgekit.files import append_lines, write_atomic
from forgekit.inputs import parse_json
from forgekit.state import TrainState

_CONSTANTS = MappingProxyType({"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"})
SHOWN = 40
"""Characters of a value in the line that names the changes; the file has all."""


def keep_config(out: Path, config: Mapping[str, Any], state: TrainState) -> str:
    """Write ``config.json``, and what differs from the one before to ``config_changes.jsonl``.

    A checkpoint decides the seed of a run that is resumed, so ``seed`` is that of the state. Going
    back through the changes, from the last to the first, gives each earlier configuration.

    Args:
        out: The run directory.
        config: The resolved configuration.
        state: The state that the run starts from.

    Returns:
        The changes as one line of text; empty if there are none.
    """
    path = out / "config.json"
    # Strict JSON has no infinity: it is the text "inf" there, which a configuration reads back.
    actual = json.loads(json.dumps(config, default=str), parse_constant=_CONSTANTS.get)
    if "seed" in actual:
        actual["seed"] = state.seed
    before = _read(path)
    changed = {} if before is None else _changes(before, actual)
    if changed:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = {"step": state.step, "samples": state.samples, "time": now, "changed": changed}
        append_lines(out / "config_changes.jsonl", [json.dumps(record)])
    write_atomic(path, f"{json.dumps(actual, indent=2)}\n".encode())
    return ", ".join(f"{key} {_show(old)} -> {_show(new)}" for key, (old, new) in changed.items())


def _read(path: Path) -> dict[str, Any] | None:
    """Read a configuration; None if the file is missing or holds something else."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Old and new value of each dotted key that differs; null where a key is not there."""
    old, new = dict(_flat(before)), dict(_flat(after))
    return {key: [old.get(key), new.get(key)] for key in old | new if old.get(key) != new.get(key)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
