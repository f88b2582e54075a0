"""Load a ``TrainState`` on any number of ranks.

Everything is checked first, files, data, names and shapes; only then is the state changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any, Literal, TypeVar

from torch import nn

from forgekit.inputs import check_integers
from forgekit.lora.adapters import check_unmerged, reset_magnitudes
from forgekit.model.lora import adapter_names
from forgekit.ranks import CheckpointError
from forgekit.run.checkpoints.contents import (
    PARTS,
    allocate,
    choose,
    collect,
    find_mismatch,
    merge,
    optional_fields,
    restore,
)
from forgekit.run.checkpoints.migration import Migration, migrate_manifest
from forgekit.run.checkpoints.ranks import ranks_of
from forgekit.run.checkpoints.read import check_data, choose_checkpoint, read_tensors
from forgekit.run.checkpoints.savable_optimizers import check_inner_optimizers
from forgekit.run.checkpoints.save import as_json, join_saves, wait_for_saves
from forgekit.run.checkpoints.storage import storage_of
from forgekit.state import TrainState, donate

log = logging.getLogger("forgekit")

Part = Literal["model", "optimizer", "fields"]

StateT = TypeVar("StateT", bound=TrainState)


def checkpoint_load(
    state: StateT,
    directory: str | os.PathLike[str],
    *,
    step: int | None = None,
    fingerprint: Any = None,
    allow_other_data: bool = False,
    parts: Collection[Part] = PARTS,
    version: int = 1,
    migrate: Migration | None = None,
) -> StateT:
    """Load the newest good checkpoint into model and optimizer, in place, and donate ``state``.

    Every rank calls it. The number of ranks and the layout may differ from those that saved. All
    checks come before the first change, so a refused state is as it was; only what a field's own
    ``load_state_dict`` refuses comes last.

    Args:
        state: A state of the same model and optimizer; its values are replaced.
        directory: What ``checkpoint_save`` was given.
        step: Load this step instead of the newest. A damaged newest checkpoint is skipped with a
            logged warning, a damaged one that was asked for raises.
        fingerprint: What identifies the data now, or a function of the samples that were saved;
            compared with what was saved if both are given.
        allow_other_data: Load although the data is other data than before.
        parts: What to load; the rest stays as it is. ``("model",)`` starts a new run from a model,
            whatever its data and optimizer were; ``("model", "fields")`` goes on at the same step
            with another optimizer. Without the optimizer, a model with adapters also takes the
            weights of one that had none; its adapters stay as they are.
        version: Which version of the state this is, as given to ``checkpoint_save``. A newer one is
            refused.
        migrate: Brings a checkpoint of an older version to this one: a function from the
            ``SavedState`` to the same in today's names. Without it an older one is refused.

    Returns:
        The state that was saved, or the parts of it. If there is no committed checkpoint:
        ``state`` itself, which is then not donated.

    Raises:
        ValueError: If a part is unknown or the model is not among them, if ``version`` is less than
            1, if a URL was made into a ``Path``, or if adapters are merged.
        TypeError: If the optimizer keeps its state where a checkpoint cannot find it.
        CheckpointError: If ``step`` is not there, if no checkpoint is whole, or if it is of another
            format, version, data, model or optimizer, holds streams of another number of ranks, or
            anything but tensors, of which nothing is run. The same on every rank.

    Examples:
        A layer got another name, and the state a field::

            def migrate(saved):
                names = {now.replace("mlp", "ffn"): then for now, then in saved.names.items()}
                return attrs.evolve(saved, names=names, fields=saved.fields | {"phase": 0})

            state = checkpoint_load(state, directory, version=2, migrate=migrate)
    """
    if isinstance(parts, str) or "model" not in parts or not set(parts) <= set(PARTS):
        raise ValueError(f"parts {list(parts)} must be some of {list(PARTS)}, the model included.")
    check_integers(version=(version, 1))
    if "optimizer" in parts:
        check_inner_optimizers(state.optimizer)
    wait_for_saves(state)
    join_saves()  # what another state of this process is saving may be the checkpoint to load
    storage, ranks = storage_of(directory), ranks_of(state)
    found = choose_checkpoint(ranks, storage, step)
    if found is None:
        return state
    path, written = found
    migrated = ranks.together(lambda: migrate_manifest(path, written, version, migrate))
    if not allow_other_data and "fields" in parts:  # without the fields the data starts again
        now = as_json(fingerprint, written["fields"]["samples"])
        check_data(path, written.get("fingerprint"), now)
    manifest = choose(migrated.manifest, parts)
    check_unmerged(state.model, "unmerging would bring back other weights")
    described = choose(collect(state, ranks.rank)[1], parts)
    added = () if "optimizer" in parts else _added_adapters(state.model, manifest)
    for key in added:
        del described["tensors"][key]
    descriptions = ranks.gather(described)  # pipeline stages hold different parameters
    optional = optional_fields(state)
    if problem := ranks.first(lambda: find_mismatch(merge(descriptions), manifest, optional)):
        raise CheckpointError(f"{path} {problem}.")
    if lost := manifest["fields"].keys() - described["fields"].keys():
        log.warning("%s has fields that the state does not: %s", path, ", ".join(sorted(lost)))
    _warn_of_average(path, described["average"], manifest.get("average"))
    allocation = allocate(state, manifest, ranks.rank)
    read = {key: tensor for key, tensor in allocation.tensors.items() if key not in added}
    read_tensors(ranks, storage, path, written, migrated.targets(read))
    if added:
        reset_magnitudes(state.model)
    if (seed := manifest["fields"].get("seed", state.seed)) != state.seed:
        log.warning("the seed stays %s, as in %s; %s was asked for", seed, path, state.seed)
    # Last, because it changes the state: a field's own load_state_dict may refuse, on one rank.
    return donate(state, **ranks.together(lambda: restore(state, allocation)))


def _warn_of_average(path: object, here: dict[str, str], there: dict[str, str] | None) -> None:
    """Say what becomes of averages that only the state, or only the checkpoint, has."""
    if here and not there:
        log.warning("%s has no average of the weights: it starts again from those loaded", path)
    if there and not here:
        log.warning("%s has an average that the state does not; create it with average=", path)


def _added_adapters(model: nn.Module, manifest: dict[str, Any]) -> list[str]:
    """Keys of this rank's adapters if the checkpoint is of the model without any."""
    own = [f"model.{name}" for name in adapter_names(model)]
    return [] if any(key in manifest["tensors"] for key in own) else own
