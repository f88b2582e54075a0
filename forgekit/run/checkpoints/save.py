"""Save a ``TrainState`` while training goes on.

A save blocks only to copy the state into host memory. A thread then writes it and commits it: see
``local_storage.py`` for what a crash leaves and ``contents.py`` for what is in the files.
"""

from __future__ import annotations

import json
import logging
import math
import os
import posixpath
import threading
from collections.abc import Callable
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgekit.inputs import check_integers
from forgekit.lora.adapters import check_unmerged
from forgekit.ranks import CheckpointError, Ranks, explain, interruption_of
from forgekit.run.checkpoints.contents import collect, copy_to_host, merge
from forgekit.run.checkpoints.local_storage import only_warns
from forgekit.run.checkpoints.manifest import FORMAT, INDEX
from forgekit.run.checkpoints.ranks import ranks_of
from forgekit.run.checkpoints.read import forgekit_version
from forgekit.run.checkpoints.retention import Keep
from forgekit.run.checkpoints.savable_optimizers import check_complete, check_inner_optimizers
from forgekit.run.checkpoints.step_names import step_name
from forgekit.run.checkpoints.storage import Storage, committed, digest, retain, run_of, storage_of
from forgekit.state import SaveHandle, TrainState

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
        """Whether the save has ended, well or not."""
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
        except BaseException as error:  # torch's CheckpointException derives from it
            log.error("%s", error)
            self._future.set_exception(error)


