"""Save a ``TrainState`` while training goes on.

A save blocks only to copy the state into host memory. A thread then writes it, over a process group
of its own (collectives of a save must not mix with those of training), and commits it: see
``checkpoints/commit.py`` for what a crash leaves and ``checkpoints/contents.py`` for what is in the
files.
"""

from __future__ import annotations

import json
import logging
import math
import os
import posixpath
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgekit.run.checkpoints.commit import INDEX, Workspace, digest, only_warns, step_name
from forgekit.run.checkpoints.contents import collect, merge, stage
from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.run.checkpoints.manifest import FORMAT
from forgekit.run.checkpoints.ranks import Ranks, explain, ranks_of
from forgekit.run.checkpoints.read import expect_one_process, forgekit_version
from forgekit.run.checkpoints.retention import Keep
from forgekit.run.checkpoints.savable_optimizers import check_complete, check_holds_none
from forgekit.run.checkpoints.storage import Place, place_of
from forgekit.state import TrainState

__all__ = ["PendingSave", "checkpoint_save", "wait_for_saves"]

log = logging.getLogger("forgekit")

_in_flight: PendingSave | None = None
_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()


class PendingSave:
    """A save that may still be running in its thread.

    Attributes:
        step: The step that is being saved.
    """

    def __init__(self, step: int, work: Callable[[], Path | str]) -> None:
        self.step = step
        self._work = work
        self._future: Future[Path | str] = Future()
        self._reported = False

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future.done()

    def wait(self) -> Path | str:
        """Block until the checkpoint is durable.

        Returns:
            The committed directory, a ``Path``; its URL for a place that is one.

        Raises:
            CheckpointError: If the save failed, on every rank if it failed on one. Earlier
                checkpoints and ``latest`` are as they were.
        """
        try:
            return self._future.result()
        except CheckpointError:
            self._reported = True
            raise

    def _run(self) -> None:
        try:
            self._future.set_result(self._work())
        except BaseException as error:  # torch's CheckpointException derives from it
            log.error("%s", error)
            self._future.set_exception(error)
        finally:
            del self._work  # drops the staged tensors of a save whose model is gone


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

    Every rank calls it. The state is copied before the call returns and is not consumed. One save
    runs at a time: the next one first waits for it, and raises if it failed. State that an
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
        ValueError: If ``keep`` or ``version`` is less than 1, or a URL was made into a ``Path``.
        ImportError: If the directory is a URL, and fsspec or what it needs for it is missing.
        TypeError: If a field of the state cannot be saved, or the optimizer keeps its state where
            a checkpoint cannot find it.
        CheckpointError: If the previous save failed and nobody has been told yet.

    Examples:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = TrainState.create(model, optimizer)
        >>> pending = checkpoint_save(state, tempfile.mkdtemp())
        >>> pending.wait().name
        'step_00000000'
    """
    global _in_flight
    rule = Keep(last=keep) if isinstance(keep, int) else keep
    if not isinstance(rule, Keep | None):
        raise TypeError(f"keep is {keep!r}; pass an integer, a forgekit.Keep, or None to keep all.")
    check_version(version)
    check_holds_none(state.optimizer)
    place = place_of(directory)
    ranks = ranks_of(state)
    tensors, description = collect(state, ranks.rank)
    description = {
        "format": FORMAT,
        "forgekit": forgekit_version(),
        "version": version,
        "step": state.step,
        "fingerprint": named_fingerprint(fingerprint, state.samples),
        "metric": None if metric is None or math.isnan(metric) else float(metric),
        "torch": torch.__version__,
        **description,
    }
    wait_for_saves()
    check_complete(state, ranks)
    staged = stage(tensors, _buffers.setdefault(state.model, {}))
    pending = PendingSave(
        state.step, lambda: _write_or_explain(ranks, place, staged, description, rule)
    )
    _in_flight = pending
    if blocking:
        pending._run()
        pending.wait()
    else:
        # Not a daemon: the interpreter waits for it, so a script may end right after a save.
        threading.Thread(target=pending._run, name=f"checkpoint {state.step}").start()
    return pending


def wait_for_saves() -> None:
    """Block until no save is running; call it before process groups are destroyed.

    Raises:
        CheckpointError: If the last save failed and nobody has been told yet.
    """
    global _in_flight
    pending, _in_flight = _in_flight, None
    if pending is not None and not pending._reported:
        pending.wait()


def _write_or_explain(
    ranks: Ranks,
    place: Place,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    keep: Keep | None,
) -> Path | str:
    committed: list[Path | str] = []
    try:
        _write(ranks, place, tensors, description, keep, committed)
    except BaseException as error:
        if not committed:
            raise CheckpointError(
                f"step {description['step']} could not be saved to {place}: {explain(error)}. "
                f"Checkpoints that were there are untouched: {_remains(place)}."
            ) from error
        log.warning("%s is saved; what came after failed: %s", committed[0], explain(error))
    return committed[0]


def _remains(place: Place) -> str:
    try:
        found = place.committed()
    except Exception:  # whatever kept it from being saved
        return "they cannot be listed now"
    return f"{step_name(max(found))} is good" if found else "there is none"


def _write(
    ranks: Ranks,
    place: Place,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    keep: Keep | None,
    committed: list[Path | str],
) -> None:
    """Write and commit; ``committed`` gets the checkpoint as soon as it is one."""
    import torch.distributed.checkpoint as dcp

    from forgekit.run.checkpoints.tensor_shards import ShardWriter

    step = description["step"]
    with place.workspace(ranks, step) as workspace:
        if ranks.group is None:
            expect_one_process()
        writer = ShardWriter(workspace.path, sync_files=True)
        dcp.save(
            tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None
        )
        digests = ranks.each(lambda: _deliver(place, workspace, step, ranks.rank))
        descriptions = ranks.gather(description)

        def commit() -> Path | str:
            listed = {name: digest for part in digests for name, digest in part.items()}
            manifest = merge(descriptions) | {"world": ranks.world, "files": listed}
            committed.append(place.commit(workspace, manifest))
            with only_warns(f"{committed[0]} is saved, but older ones could not be deleted"):
                place.retain(keep, step)
            return committed[0]

        committed[:] = [ranks.first(commit)]


def _deliver(place: Place, workspace: Workspace, step: int, rank: int) -> dict[str, Any]:
    """Check-sum the files that a rank wrote and hand them over; the first also has the index."""
    written = sorted(workspace.path.glob(f"__{rank}_*"))
    written += [workspace.path / INDEX] if rank == 0 else []
    digests = {}
    for file in written:
        with file.open("rb") as stream:
            digests[posixpath.join(workspace.folder, file.name)] = digest(stream)
    place.deliver(workspace, step, [file.name for file in written])
    return digests


def check_version(version: int) -> None:
    """Refuse a version of the state below 1."""
    if version < 1:
        raise ValueError(
            f"version {version} must be at least 1: checkpoints without one count as version 1."
        )


def named_fingerprint(fingerprint: Any, samples: int) -> Any:
    """Return what a manifest would give back, so that a tuple equals the list it becomes."""
    named = fingerprint(samples) if callable(fingerprint) else fingerprint
    return json.loads(json.dumps(named))
