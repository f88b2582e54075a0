"""Values as trees of JSON, as which a manifest keeps everything but tensors.

JSON has no tuples, no tensors, and only strings for the keys of a dict. So a dict is
``{"$dict": [[key, value], ...]}``, lists and tuples are ``{"$list": [...]}`` and
``{"$tuple": [...]}``, and ``{"$tensor": key}`` stands for a tensor that is filed under that key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from forgekit.ranks import CheckpointError

_REMEDY = (
    "Checkpoints keep tensors, numbers, strings, None, and dicts, lists and tuples of them. "
    "Give it state_dict and load_state_dict, or leave it out with "
    'attrs.field(metadata={"checkpoint": False}).'
)


@attrs.frozen
class SavedValue:
    """A saved tensor, or a field that each rank has for itself; a migration may only move it.

    Attributes:
        tree: How the manifest keeps it.
    """

    tree: Any


def encode(value: Any, key: str, tensors: dict[str, Tensor], what: str) -> Any:
    """Turn a value into a tree, moving its tensors to ``tensors``.

    Args:
        value: The value.
        key: Under which a tensor is filed; those inside get longer ones.
        tensors: Changed in place.
        what: What it is called in messages.

    Raises:
        TypeError: If it holds something that cannot be saved.
    """
    if isinstance(value, Tensor):
        while key in tensors:  # {"a": {"b": t}, "a.b": t} has two tensors at a.b
            key += "'"
        tensors[key] = value.detach()
        return {"$tensor": key}
    if isinstance(value, SavedValue):
        return value.tree
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        items = []
        for name, inner in value.items():
            if not isinstance(name, bool | int | float | str):
                raise TypeError(f"{what} has the key {name!r} in a dict. {_REMEDY}")
            items.append([name, encode(inner, f"{key}.{name}", tensors, what)])
        return {"$dict": items}
    if type(value) in (list, tuple):  # a named tuple would not come back as one
        tag = "$list" if type(value) is list else "$tuple"
        return {tag: [encode(v, f"{key}.{i}", tensors, what) for i, v in enumerate(value)]}
    kind = type(value).__name__
    raise TypeError(f"{what} holds a {kind} at {key} and cannot be saved. {_REMEDY}")


def decode(node: Any, now: Any, tensors: dict[str, Any], make: Callable[[str, Any], Any]) -> Any:
    """Build a value from a tree.

    Args:
        node: The tree.
        now: Today's value, after which tensors are modelled.
        tensors: Gets every tensor that was made, by key; changed in place.
        make: Makes a tensor from its key and today's value.

    Raises:
        CheckpointError: If it is not a tree.
    """
    if not isinstance(node, dict):
        return node
    ((tag, inner),) = node.items()
    if tag == "$tensor":
        tensors[inner] = make(inner, now)
        return tensors[inner]
    if tag == "$dict":
        known = now if isinstance(now, dict) else {}
        return {name: decode(value, known.get(name), tensors, make) for name, value in inner}
    if tag not in ("$list", "$tuple"):
        raise CheckpointError(
            f"a value of kind {tag} is inside another one, where it has no meaning. "
            "What each rank has for itself must be a field of its own."
        )
    models = now if isinstance(now, list | tuple) else ()
    paired = itertools.zip_longest(inner, models[: len(inner)])
    built = [decode(value, model, tensors, make) for value, model in paired]
    return built if tag == "$list" else tuple(built)
