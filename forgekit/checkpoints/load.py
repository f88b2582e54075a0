"""Load a ``TrainState``, on any number of ranks.

Everything is checked first, files, data, names and shapes; only then is the state changed.
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from forgekit.checkpoints.directory import (
    FORMAT,
    MANIFEST,
    Manifest,
    Storage,
    committed,
    describe,
    describe_faults,
    find_damage,
    steps_in,
    storage_of,
)
from forgekit.checkpoints.save import as_json, join_saves, ranks_of, shard_name, wait_for_saves
from forgekit.checkpoints.state_dict import (
    PARTS,
    allocate,
    choose,
    collect,
    find_mismatch,
    has_average,
    merge,
    optional_fields,
    rename,
    restore,
)
from forgekit.checks import brief
from forgekit.hashing import compare_facts, facts_of
from forgekit.model.lora import adapter_names, check_unmerged
from forgekit.ranks import CheckpointError, Ranks
from forgekit.state import TrainState, donate
from forgekit.tensors import index_in, local, overlap, ranges_of, to_ranges

log = logging.getLogger("forgekit")

NEAR = 8
"""Number of newest checkpoints that are checked for other runs."""

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
            logged warning, a damaged one that was requested raises. One that cannot be read is
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
        CheckpointError: If ``step`` is not there, if no checkpoint is whole or can be read, if the
            newest checkpoints are of several runs, or if the checkpoint is of another format,
            data, model or optimizer, or holds streams of another number of ranks. The same on
            every rank.

    Examples:
        Layers got another name::

            state = checkpoint_load(state, directory, renames={"layers.0.ffn": "layers.0.mlp"})
    """
    if "model" not in parts or not set(parts) <= set(PARTS):
        raise ValueError(f"parts {list(parts)} must include the model and be among {list(PARTS)}.")
    wait_for_saves(state)
    join_saves()  # another state of this process may be saving the checkpoint to load
    storage, ranks = storage_of(directory), ranks_of(state)
    if (chosen := choose_checkpoint(ranks, storage, step)) is None:
        return state
    at, saved = chosen
    path = storage.path(at)
    if not allow_other_data and "fields" in parts:  # without fields the data start anew
        now = as_json(fingerprint, saved["fields"]["samples"])
        _check_data(path, saved["fingerprint"], now)
    manifest = choose(rename(saved, renames), parts)
    check_unmerged(state.model, "unmerging would bring back other weights")
    described = choose(collect(state, ranks.rank)[1], parts)
    added = () if "optimizer" in parts else _added_adapters(state.model, manifest)
    for key in added:
        del described["tensors"][key]
        described["adapters"].pop(key.removeprefix("model."), None)
    descriptions = ranks.gather(described)  # pipeline stages hold different parameters
    optional = optional_fields(state)
    if problem := ranks.first(lambda: find_mismatch(merge(descriptions), manifest, optional)):
        raise CheckpointError(f"{path} {problem}.")
    if lost := manifest["fields"].keys() - described["fields"].keys():
        log.warning("%s has fields that the state does not: %s", path, ", ".join(sorted(lost)))
    if has_average(described) != has_average(manifest):
        log.warning(
            "only %s has an average of the weights: that of a state restarts from the loaded "
            "weights, that of a checkpoint is left out without average=",
            "the state" if has_average(described) else path,
        )
    # All checks but a field's own load_state_dict are done: values change from here on.
    allocation = allocate(state, manifest, ranks.rank)
    read = {key: tensor for key, tensor in allocation.tensors.items() if key not in added}
    with storage.reading(at):
        ranks.together(lambda: _read_tensors(storage, at, manifest, read))
    if added:
        from forgekit.lora.adapters import reset_magnitudes

        reset_magnitudes(state.model)
    if (seed := manifest["fields"].get("seed", state.seed)) != state.seed:
        log.warning("the seed stays %s, as in %s; %s was asked for", seed, path, state.seed)
    # Last, because it changes the state: a field's own load_state_dict may raise on one rank.
    return donate(state, **ranks.together(lambda: restore(state, allocation)))


def choose_checkpoint(
    ranks: Ranks, storage: Storage, step: int | None
) -> tuple[int, Manifest] | None:
    """Return step and manifest of the requested checkpoint, else of the newest good one."""
    damages: list[str] = []
    candidates = _candidates(storage, step)  # only the first rank reads directories
    while (chosen := ranks.first(lambda: next(candidates, None))) is not None:
        at, manifest = chosen
        # Each file is read on one rank, which keeps the check as fast as loading.
        mine = [*manifest["files"].items()][ranks.rank :: ranks.world]
        damage = ranks.each(
            lambda at=at, manifest=manifest, mine=mine: [
                fault
                for name, entry in mine
                if (fault := find_damage(storage, at, path_inside(manifest, name), entry))
            ]
        )
        if not any(damage):
            return chosen
        damages += [fault for part in damage for fault in part]
        if ranks.rank == 0 and step is None:
            log.warning("skipped a damaged checkpoint: %s", "; ".join(damages))
    if damages:
        raise CheckpointError(f"no whole checkpoint to load: {'; '.join(damages)}.")
    return None


