"""What identifies data, fact by fact, so that an error can say which fact has changed.

A fingerprint is a string: equal strings mean equal rows. It is JSON, with one fact per key. The key
``hash`` is the whole fingerprint in older checkpoints, which have no facts.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

HASH = "hash"
WORDS = {"seq_len": "sequence length"}


def state_facts(hashed: str, **facts: Any) -> str:
    """Make a fingerprint of facts.

    Args:
        hashed: Their hash, the fingerprint in older checkpoints.
        **facts: JSON values; None if a fact is unknown.

    Examples:
        >>> state_facts("3f2a", files="a1", seq_len=16)
        '{"files": "a1", "seq_len": 16, "hash": "3f2a"}'
    """
    return json.dumps({**facts, HASH: hashed})


def facts_of(fingerprint: Any) -> dict[str, Any] | None:
    """Return the facts of a fingerprint; None if it has none."""
    try:
        facts = json.loads(fingerprint) if isinstance(fingerprint, str) else None
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) and HASH in facts else None


def hash_of(fingerprint: Any) -> Any:
    """Return the hash in a fingerprint of facts; any other fingerprint unchanged."""
    facts = facts_of(fingerprint)
    return fingerprint if facts is None else facts[HASH]


def compare_facts(then: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Name the facts that differ; an unknown fact is not compared.

    Examples:
        >>> compare_facts({"files": "a", "seq_len": 16}, {"files": "a", "seq_len": 32})
        ['sequence length (16 then, 32 now)']
    """
    changed = []
    for key in dict.fromkeys([*then, *now]):
        before, after = then.get(key), now.get(key)
        if key == HASH or before == after or before is None or after is None:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            changed += compare_facts(before, after, f"{prefix}{key}: ")
            continue
        what = prefix + WORDS.get(key, key)
        values = f" ({before} then, {after} now)" if isinstance(before, bool | int) else ""
        changed.append(what + values)
    return changed


def tokenizer_of(folder: Path) -> str | None:
    """Return a checksum of the tokenizer beside a token file; None if there is none."""
    file = folder / "tokenizer.json"
    return f"{zlib.crc32(file.read_bytes()):08x}" if file.is_file() else None
