"""Save a ``TrainState`` while training goes on; load it on any number of ranks.

A save blocks only to copy the state into host memory. A thread then writes it, over a process group
of its own (collectives of a save must not mix with those of training), and commits it: see
``checkpoints/commit.py`` for what a crash leaves and ``checkpoints/contents.py`` for what is in the
files. Loading checks everything first, files, data, names and shapes, and only then changes the
state.
"""

from __future__ import annotations

import json
import logging
import math
import os
import posixpath
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from forgekit.run.checkpoints.agree import Ranks, explain, ranks_of
from forgekit.run.checkpoints.commit import (
    INDEX,
    CheckpointError,
    digest,
    only_warns,
    step_name,
)
from forgekit.run.checkpoints.contents import (
    PARTS,
    choose,
    collect,
    find_mismatch,
    merge,
    optional_fields,
    prepare,
    restore,
    stage,
)
from forgekit.run.checkpoints.loading import (
    check_data,
    choose_checkpoint,
    expect_one_process,
    forgekit_version,
    read_tensors,
)
from forgekit.run.checkpoints.manifest import FORMAT
from forgekit.run.checkpoints.migrate import Migrated, Migration, bring_up
from forgekit.run.checkpoints.optimizers import check_complete, check_holds_none
from forgekit.run.checkpoints.places import Place, Workspace, place_of
from forgekit.run.checkpoints.retention import Keep
from forgekit.state import TrainState, donate

__all__ = ["PendingSave", "checkpoint_load", "checkpoint_save", "wait_for_saves"]

Part = Literal["model", "optimizer", "fields"]

log = logging.getLogger("forgekit")

StateT = TypeVar("StateT", bound=TrainState)

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
            as ``s3://bucket/run/checkpoints``: see ``remote.py`` for what differs there.
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
    _check_version(version)
    check_holds_none(state.optimizer)
    place = place_of(directory)
    ranks = ranks_of(state)
    tensors, description = collect(state, ranks.rank)
    description = {
        "format": FORMAT,
        "forgekit": forgekit_version(),
        "version": version,
        "step": state.step,
        "fingerprint": _named(fingerprint, state.samples),
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
            with another optimizer.
        version: Which version of the state this is, as given to ``checkpoint_save``. A newer one is
            refused.
        migrate: Brings a checkpoint of an older version to this one: a function from the
            ``SavedState`` to the same in today's names. Without it an older one is refused.

    Returns:
        The state that was saved, or the parts of it. If there is no committed checkpoint:
        ``state`` itself, which is then not donated.

    Raises:
        ValueError: If a part is unknown, or the model is none of them; if ``version`` is less than
            1; if a URL was made into a ``Path``.
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
    _check_version(version)
    if "optimizer" in parts:
        check_holds_none(state.optimizer)
    wait_for_saves()
    place, ranks = place_of(directory), ranks_of(state)
    found = choose_checkpoint(ranks, place, step)
    if found is None:
        return state
    path, written = found
    migrated = _migrated(ranks, path, written, version, migrate)
    if not allow_other_data and "fields" in parts:  # else the data begin anew
        samples = written["fields"]["samples"]
        check_data(path, written.get("fingerprint"), _named(fingerprint, samples))
    manifest = choose(migrated.manifest, parts)
    described = choose(collect(state, ranks.rank)[1], parts)
    descriptions = ranks.gather(described)
    optional = optional_fields(state)
    if problem := ranks.first(lambda: find_mismatch(merge(descriptions), manifest, optional)):
        raise CheckpointError(f"{path} {problem}.")
    if lost := manifest["fields"].keys() - described["fields"].keys():
        log.warning("%s has fields that the state does not: %s", path, ", ".join(sorted(lost)))
    restoration = prepare(state, manifest, ranks.rank)
    targets = migrated.place(restoration.tensors)
    read_tensors(ranks, place, path, written, targets)
    if (seed := manifest["fields"].get("seed", state.seed)) != state.seed:
        log.warning("the seed stays %s, as in %s; %s was asked for", seed, path, state.seed)
    changes: dict[str, Any] = {}
    ranks.each(lambda: changes.update(restore(state, restoration)))  # a field may refuse its state
    return donate(state, **changes)


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

    from forgekit.run.checkpoints.shards import ShardWriter

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


def _migrated(
    ranks: Ranks, path: object, manifest: dict[str, Any], version: int, migrate: Migration | None
) -> Migrated:
    found: list[Migrated] = []  # stays on its rank: it holds tensors that the migration may give
    ranks.each(lambda: found.append(bring_up(path, manifest, version, migrate)))
    return found[0]


def _check_version(version: int) -> None:
    if version < 1:
        raise ValueError(
            f"version {version} must be at least 1: checkpoints without one count as version 1."
        )


def _named(fingerprint: Any, samples: int) -> Any:
    """Return what a manifest would give back, so that a tuple equals the list it becomes."""
    named = fingerprint(samples) if callable(fingerprint) else fingerprint
    return json.loads(json.dumps(named))