def _candidates(storage: Storage, step: int | None) -> Iterator[tuple[int, Manifest]]:
    """Yield the checkpoints that may be loaded, the newest first."""
    storage.restore_replaced()
    steps, faults = steps_in(storage), {}
    if step is not None:
        steps = [step] if step in steps else []
    checkpoints = committed(storage, steps, faults)
    manifests = dict(islice(checkpoints, NEAR))
    if faults:
        log.warning("%s does not count: %s", *describe_faults(storage, faults))
    if not manifests:
        _check_nothing_there(storage, step, faults)
    # A manifest of another format may lack a run.
    runs = {m["run"]: at for at, m in sorted(manifests.items()) if "run" in m}
    if len(runs) > 1:
        raise CheckpointError(
            f"{storage} has checkpoints of {len(runs)} runs (the newest are of steps "
            f"{' and '.join(map(str, runs.values()))}). Move those of the other run away, or "
            "choose with step=."
        )
    for at, manifest in chain(manifests.items(), checkpoints):
        if (kind := manifest["format"]) != FORMAT:
            raise CheckpointError(
                f"{storage.path(at)} has format {kind!r}, but this version of forgekit reads "
                f"format {FORMAT}. Load it with the version that wrote it."
            )
        yield at, manifest


def _check_nothing_there(storage: Storage, step: int | None, faults: Mapping[int, str]) -> None:
    """Raise, instead of starting over, if there may be a checkpoint although none is good."""
    if step is not None:
        why = f" Its {MANIFEST} {faults[step]}." if faults else ""
        raise CheckpointError(
            f"{storage} has no committed step {step}; it has {describe(storage)}.{why}"
        )
    if MANIFEST in storage.names():
        raise CheckpointError(f"{storage} is a checkpoint itself; pass the folder above it.")
    for at, fault in faults.items():
        if fault != "is missing" or storage.names(at):  # an empty folder never was a checkpoint
            raise CheckpointError(
                f"no whole checkpoint to load: {storage.path(at)} may be one, but its {MANIFEST} "
                f"{fault}. Restore it, or delete the folder to start over."
            )


def path_inside(manifest: Manifest, name: str) -> str:
    """Return the path of a file inside its checkpoint."""
    return posixpath.join(manifest["folder"], name)


def _check_data(path: object, saved: Any, now: Any) -> None:
    """Raise if the checkpoint was trained on other data; name the facts that changed."""
    if saved is None or now is None or saved == now:
        return
    saved_facts, facts = facts_of(saved), facts_of(now)
    changed = [f"fingerprint ({brief(saved)} then, {brief(now)} now)"]
    if saved_facts and facts:
        changed = compare_facts(saved_facts, facts)
    if changed:
        raise CheckpointError(
            f"{path} was saved while training on other data, which differ in {', '.join(changed)}."
            " Choose another run directory, or load with allow_other_data=True."
        )


@torch.no_grad()
def _read_tensors(
    storage: Storage, step: int, manifest: Manifest, tensors: dict[str, Tensor]
) -> None:
    """Read this rank's parts of a checkpoint's tensors, in place."""
    with ExitStack() as stack:
        files: dict[int, Any] = {}
        for key, tensor in tensors.items():
            left = local(tensor).numel()
            for rank, name, box in manifest["tensors"][key].get("chunks", []):
                if (common := _overlap(tensor, box)) is None:
                    continue
                if rank not in files:
                    shard = path_inside(manifest, shard_name(rank))
                    file = stack.enter_context(storage.fetched(step, shard))
                    files[rank] = stack.enter_context(safe_open(file, "pt"))
                view, inside = common
                view.copy_(files[rank].get_slice(name)[inside or ...])
                left -= view.numel()
            if left:  # else some memory stays uninitialised
                raise CheckpointError(f"no file of {storage.path(step)} has all of {key!r}")


def _overlap(tensor: Tensor, box: Any) -> tuple[Tensor, tuple[slice, ...]] | None:
    """Return a view of this rank's values within a chunk, and their range in the chunk."""
    here = ranges_of(tensor)
    there = to_ranges(*(box or ((0,) * tensor.ndim, tensor.shape)))  # None: a whole tensor
    if (shared := overlap(here, there)) is None:
        return None
    return local(tensor)[index_in(shared, here)], index_in(shared, there)


def _added_adapters(model: nn.Module, manifest: dict[str, Any]) -> list[str]:
    """Return the keys of this rank's adapters if the checkpoint has no adapters."""
    adapters = [f"model.{name}" for name in adapter_names(model)]
    return [] if any(key in manifest["tensors"] for key in adapters) else adapters
