"""A state on its way from one replica group to another: what a checkpoint holds, without a file.

Each rank sends what it holds to the rank of the same number, so nothing is gathered or split.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from forgekit.checkpoints.state_dict import (
    allocate,
    collect,
    find_mismatch,
    local_of,
    merge,
    optional_fields,
    restore,
)
from forgekit.checks import brief
from forgekit.data.hashing import compare_facts, facts_of
from forgekit.state import TrainState, donate

StateT = TypeVar("StateT", bound=TrainState)


def parts_of(state: TrainState, fingerprint: Any = None) -> dict[str, Any]:
    """List what this rank holds of a state: tensors that are not copied, and their description.

    Args:
        state: The state; it must not change before the parts have been sent.
        fingerprint: What identifies the data, any JSON value.
    """
    tensors, description = collect(state)
    held = {key: local_of(tensor) for key, tensor in tensors.items()}
    return {"tensors": held, "description": description, "data": fingerprint, "seed": state.seed}


def find_other(state: TrainState, fingerprint: Any, sent: dict[str, Any]) -> str | None:
    """Say why a state cannot be replaced by one that was sent; None if it can.

    Args:
        state: The state of this group.
        fingerprint: As in ``parts_of``.
        sent: What the other group sent.
    """
    mine, theirs = parts_of(state)["description"], sent["description"]
    if text := find_mismatch(merge([mine]), merge([theirs]), optional_fields(state)):
        return f"the state of the groups {text}"
    boxes = {key: box for key, box in theirs["boxes"].items() if key.startswith("model.")}
    for key, box in boxes.items():
        if mine["boxes"][key] != box:
            return (
                f"the groups hold other shards: {key.removeprefix('model.')!r} is (first, size) "
                f"{box} there and {mine['boxes'][key]} here. All groups have one layout"
            )
    if sent["data"] != fingerprint:
        changed = compare_facts(facts_of(sent["data"]) or {}, facts_of(fingerprint) or {})
        shown = ", ".join(changed) or f"{brief(sent['data'])} there, {brief(fingerprint)} here"
        return f"the groups train on other data: {shown}. Give this one their data"
    if sent["seed"] != state.seed:
        return f"the groups have seed {sent['seed']} and this one {state.seed}. Give it theirs"
    return None


@torch.no_grad()
def take_parts(state: StateT, sent: dict[str, Any]) -> StateT:
    """Replace a state by one that was sent, in place, and donate it.

    Args:
        state: A state for which ``find_other`` finds nothing.
        sent: What the other group sent.
    """
    allocation = allocate(state, merge([sent["description"]]))
    for key, tensor in allocation.tensors.items():
        local_of(tensor).copy_(sent["tensors"][key])
    return donate(state, **restore(state, allocation))
