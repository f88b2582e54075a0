"""What identifies data, fact by fact, so that an error can say which fact has changed.

A fingerprint is a string: equal strings mean equal rows. It is JSON, with one fact per key.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

SAMPLE_ORDER = 2
"""Incremented when the same seed gives other rows at the same samples."""

_VERSION = "sample order"
_WORDS = {"seq_len": "sequence length"}


def state_facts(**facts: Any) -> str:
    """Make a fingerprint of facts, JSON values; None if a fact is unknown.

    Examples:
        >>> state_facts(files="a1", seq_len=16)
        '{"files": "a1", "seq_len": 16, "sample order": 2}'
    """
    return json.dumps({**facts, _VERSION: SAMPLE_ORDER})


def facts_of(fingerprint: Any) -> dict[str, Any] | None:
    """Return the facts of a fingerprint; None if it has none."""
    try:
        facts = json.loads(fingerprint) if isinstance(fingerprint, str) else None
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and _VERSION in facts else None


def compare_facts(then: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Name the facts that differ; an unknown fact is not compared.

    Examples:
        >>> compare_facts({"files": "a", "seq_len": 16}, {"files": "a", "seq_len": 32})
        ['sequence length (16 then, 32 now)']
    """
    changed = []
    for key in dict.fromkeys([*then, *now]):
        before, after = then.get(key), now.get(key)
        if before == after or before is None or after is None:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            changed += compare_facts(before, after, f"{prefix}{key}: ")
            continue
        values = f" ({before} then, {after} now)" if isinstance(before, bool | int) else ""
        changed.append(prefix + _WORDS.get(key, key) + values)
    return changed


def tokenizer_of(folder: Path | None) -> str | None:
    """Return a checksum of the tokenizer beside a token file; None if there is none."""
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()[:8]
