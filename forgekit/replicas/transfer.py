"""Transfer of a state between replica groups: a checkpoint's content without files.

Each rank sends its tensors to the rank of the same number; nothing is gathered or split.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from forgekit.checkpoints.state_dict import (
    allocate,
    collect,
    find_mismatch,
    merge,
    optional_fields,
    restore,
)
from forgekit.checks import brief
from forgekit.hashing import compare_facts, facts_of
from forgekit.state import TrainState, donate
from forgekit.tensors import local

StateT = TypeVar("StateT", bound=TrainState)


def parts_of(state: TrainState, facts: Mapping[str, Any]) -> dict[str, Any]:
    """List this rank's part of a state: tensors, not copied, and their description.

    Args:
        state: The state; it must not change before the parts have been sent.
        facts: What has to be the same where it arrives: ``data``, what identifies the data, and
            ``settings``, texts by name.
    """
    tensors, description = collect(state)
    held = {key: local(tensor) for key, tensor in tensors.items()}
    return {"tensors": held, "description": description, **facts}


def find_other(state: TrainState, facts: Mapping[str, Any], sent: Mapping[str, Any]) -> str | None:
    """Return why a state cannot be replaced by a received one; None if it can.

    Args:
        state: The state of this group.
        facts: As in ``parts_of``.
        sent: What the other group sent.
    """
    mine, theirs = collect(state)[1], sent["description"]
    if text := find_mismatch(merge([mine]), merge([theirs]), optional_fields(state)):
        return f"the state of the groups {text}"
    boxes = {key: box for key, box in theirs["boxes"].items() if key.startswith("model.")}
    for key, box in boxes.items():
        if mine["boxes"][key] != box:
            return (
                f"the groups hold other shards: {key.removeprefix('model.')!r} is (first, size) "
                f"{box} there and {mine['boxes'][key]} here. All groups have one layout"
            )
    there, here = sent["data"], facts["data"]
    if there != here:
        changed = compare_facts(facts_of(there) or {}, facts_of(here) or {})
        shown = ", ".join(changed) or f"{brief(there)} there, {brief(here)} here"
        return f"the groups train on other data: {shown}. Give this one their data"
    there, here = sent["settings"], facts["settings"]
    for name in dict.fromkeys([*there, *here]):
        one, other = there.get(name), here.get(name)
        if one != other:
            return f"the groups have {name} {one}, this one {other}. Give it theirs"
    return None


@torch.no_grad()
def take_parts(state: StateT, sent: dict[str, Any]) -> StateT:
    """Replace a state by a received one, in place, and donate it.

    Args:
        state: A state for which ``find_other`` finds nothing.
        sent: What the other group sent.
    """
    allocation = allocate(state, merge([sent["description"]]))
    for key, tensor in allocation.tensors.items():
        local(tensor).copy_(sent["tensors"][key])
    return donate(state, **restore(state, allocation))
