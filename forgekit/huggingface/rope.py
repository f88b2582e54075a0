"""Rotary settings as transformers writes them: since its version 5, and before.

Before, ``rope_theta`` and ``rope_scaling``; since, ``rope_parameters`` with both. A reader of the
one falls back to a theta of 10,000 where it finds the other alone, so both are written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from forgekit.inputs import brief, is_number
from forgekit.model.rope_scaling import RopeScaling
from forgekit.ranks import CheckpointError

NUMBERS = MappingProxyType(
    {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    }
)
"""Kinds of scaling, and what is called alike on disk and here."""

ORIGINAL = "original_max_position_embeddings"
OTHERS = frozenset({"rope_type", "type", "rope_theta", ORIGINAL, "mscale", "mscale_all_dim"})


def read_rope(config: Mapping[str, Any], theta: float) -> tuple[float, RopeScaling | None]:
    """Read the base of the rotary wavelengths and their scaling.

    Args:
        config: A ``config.json``.
        theta: The base if it does not say.

    Raises:
        CheckpointError: If the two spellings differ, or it is a kind that a ``Transformer`` does
            not have.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, given in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(given, Mapping):
            raise CheckpointError(f"config.json: {key} is {brief(given)}; it must be an object.")
    old = {"rope_theta": config["rope_theta"], **old} if "rope_theta" in config else dict(old)
    found = {**old, **new}
    differ = {k: (old[k], new[k]) for k in old.keys() & new.keys() if old[k] != new[k]}
    if differ:
        key, values = next(iter(differ.items()))
        raise CheckpointError(
            f"config.json: {key} is {values[0]} and in rope_parameters {values[1]}. Remove the one "
            "that the model was not trained with."
        )
    theta = theta if found.get("rope_theta") is None else found["rope_theta"]
    if not is_number(theta) or theta <= 0:
        raise CheckpointError(
            f"config.json: rope_theta is {brief(theta)}; it must be a number above 0."
        )
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        _check_keys(found, kind, frozenset())
        return float(theta), None
    if not isinstance(kind, str) or kind not in NUMBERS:
        raise CheckpointError(
            f"config.json: rope_type is {brief(kind)}, which a Transformer does not have; it has "
            f"{', '.join(NUMBERS)}."
        )
    _check_keys(found, kind, frozenset(NUMBERS[kind]))
    return float(theta), _scaling(kind, found, config)


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Write them in both spellings."""
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


def _check_keys(found: Mapping[str, Any], kind: str, known: frozenset[str]) -> None:
    if found.get("partial_rotary_factor", 1) not in (None, 1):
        raise CheckpointError(
            f"config.json: partial_rotary_factor is {found['partial_rotary_factor']}; a "
            "Transformer turns all channels of a head."
        )
    odd = sorted(found.keys() - known - OTHERS - {"partial_rotary_factor"})
    if odd and kind != "default":
        raise CheckpointError(
            f"config.json: rope_type {kind!r} has {odd[0]} {brief(found[odd[0]])}, which a "
            "Transformer's has not."
        )
    if odd:
        raise CheckpointError(
            f"config.json: rope_parameters has {odd[0]!r}; one set for all layers is read, of "
            "rope_type, rope_theta and what the type needs."
        )


def _scaling(kind: str, found: Mapping[str, Any], config: Mapping[str, Any]) -> RopeScaling:
    given = {name: found[name] for name in NUMBERS[kind] if found.get(name) is not None}
    if kind != "linear":
        length = config.get(ORIGINAL) or found.get(ORIGINAL) or config["max_position_embeddings"]
        given["original_max_seq_len"] = length
        if "factor" not in given:
            given["factor"] = config["max_position_embeddings"] / length
    if found.get("mscale") and found.get("mscale_all_dim") and "attention_factor" not in given:
        own, all_dim = (_mscale(given["factor"], found[k]) for k in ("mscale", "mscale_all_dim"))
        given["attention_factor"] = own / all_dim
    if "factor" not in given:
        raise CheckpointError(f"config.json: rope_type {kind!r} has no factor.")
    try:
        return RopeScaling(kind=kind, **given)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: {error}") from None


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
