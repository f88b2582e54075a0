"""Rotary settings in the formats of transformers 5 and earlier.

Before, ``rope_theta`` and ``rope_scaling``; since, ``rope_parameters`` with both. A reader of the
one falls back to a theta of 10,000 where it finds the other alone, so both are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from forgekit.checks import brief
from forgekit.model.rope_scaling import RopeScaling
from forgekit.ranks import CheckpointError

NUMBERS = MappingProxyType(
    {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    }
)
"""Kinds of scaling, and keys with the same name on disk and here."""

ORIGINAL = "original_max_position_embeddings"
OTHERS = frozenset({"rope_type", "type", "rope_theta", ORIGINAL})


def read_rope(config: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """Read rotary base and scaling.

    Args:
        config: A ``config.json``.
        theta: The base if it does not say.

    Raises:
        CheckpointError: If the two spellings differ, or a ``Transformer`` does not have the kind.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    old = {"rope_theta": config["rope_theta"], **old} if "rope_theta" in config else dict(old)
    for key in [key for key in old if key in new and old[key] != new[key]]:
        raise CheckpointError(f"{key} is {old[key]}, but {new[key]} in rope_parameters.")
    fields = {key: value for key, value in {**old, **new}.items() if value is not None}
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind != "default" and kind not in NUMBERS:
        raise CheckpointError(f"rope_type is {brief(kind)}; a Transformer supports {[*NUMBERS]}.")
    if fields.get("partial_rotary_factor") == 1:  # all channels of a head turn
        del fields["partial_rotary_factor"]
    for key in sorted(fields.keys() - OTHERS - {*NUMBERS.get(kind, ())}):
        raise CheckpointError(
            f"the rotary settings of type {kind!r} have {key} {brief(fields[key])}, which a "
            "Transformer does not support; all layers share one set."
        )
    theta = float(fields.get("rope_theta", theta))
    return theta, None if kind == "default" else _scaling(kind, fields, config)


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the keys of both formats."""
    fields: dict[str, Any] = {"rope_type": "default" if scaling is None else scaling.kind}
    if scaling is not None:
        given = {name: getattr(scaling, name) for name in NUMBERS[scaling.kind]}
        given = {name: value for name, value in given.items() if value is not None}
        if scaling.kind != "linear":
            given[ORIGINAL] = scaling.original_max_seq_len
        fields |= given
    old = None if scaling is None else {**fields, "type": scaling.kind}
    new = {**fields, "rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": old, "rope_parameters": new}


def _scaling(kind: Any, fields: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    given = {name: fields[name] for name in NUMBERS[kind] if name in fields}
    if kind != "linear":
        longest = config["max_position_embeddings"]
        length = config.get(ORIGINAL) or fields.get(ORIGINAL) or longest
        given = {"factor": longest / length, **given, "original_max_seq_len": length}
    return RopeScaling(kind=kind, **given)
