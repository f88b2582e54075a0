"""Checkpoints of older versions of a state: the user's function renames what they hold.

A checkpoint says which version of the state it holds. The version is the user's: it counts up when
the model's parameters get other names or the state other fields. A migration sees names and values,
never tensors, and returns names and values, so it cannot change what was trained, only say where it
belongs now. Nothing on disk is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from torch import Tensor

from forgekit.ranks import CheckpointError
from forgekit.run.checkpoints.contents import AVERAGE, describe, with_nearest
from forgekit.run.checkpoints.json_trees import SavedValue, decode, encode
from forgekit.run.checkpoints.per_rank_fields import TAG

_MODEL = "model."


@attrs.frozen(kw_only=True)
class SavedState:
    """The state in a checkpoint, for a migration to change with ``attrs.evolve``.

    Attributes:
        version: The version that was saved.
        names: For each parameter and persistent buffer, the name that the model gives it now (key)
            and the name under which it was saved (value). They are equal at first; a migration
            renames keys and leaves out what the model no longer has. Optimizer state goes along,
            and averages.
        fields: The state's other fields by name: numbers, strings, None, and dicts, lists and
            tuples of them, with a ``SavedValue`` for each tensor. A migration may rename, split and
            drop them, and give new ones a value of these kinds or a tensor.

    Examples:
        >>> saved = SavedState(version=1, names={"blocks.0": "blocks.0"}, fields={"best": 2.5})
        >>> names = {now.replace("blocks", "layers"): then for now, then in saved.names.items()}
        >>> attrs.evolve(saved, names=names, fields=saved.fields | {"phase": 0})
        SavedState(version=1, names={'layers.0': 'blocks.0'}, fields={'best': 2.5, 'phase': 0})
    """

    version: int
    names: dict[str, str]
    fields: dict[str, Any]


Migration = Callable[[SavedState], SavedState]


@attrs.frozen
class Migrated:
    """A manifest in today's names, and where its tensors come from.

    Attributes:
        manifest: The manifest.
        keys: Today's keys of the model's tensors to those in the files, where they differ.
        given: Tensors by key that are in no file, because the migration brought them.
    """

    manifest: dict[str, Any]
    keys: dict[str, str] = attrs.field(factory=dict)
    given: dict[str, Tensor] = attrs.field(factory=dict)

    def targets(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy in what the migration gave; return the other tensors under the keys of the files.

        Args:
            tensors: Where tensors go, by today's keys; those that are given are changed in place.
        """
        for key, value in self.given.items():
            if key in tensors:
                tensors[key].copy_(value)
        return {self.keys.get(k, k): t for k, t in tensors.items() if k not in self.given}


def migrate_manifest(
    path: object, manifest: dict[str, Any], version: int, migrate: Migration | None
) -> Migrated:
    """Bring a manifest to today's version of the state.

    Args:
        path: The checkpoint, for messages.
        manifest: Its manifest.
        version: Today's version.
        migrate: Brings an older one to it; not called for one of today's.

    Raises:
        CheckpointError: If the version is newer, or older and there is no migration, or the
            migration returns what the checkpoint does not have.
    """
    saved = manifest.get("version", 1)
    if saved == version:
        return Migrated(manifest)
    is_older = isinstance(saved, int) and saved < version
    if migrate is None or not is_older:
        remedy = f"Load it with the program that saved it, or pass version={saved!r} if this is it."
        if is_older:
            remedy = "Pass a function migrate= that renames its parts; see forgekit.run.SavedState."
        raise CheckpointError(
            f"{path} holds version {saved!r} of the state, and this program has version {version}. "
            f"{remedy}"
        )
    there = [key.removeprefix(_MODEL) for key in manifest["tensors"] if key.startswith(_MODEL)]
    fields = {name: _decode(tree) for name, tree in manifest["fields"].items()}
    result = migrate(SavedState(version=saved, names={n: n for n in there}, fields=fields))
    if not isinstance(result, SavedState):
        raise CheckpointError(
            f"migrate returned a {type(result).__name__} instead of a SavedState. "
            "Return attrs.evolve(saved, names=..., fields=...)."
        )
    _check_names(path, result.names, there)
    return _apply(manifest, result)


def _check_names(path: object, names: dict[str, str], there: list[str]) -> None:
    readers: dict[str, str] = {}
    for now, then in names.items():
        if then not in there:
            raise CheckpointError(
                f"migrate reads {now!r} from a name that {path} does not have: "
                f"{with_nearest(str(then), there)}. Values of names are those that were saved, "
                "keys are today's."
            )
        # Optimizer state goes along with a name, and cannot belong to two parameters.
        if then in readers:
            raise CheckpointError(
                f"migrate reads both {readers[then]!r} and {now!r} from {then!r}. "
                "A saved tensor can become one tensor only; copy it after loading."
            )
        readers[then] = now


def _apply(manifest: dict[str, Any], result: SavedState) -> Migrated:
    specs = {key: s for key, s in manifest["tensors"].items() if not key.startswith(_MODEL)}
    specs |= {
        _MODEL + now: manifest["tensors"][_MODEL + then] for now, then in result.names.items()
    }
    saved = manifest["optimizer"]
    optimizer = {now: saved[then] for now, then in result.names.items() if then in saved}
    given: dict[str, Tensor] = {}
    fields = {
        name: encode(value, f"migrated.{name}", given, f"field {name!r} of the migration")
        for name, value in result.fields.items()
    }
    specs |= {key: describe(tensor) for key, tensor in given.items()}
    renamed = {now: then for now, then in result.names.items() if now != then}
    keys = {part + now: part + then for part in (_MODEL, AVERAGE) for now, then in renamed.items()}
    averaged = manifest.get("average") or {}
    average = {now: AVERAGE + now for now, then in result.names.items() if then in averaged}
    changed = {"tensors": specs, "optimizer": optimizer, "fields": fields, "average": average}
    return Migrated(manifest | changed, keys, given)


def _decode(tree: Any) -> Any:
    """Build plain values from a tree of the manifest."""
    if isinstance(tree, dict) and TAG in tree:
        return SavedValue(tree)
    return decode(tree, None, {}, lambda key, _: SavedValue({"$tensor": key}))
