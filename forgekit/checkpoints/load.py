"""Load a ``TrainState`` on any number of ranks.

Everything is checked first, files, data, names and shapes; only then is the state changed.
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forgekit.checkpoints.directory import (
    FORMAT,
    MANIFEST,
    Checkpoint,
    Storage,
    committed,
    find_damage,
    manifest_of,
    runs_of,
    step_name,
    storage_of,
    survey,
)
from forgekit.checkpoints.save import as_json, join_saves, ranks_of, shard_name, wait_for_saves
from forgekit.checkpoints.state_dict import (
    PARTS,
    allocate,
    box_of,
    check_inner_optimizers,
    choose,
    collect,
    find_mismatch,
    local_of,
    merge,
    optional_fields,
    rename,
    restore,
)
from forgekit.data.hashing import compare_facts, facts_of
from forgekit.inputs import brief
from forgekit.model.lora import adapter_names, check_unmerged
from forgekit.ranks import CheckpointError, Ranks, explain
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
    renames: Mapping[str, str] = MappingProxyType({}),
) -> StateT:
    """Load the newest good checkpoint into model and optimizer, in place, and donate ``state``.

    Every rank calls it. The number of ranks and the layout may differ from those that saved. All
    checks come before the first change, so a refused state is as it was; only what a field's own
    ``load_state_dict`` refuses comes last.

    Args:
        state: A state of the same model and optimizer; its values are replaced.
        directory: What ``checkpoint_save`` was given.
        step: Load this step instead of the newest. A damaged newest checkpoint is skipped with a
            logged warning, a damaged one that was asked for raises. One that cannot be read is
            tried again, and then raises: it may be whole.
        fingerprint: What identifies the data now, or a function of the samples that were saved;
            compared with what was saved if both are given.
        allow_other_data: Load although the data is other data than before.
        parts: What to load; the rest stays as it is. ``("model",)`` starts a new run from a model,
            whatever its data and optimizer were; ``("model", "fields")`` goes on at the same step
            with another optimizer. Without the optimizer, a model with adapters also takes the
            weights of one that had none; its adapters stay as they are.
        renames: Where the program gave parameters, buffers or modules other names since: the names
            that were saved, by those of today. Optimizer state and averages go along.

    Returns:
        The state that was saved, or the parts of it. If there is no committed checkpoint:
        ``state`` itself, which is then not donated.

    Raises:
        ValueError: If a part is unknown or the model is not among them, if a URL was made into a
            ``Path``, or if adapters are merged.
        TypeError: If the optimizer keeps its state where a checkpoint cannot find it.
        CheckpointError: If ``step`` is not there, if no checkpoint is whole or can be read, if the
            directory has checkpoints of several runs, or if the checkpoint is of another format,
            data, model or optimizer, or holds streams of another number of ranks. The same on
            every rank.

    Examples:
        Layers got another name::

            state = checkpoint_load(state, directory, renames={"layers.0.ffn": "layers.0.mlp"})
    """
    if isinstance(parts, str) or "model" not in parts or not set(parts) <= set(PARTS):
        raise ValueError(f"parts {list(parts)} must be some of {list(PARTS)}, the model included.")
    if "optimizer" in parts:
        check_inner_optimizers(state.optimizer)
    wait_for_saves(state)
    join_saves()  # what another state of this process is saving may be the checkpoint to load
    storage, ranks = storage_of(directory), ranks_of(state)
    if (chosen := choose_checkpoint(ranks, storage, step)) is None:
        return state
    path, written = chosen
    if not allow_other_data and "fields" in parts:  # without the fields the data starts again
        now = as_json(fingerprint, written["fields"]["samples"])
        _check_data(path, written["fingerprint"], now)
    manifest = choose(_renamed(path, written, renames), parts)
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
    _warn_of_average(path, described["average"], manifest["average"])
    allocation = allocate(state, manifest, ranks.rank)
    read = {key: tensor for key, tensor in allocation.tensors.items() if key not in added}
    with storage.reading(path):
        ranks.together(lambda: _read_tensors(storage, path, manifest, read))
    if added:
        from forgekit.lora.adapters import reset_magnitudes

        reset_magnitudes(state.model)
    if (seed := manifest["fields"].get("seed", state.seed)) != state.seed:
        log.warning("the seed stays %s, as in %s; %s was asked for", seed, path, state.seed)
    # Last, because it changes the state: a field's own load_state_dict may refuse, on one rank.
    return donate(state, **ranks.together(lambda: restore(state, allocation)))


def choose_checkpoint(
    ranks: Ranks, storage: Storage, step: int | None
) -> tuple[Checkpoint, dict[str, Any]] | None:
    """Return the checkpoint to load and its manifest: the one asked for or the newest good one."""
    damages = []
    for path in ranks.first(lambda: _candidates(storage, step)):
        manifest = ranks.first(lambda path=path: _readable_manifest(storage, path))
        # Reading each file on one rank only keeps the check as fast as loading itself.
        mine = [*manifest["files"].items()][ranks.rank :: ranks.world]
        found = ranks.each(
            lambda path=path, mine=mine: [find_damage(storage, path, *one) for one in mine]
        )
        if not (damage := [one for part in found for one in part if one]):
            return path, manifest
        damages += damage
        if ranks.rank == 0 and step is None:
            name = posixpath.basename(str(path))
            log.warning("skipped the damaged checkpoint %s: %s", name, "; ".join(damage))
    if damages:
        good = "" if step is None else f" Others are there: {_steps(storage)}."
        raise CheckpointError(f"no whole checkpoint to load: {'; '.join(damages)}.{good}")
    return None


def _candidates(storage: Storage, step: int | None) -> list[Checkpoint]:
    storage.restore_replaced()
    steps, faulty = survey(storage)
    if step is None:
        for path, fault in faulty.items():
            log.warning(
                "%s has no readable %s and does not count as a checkpoint: it %s",
                *(path, MANIFEST, fault),
            )
        if not steps:
            storage.check_empty()
            _check_undamaged(storage, faulty)
        _check_run(storage, steps)
        return [steps[one] for one in sorted(steps, reverse=True)]
    if step not in steps:
        named = step_name(step)
        faults = [f for path, f in faulty.items() if posixpath.basename(str(path)) == named]
        why = "".join(f" {named}/{MANIFEST} {fault}." for fault in faults)
        raise CheckpointError(
            f"{storage} has no committed step {step}; it has {_steps(storage)}.{why}"
        )
    return [steps[step]]


def _check_run(storage: Storage, steps: dict[int, Checkpoint]) -> None:
    """Refuse checkpoints of several runs in one directory: which one would go on?"""
    runs = runs_of(storage, steps)
    if len(runs) > 1:
        newest = " and ".join(map(str, runs.values()))
        raise CheckpointError(
            f"{storage} has checkpoints of {len(runs)} runs (the newest are of steps {newest}): "
            "somebody copied one in. Move those of the other run away, or choose with step=."
        )


def _check_undamaged(storage: Storage, faulty: dict[Checkpoint, str]) -> None:
    """Refuse to start over beside what may be a checkpoint; an empty folder never was one."""
    for path, fault in faulty.items():
        if fault != "is missing":
            raise CheckpointError(
                f"no whole checkpoint to load: {path}/{MANIFEST} is damaged. Restore it, "
                f"or delete {path} to start over. It {fault}."
            )
        if names := storage.names(path):
            raise CheckpointError(
                f"{path} is of an unknown format: it has {brief(sorted(names)[0])} and no "
                f"{MANIFEST}. Load it with the program that wrote it, or delete it to start over."
            )


def _steps(storage: Storage) -> str:
    return ", ".join(str(step) for step in sorted(committed(storage))) or "none"


def _readable_manifest(storage: Storage, path: Checkpoint) -> dict[str, Any]:
    manifest = manifest_of(storage, path)
    if (written := manifest["format"]) == FORMAT:
        return manifest
    where, remedy = "", "Load it with the version that wrote it, or load another step."
    if isinstance(written, int) and written > FORMAT:
        where, remedy = ", from a newer version", "Upgrade forgekit to load it."
    raise CheckpointError(
        f"{path} has format {written!r}{where}, written by forgekit "
        f"{manifest.get('forgekit', 'of unknown version')}; this version reads format {FORMAT}. "
        f"{remedy}"
    )


def _renamed(
    path: Checkpoint, manifest: dict[str, Any], renames: Mapping[str, str]
) -> dict[str, Any]:
    try:
        return rename(manifest, renames)
    except CheckpointError as error:
        raise CheckpointError(f"renames does not fit {path}: {error}.") from None


def _check_data(path: Checkpoint, saved: Any, now: Any) -> None:
    """Refuse a checkpoint of other data, and say which of their facts changed."""
    if saved is None or now is None or saved == now:
        return
    then, today = facts_of(saved), facts_of(now)
    difference = f"its fingerprint is {brief(saved)} and today's is {brief(now)}."
    if then and today:
        if not (changed := compare_facts(then, today)):
            return
        difference = f"what changed is: {', '.join(changed)}."
    raise CheckpointError(
        f"{path} was saved while training on other data: {difference} Choose another run "
        "directory, or call checkpoint_load with allow_other_data=True to go on with them."
    )


@torch.no_grad()
def _read_tensors(
    storage: Storage, path: Checkpoint, manifest: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Read this rank's parts of a checkpoint's tensors, in place."""
    try:
        with ExitStack() as stack:
            files: dict[int, Any] = {}
            for key, tensor in tensors.items():
                left = local_of(tensor).numel()
                for rank, name, box in manifest["tensors"][key].get("chunks", []):
                    if (overlap := _overlap(tensor, box)) is None:
                        continue
                    if rank not in files:
                        name_of = posixpath.join(manifest["folder"], shard_name(rank))
                        file = stack.enter_context(storage.fetched(path, name_of))
                        files[rank] = stack.enter_context(safe_open(file, "pt"))
                    view, inside = overlap
                    part = files[rank].get_slice(name)[inside] if inside else None
                    part = files[rank].get_tensor(name) if part is None else part
                    if (part.shape, part.dtype) != (view.shape, view.dtype):
                        raise CheckpointError(f"{name!r} has another shape or dtype than it states")
                    view.copy_(part)
                    left -= view.numel()
                if left:
                    raise CheckpointError(f"no file has all of {key!r}")
    except (OSError, SafetensorError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} is whole but could not be read: {explain(error)}. "
            "The model may hold a part of it; build it anew before the next try."
        ) from error


