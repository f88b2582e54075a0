"""Which checkpoint is loaded, whether it is whole, and its tensors."""

from __future__ import annotations

import logging
import pickle
import posixpath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forgekit.data.fingerprint import compare_facts, facts_of
from forgekit.inputs import brief
from forgekit.ranks import CheckpointError, Ranks, explain, interruption_of
from forgekit.run.checkpoints.json_trees import decode
from forgekit.run.checkpoints.manifest import FORMAT, INDEX, MANIFEST
from forgekit.run.checkpoints.per_rank_fields import trees_of
from forgekit.run.checkpoints.step_names import step_name
from forgekit.run.checkpoints.storage import (
    Checkpoint,
    Storage,
    committed,
    find_damage,
    patiently,
    survey,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

log = logging.getLogger("forgekit")


def choose_checkpoint(
    ranks: Ranks, storage: Storage, step: int | None
) -> tuple[Checkpoint, dict[str, Any]] | None:
    """Return the checkpoint to load and its manifest: the one asked for or the newest good one.

    Raises:
        CheckpointError: As ``checkpoint_load`` says, on every rank.
    """
    damages = []
    for path in ranks.first(lambda: _candidates(storage, step)):
        manifest = ranks.first(lambda path=path: _readable_manifest(storage, path))
        damage = _find_malformed(path, manifest) or _damaged_files(ranks, storage, path, manifest)
        if not damage:
            return path, manifest
        damages += damage
        if ranks.rank == 0 and step is None:
            name = posixpath.basename(str(path))
            log.warning("skipped the damaged checkpoint %s: %s", name, "; ".join(damage))
    if damages:
        good = "" if step is None else f" Others are there: {_steps(storage)}."
        raise CheckpointError(f"no whole checkpoint to load: {'; '.join(damages)}.{good}")
    return None


def check_data(path: Checkpoint, saved: Any, now: Any) -> None:
    """Refuse a checkpoint of other data, and say which of their facts changed."""
    if saved is None or now is None or saved == now:
        return
    then, today = facts_of(saved), facts_of(now)
    what = f"its fingerprint is {brief(saved)} and today's is {brief(now)}."
    if then and today:
        if not (changed := compare_facts(then, today)):
            return
        what = f"what changed is: {', '.join(changed)}."
    raise CheckpointError(
        f"{path} was saved while training on other data: {what} Choose another run "
        "directory, or call checkpoint_load with allow_other_data=True to go on with them."
    )


def read_tensors(
    ranks: Ranks,
    storage: Storage,
    path: Checkpoint,
    manifest: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Read a checkpoint's tensors in place; nothing that its files say is run.

    Args:
        ranks: All ranks that load.
        storage: Where it is kept.
        path: The checkpoint.
        manifest: Its manifest.
        tensors: Where they go, by the keys of the files.

    Raises:
        CheckpointError: If it holds other things than tensors, on every rank.
    """
    import torch.distributed.checkpoint as dcp

    from forgekit.run.checkpoints.tensor_shards import IndexReader, read_index

    folder = manifest.get("folder", "")
    listed = {posixpath.relpath(name, folder or ".") for name in manifest["files"]}

    def read() -> Metadata:
        name = posixpath.join(folder, INDEX)
        with storage.opened(path, name) as stream:
            return read_index(stream, f"{path}/{name}", listed)

    index = ranks.together(read)  # torch would read it on the first rank alone
    with storage.reading(path, folder) as (where, fs):
        reader = IndexReader(where, index, fs)
        try:
            dcp.load(dict(tensors), storage_reader=reader, **ranks.torch_options())
        except dcp.CheckpointException as error:
            if (interruption := interruption_of(error)) is not None:
                raise interruption from None
            raise _explained(path, error) from error


def _explained(path: Checkpoint, error: Any) -> CheckpointError:
    what = f"is whole but could not be read: {explain(error)}"
    for rank, (cause, _) in error.failures.items():
        if isinstance(cause, pickle.UnpicklingError):
            what = (
                f"has a shard that is not a tensor (read by rank {rank}), and nothing of it was "
                "run. Somebody may have changed it: delete this checkpoint and load one that you "
                "trust"
            )
    after = "The model may hold a part of it; build it anew before the next try"
    return CheckpointError(f"{path} {what}. {after}.")


def _candidates(storage: Storage, step: int | None) -> list[Checkpoint]:
    storage.restore_replaced()
    found, faulty = survey(storage)
    if step is None:
        for path, fault in faulty.items():
            log.warning(
                "%s has no readable %s and does not count as a checkpoint: it %s",
                *(path, MANIFEST, fault),
            )
        if not found:
            storage.check_directory()
            _check_undamaged(faulty)
        _check_run(storage, found)
        return [found[known] for known in sorted(found, reverse=True)]
    if step not in found:
        named = step_name(step)
        faults = [f for path, f in faulty.items() if posixpath.basename(str(path)) == named]
        why = "".join(f" {named}/{MANIFEST} {fault}." for fault in faults)
        raise CheckpointError(
            f"{storage} has no committed step {step}; it has {_steps(storage)}.{why}"
        )
    return [found[step]]


def _check_run(storage: Storage, found: dict[int, Checkpoint]) -> None:
    """Refuse checkpoints of several runs in one directory: which one would go on?"""
    runs: dict[str, int] = {}
    for step in sorted(found):
        if run := storage.load_manifest(found[step]).get("run"):  # a newer format may have none
            runs[run] = step
    if len(runs) > 1:
        steps = " and ".join(str(step) for step in runs.values())
        raise CheckpointError(
            f"{storage} has checkpoints of {len(runs)} runs (the newest are of steps {steps}): "
            "somebody copied one in. Move those of the other run away, or choose with step=."
        )


def _check_undamaged(faulty: dict[Checkpoint, str]) -> None:
    """Refuse to start over beside a manifest that was damaged after its checkpoint was whole.

    A directory without a manifest was never committed and does not keep a run from starting.
    """
    for path, fault in faulty.items():
        if fault != "is missing":
            raise CheckpointError(
                f"no whole checkpoint to load: {path}/{MANIFEST} is damaged. Restore it, "
                f"or delete {path} to start over. It {fault}."
            )


def _steps(storage: Storage) -> str:
    return ", ".join(str(step) for step in sorted(committed(storage))) or "none"


def _readable_manifest(storage: Storage, path: Checkpoint) -> dict[str, Any]:
    manifest = patiently(lambda: storage.load_manifest(path), f"{path}/{MANIFEST}")
    if (found := manifest["format"]) == FORMAT:
        return manifest
    where, remedy = "", "Load it with the version that wrote it, or load another step."
    if isinstance(found, int) and found > FORMAT:
        where, remedy = ", from a newer version", "Upgrade forgekit to load it."
    raise CheckpointError(
        f"{path} has format {found!r}{where}, written by forgekit "
        f"{manifest.get('forgekit', 'of unknown version')}; forgekit {forgekit_version()} reads "
        f"format {FORMAT}. {remedy}"
    )


def forgekit_version() -> str:
    """Return the version of this package."""
    from importlib.metadata import version

    return version("forgekit")


def _find_malformed(path: Checkpoint, manifest: dict[str, Any]) -> list[str]:
    """Look at each part of a manifest as it will be used; only one without a checksum can fail."""
    try:
        specs = manifest["tensors"]
        for spec in specs.values():
            torch.Size(spec["shape"]).numel(), torch.empty(0, dtype=getattr(torch, spec["dtype"]))
        trees = [tree for entries in manifest["optimizer"].values() for tree in entries.values()]
        trees += [own for tree in manifest["fields"].values() for own in trees_of(tree).values()]
        for tree in trees:
            decode(tree, None, {}, lambda key, _: specs[key])
        int(manifest["fields"]["samples"]), manifest["optimizer_class"]
        dict(manifest.get("average") or {})
    except Exception as error:
        return [f"{path}/{MANIFEST} is malformed: {explain(error)}"]
    return []


def _damaged_files(
    ranks: Ranks, storage: Storage, path: Checkpoint, manifest: dict[str, Any]
) -> list[str]:
    """Check the files of a checkpoint, each on one rank; return what is wrong with them."""
    # Reading each file on one rank only keeps the check as fast as loading itself.
    mine = list(manifest["files"].items())[ranks.rank :: ranks.world]
    found = ranks.each(lambda: [find_damage(storage, path, name, digest) for name, digest in mine])
    return [damage for part in found for damage in part if damage]
