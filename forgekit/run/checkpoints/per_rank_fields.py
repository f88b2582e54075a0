"""Fields of a state that each rank has for itself, above all streams: how a manifest keeps them.

Instead of one tree there is ``{"$ranks": [[rank, tree], ...]}``, and the tensors of a rank's tree
are filed under ``state.<field>.rank<rank>``. Such fields load on as many ranks as saved them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from forgekit.state import TrainState

TAG = "$ranks"


def is_stateful(value: Any) -> bool:
    """Say whether a value saves and loads itself."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def is_per_rank(state: TrainState, field: Any) -> bool:
    """Say whether each rank has its own value: streams, and fields that are marked so."""
    value = getattr(state, field.name)
    is_stream = hasattr(value, "__iter__") and not isinstance(value, nn.Module)
    return field.metadata.get("per_rank", is_stateful(value) and is_stream)


def tag(tree: Any, rank: int) -> dict[str, Any]:
    """Mark a tree as one rank's."""
    return {TAG: [[rank, tree]]}


def join(fields: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Add another rank's trees to those of the ranks before; of other fields the first count."""
    added = {name: trees for name, tree in others.items() if (trees := _pairs(tree))}
    return fields | {name: {TAG: _pairs(fields[name]) + trees} for name, trees in added.items()}


def trees_of(tree: Any) -> dict[int, Any]:
    """Return the trees of a field by rank; a tree that all ranks share counts as rank 0's."""
    return dict(_pairs(tree)) or {0: tree}


def own_tree(tree: Any, rank: int) -> Any:
    """Pick a rank's tree, or what all ranks share."""
    trees = trees_of(tree)
    return trees.get(rank, trees[0])


def find_difference(here: dict[str, Any], there: dict[str, Any]) -> str | None:
    """Compare numbers of ranks; return what does not fit, or None."""
    for name in here.keys() & there.keys():
        now, saved = len(_pairs(here[name])), len(_pairs(there[name]))
        if now and saved and now != saved:
            return (
                f"has the field {name!r} of each of {saved} ranks, and now there are {now}. What "
                "each rank has for itself, such as a stream's position, cannot be divided again. "
                f"Resume on {saved} ranks, or leave the field out with "
                'attrs.field(metadata={"checkpoint": False}) and start it again'
            )
    return None


def _pairs(tree: Any) -> list[Any]:
    return tree.get(TAG, []) if isinstance(tree, dict) else []