class _SaveThread(threading.Thread):
    """The thread of a save; Python's list of threads says which saves are running."""

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
    version: int = 1,
) -> PendingSave:
    """Save a state as ``directory/step_00000100``; training may go on while it is written.

    Every rank calls it. The state is copied before the call returns and is not consumed. A run has
    one save at a time: the next one first waits for it, and raises if it failed. State that an
    optimizer keeps in its parameter groups is configuration and is not saved.

    Args:
        state: The state to save. Values that differ between ranks and are not sharded are saved as
            the first rank has them. Streams (fields that have a ``state_dict`` and can be iterated)
            and fields with ``metadata={"per_rank": True}`` are saved as each rank has them; they
            load on the same number of ranks only.
        directory: Where checkpoints are kept, on a file system that all ranks share, or a URL such
            as ``s3://bucket/run/checkpoints``: see ``remote_storage.py`` for what differs there.
        keep: How many checkpoints to retain, newest first; a ``Keep`` for other rules; None for
            all.
        blocking: Return only when the checkpoint is durable; a failure is raised at once.
        fingerprint: What identifies the data, any JSON value; ``checkpoint_load`` compares it. Or
            a function from ``state.samples`` to it, so that only the data consumed so far are
            compared: ``Mixture.fingerprint_at`` lets later phases change during a run.
        metric: A number by which ``Keep(best=...)`` compares checkpoints, the same on every rank.
        version: Which version of the state this is: count up when parameters get other names or
            the state other fields, and give ``checkpoint_load`` the same number.

    Returns:
        A handle whose ``wait()`` returns the committed directory.

    Raises:
        ValueError: If ``keep`` or ``version`` is less than 1, a URL was made into a ``Path``,
            adapters are merged, or the call is within ``averaged``.
        ImportError: If the directory is a URL, and fsspec or what it needs for it is missing.
        TypeError: If a field of the state cannot be saved, or the optimizer keeps its state where
            a checkpoint cannot find it.
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
    rule = Keep(last=keep) if isinstance(keep, int) else keep
    if not isinstance(rule, Keep | None):
        raise TypeError(f"keep is {keep!r}; pass an integer, a forgekit.Keep, or None to keep all.")
    check_integers(version=(version, 1))
    check_inner_optimizers(state.optimizer)
    if state.saves.is_averaged:
        raise ValueError(
            "checkpoint_save was called within forgekit.averaged, where the average stands in the "
            "place of the weights, which would be lost. Save before or after the block."
        )
    check_unmerged(state.model, "a checkpoint would hold the adapters twice")
    storage, ranks = storage_of(directory), ranks_of(state)
    tensors, description = collect(state, ranks.rank)
    description |= {
        "format": FORMAT,
        "forgekit": forgekit_version(),
        "version": version,
        "step": state.step,
        "fingerprint": as_json(fingerprint, state.samples),
        "metric": None if metric is None or math.isnan(metric) else float(metric),
        "torch": torch.__version__,
    }
    wait_for_saves(state)
    check_complete(state, ranks)
    # Only now: the save before this one was still reading the buffers.
    copies = copy_to_host(tensors, state.saves.buffers)
    work = partial(_write, ranks, storage, copies, description, rule)
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
    saves: list[PendingSave | None] = [*join_saves()] if state is None else []
    if state is not None:
        saves = [(state.saves if isinstance(state, TrainState) else state).pending]
    for save in saves:
        if save is not None and not save._reported:
            save.wait()


def join_saves() -> list[PendingSave]:
    """Wait for all saves that are running in this process, and return them."""
    running = [t.save for t in threading.enumerate() if isinstance(t, _SaveThread)]
    futures.wait([save._future for save in running])
    return running


def _write(
    ranks: Ranks,
    storage: Storage,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    keep: Keep | None,
) -> Path | str:
    """Write and commit on all ranks; what goes wrong after the commit is logged."""
    import torch.distributed.checkpoint as dcp

    from forgekit.run.checkpoints.tensor_shards import ShardWriter

    step, done = description["step"], []
    try:
        with storage.workspace(ranks, step) as (path, folder):
            writer = ShardWriter(path, sync_files=False)
            dcp.save(tensors, storage_writer=writer, **ranks.torch_options())
            # Every rank has delivered when this returns, so the manifest lists only what is there.
            digests = ranks.each(lambda: _deliver(storage, path, folder, step, ranks.rank))
            descriptions = ranks.gather(description)

            def commit() -> Path | str:
                files = {name: digest for part in digests for name, digest in part.items()}
                manifest = merge(descriptions) | {"world": ranks.world, "files": files}
                manifest |= {"folder": folder} if folder else {}
                manifest["run"] = run_of(storage)
                done.append(storage.commit(path, manifest))
                with only_warns(f"{done[0]} is saved, but older ones could not be deleted"):
                    retain(storage, keep, step)
                return done[0]

            # The first rank has noted the commit already. If telling the others fails, the
            # checkpoint is there all the same, and the save has not failed.
            done[:] = [ranks.first(commit)]
    except BaseException as error:
        if (interruption := interruption_of(error)) is not None:
            raise interruption from None
        if not done:
            raise CheckpointError(
                f"step {step} could not be saved to {storage}: {explain(error)}. "
                f"Checkpoints that were there are untouched: {_remains(storage)}."
            ) from error
        log.warning("%s is saved; what came after failed: %s", done[0], explain(error))
    return done[0]


def _remains(storage: Storage) -> str:
    try:
        found = committed(storage)
    except Exception:  # whatever made the save fail
        return "they cannot be listed now"
    return f"{step_name(max(found))} is good" if found else "there is none"


def _deliver(storage: Storage, path: Path, folder: str, step: int, rank: int) -> dict[str, Any]:
    """Checksum the files that a rank wrote and deliver them; the first also has the index."""
    written = sorted(path.glob(f"__{rank}_*")) + ([path / INDEX] if rank == 0 else [])
    digests = {}
    for file in written:
        with file.open("rb") as stream:
            digests[posixpath.join(folder, file.name)] = digest(stream)
    storage.deliver(path, folder, step, [file.name for file in written])
    return digests


def as_json(fingerprint: Any, samples: int) -> Any:
    """Return a fingerprint as a manifest gives it back: a tuple becomes a list."""
    value = fingerprint(samples) if callable(fingerprint) else fingerprint
    return json.loads(json.dumps(value))