def _overlap(tensor: Tensor, box: Any) -> tuple[Tensor, tuple[slice, ...]] | None:
    """Return the view of this rank's values that a chunk has, and where they are in the chunk."""
    offset, size = box_of(tensor)
    view = local_of(tensor)
    if box is None:  # a whole tensor
        box = (0,) * tensor.ndim, tuple(tensor.shape)
    starts = [max(a, b) for a, b in zip(offset, box[0], strict=True)]
    stops = [min(a + n, b + m) for a, n, b, m in zip(offset, size, *box, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    ranges = [*zip(starts, stops, strict=True)]
    here = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, offset, strict=True))
    there = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, box[0], strict=True))
    return view[here], there


def _warn_of_average(path: object, here: dict[str, str], there: dict[str, str]) -> None:
    """Say what becomes of averages that only the state, or only the checkpoint, has."""
    if here and not there:
        log.warning("%s has no average of the weights: it starts again from those loaded", path)
    if there and not here:
        log.warning("%s has an average that the state does not; create it with average=", path)


def _added_adapters(model: nn.Module, manifest: dict[str, Any]) -> list[str]:
    """Keys of this rank's adapters if the checkpoint is of the model without any."""
    adapters = [f"model.{name}" for name in adapter_names(model)]
    return [] if any(key in manifest["tensors"] for key in adapters) else adapters
