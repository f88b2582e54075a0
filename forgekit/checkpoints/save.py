"""Save a ``TrainState`` while training continues.

A save blocks only to copy the state into host memory. A thread then writes it and commits it: see
``directory.py`` for what a crash leaves and ``state_dict.py`` for what is in the files.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import uuid
import zlib
from collections.abc import Callable
from concurrent import futures
from functools import partial
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forgekit.checkpoints.directory import (
    FORMAT,
    MANIFEST,
    Keep,
    Storage,
    committed,
    format_manifest,
    only_warns,
    retain,
    storage_of,
)
from forgekit.checkpoints.state_dict import (
    check_optimizer_state,
    collect,
    copy_to_host,
    merge,
    share_out,
)
from forgekit.files import write_atomic
from forgekit.model.lora import check_unmerged
from forgekit.ranks import CheckpointError, GroupThread, Ranks, explain
from forgekit.safetensors_files import contents
from forgekit.state import SaveHandle, TrainState
from forgekit.tensors import local

GROUP_NAME = "forgekit checkpoints"
"""Description of the process groups of saves; ``Health`` keeps their time-outs."""

log = logging.getLogger("forgekit")


class PendingSave:
    """A save that may still be running in its thread.

    Attributes:
        step: The step that is being saved.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._future: futures.Future[Path | str] = futures.Future()
        self._reported = False

    @property
    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._future.done()

    def wait(self) -> Path | str:
        """Block until the checkpoint is durable.

        Returns:
            The committed directory, a ``Path``; for a URL its URL.

        Raises:
            CheckpointError: If the save failed, on every rank if it failed on one. Earlier
                checkpoints and ``latest`` are as they were.
        """
        try:
            return self._future.result()
        except CheckpointError:
            self._reported = True
            raise

    def _run(self, work: Callable[[], Path | str]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as error:
            log.error("%s", error)
            self._future.set_exception(error)


class _SaveThread(GroupThread):
    """The thread of a save; running saves are found in Python's list of threads."""

    def __init__(self, save: PendingSave, work: Callable[[], Path | str]) -> None:
        # Not a daemon: the interpreter waits for it, so a script may end right after a save.
        super().__init__(target=save._run, args=(work,), name=f"checkpoint {save.step}")
        self.save = save


def checkpoint_save(
    state: TrainState,
    directory: str | os.PathLike[str],
    *,
    keep: int | Keep | None = 3,
    blocking: bool = False,
    fingerprint: Any = None,
    metric: float | None = None,
    before_commit: Callable[[], None] | None = None,
) -> PendingSave:
    """Save a state as ``directory/step_00000100``; training may continue meanwhile.

    Every rank calls it. The state is copied before the call returns and is not consumed. A run has
    one save at a time: the next one first waits for it, and raises if it failed. State that an
    optimizer keeps in its parameter groups is configuration and is not saved.

    Args:
        state: The state to save. Values that differ between ranks and are not sharded are saved as
            the first rank has them. Streams (fields that have a ``state_dict`` and can be iterated)
            and fields with ``metadata={"per_rank": True}`` are saved as each rank has them; they
            load on the same number of ranks only.
        directory: Where checkpoints are kept, on a file system that all ranks share, or a URL such
            as ``s3://bucket/run/checkpoints``: see ``RemoteStorage`` for what differs there.
        keep: How many checkpoints to retain, newest first; a ``Keep`` for other rules; None for
            all.
        blocking: Return only when the checkpoint is durable; a failure is raised at once.
        fingerprint: What identifies the data, any JSON value; ``checkpoint_load`` compares it. Or
            a function from ``state.samples`` to it, so that only the data consumed so far are
            compared: ``Mixture.fingerprint_at`` lets later phases change during a run.
        metric: A number by which ``Keep(best=...)`` compares checkpoints, the same on every rank.
        before_commit: Called on the first rank once all files are durable, just before they become
            a checkpoint; if it raises, the save fails and they never do. For a URL it is called
            before anything is changed there, too, and may be called several times.

    Returns:
        A handle whose ``wait()`` returns the committed directory.

    Raises:
        ValueError: If ``keep`` is less than 1, a URL was made into a ``Path``,
            adapters are merged, or the call is within ``averaged``.
        ImportError: If the directory is a URL, and what fsspec needs for it is not installed.
        TypeError: If a value of the state cannot be saved, or the optimizer keeps its state where
            a checkpoint cannot find it, on every rank; nothing is written then.
        CheckpointError: If the run's previous save failed and that was not raised yet.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = TrainState.create(model, optimizer)
        >>> pending = checkpoint_save(state, tempfile.mkdtemp())
        >>> pending.wait().name
        'step_00000000'
    """
    rule = keep if keep is None or isinstance(keep, Keep) else Keep(last=keep)
    if state.saves.is_averaged:
        raise ValueError(
            "checkpoint_save within forgekit.averaged would save the average in place of the "
            "weights. Save before or after the block."
        )
    check_unmerged(state.model, "a checkpoint would hold the adapters twice")
    storage, ranks = storage_of(directory), ranks_of(state)
    wait_for_saves(state)
    tensors, description = _collect(state, ranks)
    description |= {
        "format": FORMAT,
        "forgekit": version_of("forgekit"),
        "step": state.step,
        "fingerprint": as_json(fingerprint, state.samples),
        "metric": None if metric is None or math.isnan(metric) else float(metric),
        "torch": torch.__version__,
    }
    # Not earlier: the previous save was still reading the buffers.
    copies = copy_to_host(tensors, state.saves.buffers)
    work = partial(_write, ranks, storage, copies, description, rule, before_commit)
    pending = state.saves.pending = PendingSave(state.step)
    if blocking:
        pending._run(work)
        pending.wait()
    else:
        _SaveThread(pending, work).start()
    return pending


def wait_for_saves(state: TrainState | SaveHandle | None = None) -> None:
    """Block until a run's last save has ended; call it before process groups are destroyed.

    Args:
        state: Any state of the run, or its ``saves``. Without it the call waits for all saves that
            are running in this process; one that failed before is only in the log then.

    Raises:
        CheckpointError: If such a save failed and that was not raised yet.
    """
    handle = state.saves if isinstance(state, TrainState) else state
    for save in join_saves() if handle is None else [handle.pending]:
        if save is not None and not save._reported:
            save.wait()


def join_saves() -> list[PendingSave]:
    """Wait for all running saves of this process, and return them."""
    running = [t.save for t in threading.enumerate() if isinstance(t, _SaveThread)]
    futures.wait([save._future for save in running])
    return running


def ranks_of(state: TrainState) -> Ranks:
    """Return the ranks that hold a state, with the process group of its saves.

    The first call on every rank makes the group; the state's handle keeps it.
    """
    mesh = state.mesh
    if mesh is None:
        sharded = (p for p in state.model.parameters() if isinstance(p, DTensor))
        mesh = next((p.device_mesh for p in sharded), None)
    if mesh is None or mesh.size() == 1:
        return Ranks()
    members = tuple(mesh.mesh.flatten().tolist())
    key = dist.group.WORLD, members
    if state.saves.group is None or state.saves.group[0] != key:
        # A save runs in a thread beside the collectives of training. On the group of training
        # both would take each other's messages, which aborts the process.
        # `forgekit plan` runs one rank on the fake backend; a gloo group would wait for peers.
        backend = "fake" if dist.get_backend() == "fake" else "gloo"
        options = {"backend": backend, "use_local_synchronization": True, "group_desc": GROUP_NAME}
        state.saves.group = key, dist.new_group(list(members), **options)
    group = state.saves.group[1]
    return Ranks(group, dist.get_rank(group), len(members))


def shard_name(rank: int) -> str:
    """Name the file of a rank's chunks."""
    return f"rank_{rank:05d}.safetensors"


def chunk_name(key: str, box: tuple[tuple[int, ...], tuple[int, ...]] | None) -> str:
    """Name a chunk in its file: the tensor's key, and for a shard the range of each dimension."""
    if box is None:
        return key
    return f"{key}[{','.join(f'{at}:{at + size}' for at, size in zip(*box, strict=True))}]"


def as_json(fingerprint: Any, samples: int) -> Any:
    """Return a fingerprint as read back from JSON: tuples become lists."""
    value = fingerprint(samples) if callable(fingerprint) else fingerprint
    return json.loads(json.dumps(value))


def _collect(state: TrainState, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Collect on every rank; if one rank cannot save, all raise."""
    problem, collected, stateless = None, ({}, {}), set()
    try:
        collected, stateless = collect(state, ranks.rank), check_optimizer_state(state)
    except TypeError as error:
        problem = str(error)
    answers = ranks.each(lambda: (problem, stateless))
    for other, _ in answers:
        if other is not None:
            raise TypeError(other)
    # With pipelines a rank may hold none of a member's parameters; state on one rank is enough.
    for name in set.intersection(*(names for _, names in answers)):
        raise TypeError(
            f"{name.partition(' ')[2]} has no state after step {state.step}; kept anywhere but in "
            "optimizer.state[parameter] it would be lost. If it needs none, say so with "
            "stateless = True in its class."
        )
    return collected


def _write(
    ranks: Ranks,
    storage: Storage,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    keep: Keep | None,
    before_commit: Callable[[], None] | None,
) -> Path | str:
    """Write and commit on all ranks; errors after the commit are logged."""
    step = description["step"]
    try:
        with storage.writing(ranks, step, before_commit or (lambda: None)) as (folder, inside):
            descriptions = ranks.gather(description)
            keys = ranks.first(lambda: share_out(descriptions))

            def write() -> dict[str, Any]:
                shards = {key: tensors[key] for key in keys[ranks.rank]}
                name = shard_name(ranks.rank)
                entry = _write_shard(folder / name, shards, description["boxes"])
                storage.deliver(folder, inside, step, name)
                return {name: entry}

            # Every rank has delivered when this returns, so the manifest lists existing files only.
            files = ranks.each(write)
            facts = {"world": ranks.world, "folder": inside}
            ranks.first(lambda: _write_manifest(storage, folder, descriptions, keys, files, facts))
    except Exception as error:
        raise CheckpointError(
            f"step {step} could not be saved to {storage}: {explain(error).rstrip('.')}. "
            "Earlier checkpoints are untouched."
        ) from error
    with only_warns(f"{storage.path(step)} is saved, but older ones could not be deleted"):
        ranks.first(lambda: (storage.point_latest(step), retain(storage, keep, step)))
    return storage.path(step)


def _write_manifest(
    storage: Storage,
    folder: Path,
    descriptions: list[dict[str, Any]],
    keys: list[list[str]],
    files: list[dict[str, Any]],
    facts: dict[str, Any],
) -> None:
    """Write the file of each tensor's chunks, and each file's checksum."""
    manifest = merge(descriptions)
    for rank, (description, written) in enumerate(zip(descriptions, keys, strict=True)):
        for key in written:
            box = description["boxes"][key]
            chunks = manifest["tensors"][key].setdefault("chunks", [])
            chunks.append([rank, chunk_name(key, box), box])
    _, earlier = next(committed(storage), (None, {}))
    manifest["run"] = earlier.get("run") or uuid.uuid4().hex
    manifest["files"] = {name: entry for part in files for name, entry in part.items()}
    write_atomic(folder / MANIFEST, format_manifest(manifest | facts))


def _write_shard(file: Path, tensors: dict[str, Tensor], boxes: dict[str, Any]) -> dict[str, Any]:
    """Write a safetensors file; return its size and checksum."""
    parts = {key: local(tensor).contiguous() for key, tensor in tensors.items()}
    entries = {chunk_name(key, boxes[key]): (part.dtype, part.shape) for key, part in parts.items()}
    size, crc32 = 0, 0
    with file.open("wb") as stream:
        for content in contents(entries, parts.values()):
            stream.write(content)
            size, crc32 = size + len(content), zlib.crc32(content, crc32)
    return {"bytes": size, "crc32": f"{crc32:08x}"}
