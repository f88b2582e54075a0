"""From a place to tensors: which checkpoint is loaded, whether it is whole, and its contents."""

from __future__ import annotations

import logging
import pickle
import posixpath
import warnings
from typing import Any

import torch
from torch import Tensor

import forgekit.run.checkpoints.commit as files
from forgekit.data.fingerprint import compare_facts, facts_of, hash_of
from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.run.checkpoints.json_trees import decode
from forgekit.run.checkpoints.manifest import FORMAT
from forgekit.run.checkpoints.per_rank_fields import TAG
from forgekit.run.checkpoints.ranks import Ranks, explain
from forgekit.run.checkpoints.storage import Checkpoint, Place

log = logging.getLogger("forgekit")


def choose_checkpoint(
    ranks: Ranks, place: Place, step: int | None
) -> tuple[Checkpoint, dict[str, Any]] | None:
    """Return the checkpoint to load and its manifest: the one asked for or the newest good one.

    Raises:
        CheckpointError: As ``checkpoint_load`` says, on every rank.
    """
    candidates = ranks.first(lambda: _candidates(place, step))
    damages = []
    for path in candidates:
        manifest = ranks.first(lambda path=path: _readable_manifest(place, path))
        damage = _find_malformed(path, manifest) or _find_damage(ranks, place, path, manifest)
        if not damage:
            return path, manifest
        damages += damage
        if ranks.rank == 0 and step is None:
            name = posixpath.basename(str(path))
            log.warning("skipped the damaged checkpoint %s: %s", name, "; ".join(damage))
    if damages:
        good = "" if step is None else f" Others are there: {_steps(place)}."
        raise CheckpointError(f"no whole checkpoint to load: {'; '.join(damages)}.{good}")
    return None


def check_data(path: Checkpoint, saved: Any, now: Any) -> None:
    """Refuse a checkpoint of other data, and say which of their facts changed."""
    if saved is None or now is None or saved == now:
        return
    then, today = facts_of(saved), facts_of(now)
    if then is not None and today is not None:
        if not (changed := compare_facts(then, today)):
            return
        what = f"what changed is: {', '.join(changed)}."
    elif then is None and today is not None and isinstance(saved, str):
        if saved == hash_of(now):  # of before there were facts
            return
        what = (
            f"it holds only a hash of them, {saved!r:.80}, so nothing says which of files, "
            "tokenizer, sequence length, order or doc_ids changed."
        )
    else:
        what = (
            f"its fingerprint is {saved!r} and today's is {now!r}. Files or sequence length have "
            "changed."
        )
    raise CheckpointError(
        f"{path} was saved while training on other data: {what} Choose another run "
        "directory, or call checkpoint_load with allow_other_data=True to go on with them."
    )


def read_tensors(
    ranks: Ranks,
    place: Place,
    path: Checkpoint,
    manifest: dict[str, Any],
    tensors: dict[str, Tensor],
) -> None:
    """Read a checkpoint's tensors in place; nothing that its files say is run.

    Args:
        ranks: All ranks that load.
        place: Where it is kept.
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
    index = posixpath.join(folder, files.INDEX)

    def indexed() -> None:
        with place.opened(path, index) as stream:
            indexes.append(read_index(stream, f"{path}/{index}", listed))

    indexes = []
    ranks.each(indexed)
    if ranks.group is None:
        expect_one_process()
    with place.reading(path, folder) as (where, fs):
        try:
            dcp.load(
                dict(tensors),
                storage_reader=IndexReader(where, indexes[0], fs),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
        except dcp.CheckpointException as error:
            raise _explained(path, error) from error


def expect_one_process() -> None:
    """Keep torch from warning on each save and load without a group, for which no_dist asks."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def _explained(path: Checkpoint, error: Any) -> CheckpointError:
    after = "The model may hold a part of it; build it anew before the next try"
    for rank, (cause, _) in error.failures.items():
        if isinstance(cause, pickle.UnpicklingError):
            return CheckpointError(
                f"{path} has a shard that is no tensor (read by rank {rank}), and nothing of it "
                "was run. Somebody may have changed it: delete this checkpoint and load one that "
                f"you trust. {after}."
            )
    return CheckpointError(f"{path} is whole but could not be read: {explain(error)}. {after}.")


def _candidates(place: Place, step: int | None) -> list[Checkpoint]:
    torn, found = place.torn(), place.committed()
    if step is None:
        for path, fault in torn.items():
            log.warning(
                "%s has no readable %s and does not count as a checkpoint: it %s",
                *(path, files.MANIFEST, fault),
            )
        if not found:
            place.check_empty()
        return [found[known] for known in sorted(found, reverse=True)]
    if step not in found:
        named = files.step_name(step)
        faults = [f for path, f in torn.items() if posixpath.basename(str(path)) == named]
        why = "".join(f" {named}/{files.MANIFEST} {fault}." for fault in faults)
        raise CheckpointError(f"{place} has no committed step {step}; it has {_steps(place)}.{why}")
    return [found[step]]


def _steps(place: Place) -> str:
    return ", ".join(str(step) for step in sorted(place.committed())) or "none"


def _readable_manifest(place: Place, path: Checkpoint) -> dict[str, Any]:
    manifest = place.manifest(path) or {}
    if (found := manifest.get("format")) == FORMAT:
        return manifest
    writer = f"forgekit {manifest.get('forgekit', 'of unknown version')}"
    if isinstance(found, int) and found > FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, from a newer version: {writer} wrote it, and forgekit "
            f"{forgekit_version()} reads format {FORMAT}. Upgrade forgekit to load it."
        )
    raise CheckpointError(
        f"{path} has format {found!r}, which {writer} wrote, and forgekit {forgekit_version()} "
        f"reads format {FORMAT}. Load it with the version that wrote it, or load another step."
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
        for tree in manifest["fields"].values():
            is_ranks = isinstance(tree, dict) and TAG in tree
            trees += [own for _, own in tree[TAG]] if is_ranks else [tree]
        for tree in trees:
            decode(tree, None, {}, lambda key, _: specs[key])
        int(manifest["fields"]["samples"]), manifest["optimizer_class"]
    except Exception as error:
        return [f"{path}/{files.MANIFEST} is malformed: {explain(error)}"]
    return []


def _find_damage(
    ranks: Ranks, place: Place, path: Checkpoint, manifest: dict[str, Any]
) -> list[str]:
    """Check the files of a checkpoint, each on one rank; return what is wrong with them."""
    mine = list(manifest["files"].items())[ranks.rank :: ranks.world]
    found = ranks.each(lambda: [place.find_damage(path, name, digest) for name, digest in mine])
    return [damage for part in found for damage in part if damage]
