"""Save a ``TrainState`` while training goes on; load it on any number of ranks.

A save blocks only to copy the state into host memory. A thread then writes it, over a process group
of its own (collectives of a save must not mix with those of training), and commits it: see
``commit.py`` for what a crash leaves behind and ``contents.py`` for what is in the files. Loading
checks everything first, files, data, names and shapes, and only then changes the state.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

import forgekit.run.commit as files
from forgekit.data.corpus.atomic import held
from forgekit.run.agree import Ranks, explain, ranks_of
from forgekit.run.commit import CheckpointError
from forgekit.run.contents import (
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
from forgekit.run.retention import Keep
from forgekit.state import TrainState, donate

__all__ = ["PendingSave", "checkpoint_load", "checkpoint_save", "wait_for_saves"]

FORMAT = 1

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

    def __init__(self, step: int, work: Callable[[], Path]) -> None:
        self.step = step
        self._work = work
        self._future: Future[Path] = Future()
        self._reported = False

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._future.done()

    def wait(self) -> Path:
        """Block until the checkpoint is durable.

        Returns:
            The committed directory.

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
        directory: Where checkpoints are kept, on a file system that all ranks share.
        keep: How many checkpoints to retain, newest first; a ``Keep`` for other rules; None for
            all.
        blocking: Return only when the checkpoint is durable; a failure is raised at once.
        fingerprint: What identifies the data, any JSON value; ``checkpoint_load`` compares it. Or
            a function from ``state.samples`` to it, so that only the data consumed so far are
            compared: ``Mixture.fingerprint_at`` lets later phases change during a run.
        metric: A number by which ``Keep(best=...)`` compares checkpoints, the same on every rank.

    Returns:
        A handle whose ``wait()`` returns the committed directory.

    Raises:
        ValueError: If ``keep`` is less than 1.
        TypeError: If a field of the state cannot be saved.
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
    ranks = ranks_of(state)
    tensors, description = collect(state, ranks.rank)
    description = {
        "format": FORMAT,
        "step": state.step,
        "fingerprint": _named(fingerprint, state.samples),
        "metric": None if metric is None or math.isnan(metric) else float(metric),
        "torch": torch.__version__,
        **description,
    }
    wait_for_saves()
    staged = stage(tensors, _buffers.setdefault(state.model, {}))
    path = Path(directory)
    pending = PendingSave(
        state.step, lambda: _write_or_explain(ranks, path, staged, description, rule)
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

    Returns:
        The state that was saved, or the parts of it. If there is no committed checkpoint:
        ``state`` itself, which is then not donated.

    Raises:
        ValueError: If a part is unknown, or the model is none of them.
        CheckpointError: If ``step`` is not there, if no checkpoint is whole, or if it is of another
            format, data, model or optimizer, or holds streams of another number of ranks. The same
            on every rank.
    """
    if "model" not in parts or not set(parts) <= set(PARTS):
        raise ValueError(f"parts {list(parts)} must be some of {list(PARTS)}, the model included.")
    wait_for_saves()
    ranks = ranks_of(state)
    found = _choose(ranks, Path(directory), step)
    if found is None:
        return state
    path, manifest = found
    if not allow_other_data and "fields" in parts:  # else the data begin anew
        samples = manifest["fields"]["samples"]
        _check_data(path, manifest["fingerprint"], _named(fingerprint, samples))
    manifest, described = choose(manifest, parts), choose(collect(state, ranks.rank)[1], parts)
    descriptions = ranks.gather(described)
    optional = optional_fields(state)
    if problem := ranks.first(lambda: find_mismatch(merge(descriptions), manifest, optional)):
        raise CheckpointError(f"{path} {problem}.")
    if lost := manifest["fields"].keys() - described["fields"].keys():
        log.warning("%s has fields that the state does not: %s", path, ", ".join(sorted(lost)))
    restoration = prepare(state, manifest, ranks.rank)
    with held(path, shared=True):  # nobody's retention deletes it meanwhile
        _read(ranks, path, restoration.tensors)
    if (seed := manifest["fields"].get("seed", state.seed)) != state.seed:
        log.warning("the seed stays %s, as in %s; %s was asked for", seed, path, state.seed)
    changes: dict[str, Any] = {}
    ranks.each(lambda: changes.update(restore(state, restoration)))  # a field may refuse its state
    return donate(state, **changes)


def _write_or_explain(
    ranks: Ranks,
    directory: Path,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    keep: Keep | None,
) -> Path:
    try:
        return _write(ranks, directory, tensors, description, keep)
    except BaseException as error:
        good = files.latest_checkpoint(directory)
        remains = f"{good.name} is good" if good else "there is none"
        raise CheckpointError(
            f"step {description['step']} could not be saved to {directory}: {explain(error)}. "
            f"Checkpoints that were there are untouched: {remains}."
        ) from error


def _write(
    ranks: Ranks,
    directory: Path,
    tensors: dict[str, Tensor],
    description: dict[str, Any],
    keep: Keep | None,
) -> Path:
    import torch.distributed.checkpoint as dcp

    step = description["step"]
    with ExitStack() as stack:
        fresh = files.temporary_directory(directory, step)
        temporary = ranks.first(lambda: stack.enter_context(fresh))
        if ranks.group is None:
            _expect_one_process()
        writer = dcp.FileSystemWriter(temporary, sync_files=True)
        dcp.save(
            tensors, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None
        )
        digests = ranks.each(lambda: _own_digests(temporary, ranks.rank))
        descriptions = ranks.gather(description)

        def commit() -> Path:
            listed = {name: digest for part in digests for name, digest in part.items()}
            manifest = merge(descriptions) | {"world": ranks.world, "files": listed}
            return files.commit(temporary, manifest)

        final = ranks.first(commit)
        ranks.first(lambda: files.retain(directory, keep, step))
    return final


def _own_digests(temporary: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Check-sum the files that a rank wrote; the first one also wrote the index."""
    own = sorted(temporary.glob(f"__{rank}_*")) + ([temporary / ".metadata"] if rank == 0 else [])
    return {file.name: files.digest(file) for file in own}


def _choose(ranks: Ranks, directory: Path, step: int | None) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint to load and its manifest: the one asked for or the newest good one."""
    candidates = ranks.first(lambda: _candidates(directory, step))
    damages = []
    for path in candidates:
        manifest = ranks.first(lambda path=path: _readable_manifest(path))
        damage = _find_damage(ranks, path, manifest)
        if not damage:
            return path, manifest
        damages += damage
        if ranks.rank == 0 and step is None:
            log.warning("skipped the damaged checkpoint %s: %s", path.name, "; ".join(damage))
    if damages:
        good = "" if step is None else f" Others are there: {_steps(directory)}."
        raise CheckpointError(f"no whole checkpoint to load: {'; '.join(damages)}.{good}")
    return None


def _candidates(directory: Path, step: int | None) -> list[Path]:
    files.put_back(directory)
    found = files.committed(directory)
    if step is None:
        for torn in files.step_directories(directory).keys() - found.keys():
            log.warning(
                "%s has no readable manifest.json and does not count as a checkpoint",
                directory / files.step_name(torn),
            )
        return [found[known] for known in sorted(found, reverse=True)]
    if step not in found:
        there = _steps(directory)
        raise CheckpointError(f"{directory} has no committed step {step}; it has {there}.")
    return [found[step]]


def _steps(directory: Path) -> str:
    return ", ".join(str(step) for step in sorted(files.committed(directory))) or "none"


def _readable_manifest(path: Path) -> dict[str, Any]:
    manifest = files.read_manifest(path) or {}
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format')!r} and this forgekit reads {FORMAT}. "
            "Load it with the version that saved it, or upgrade."
        )
    return manifest


def _find_damage(ranks: Ranks, path: Path, manifest: dict[str, Any]) -> list[str]:
    """Check the files of a checkpoint, each on one rank; return what is wrong with them."""
    mine = list(manifest["files"].items())[ranks.rank :: ranks.world]
    found = ranks.each(lambda: [files.find_damage(path / name, digest) for name, digest in mine])
    return [damage for part in found for damage in part if damage]


def _check_data(path: Path, saved: Any, now: Any) -> None:
    if saved is not None and now is not None and saved != now:
        raise CheckpointError(
            f"{path} was saved while training on other data: its fingerprint is {saved!r} and "
            f"today's is {now!r}. Files or sequence length have changed. Choose another run "
            "directory, or call checkpoint_load with allow_other_data=True to go on with them."
        )


def _read(ranks: Ranks, path: Path, tensors: dict[str, Tensor]) -> None:
    import torch.distributed.checkpoint as dcp

    if ranks.group is None:
        _expect_one_process()
    try:
        dcp.load(
            dict(tensors),
            storage_reader=dcp.FileSystemReader(path),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except dcp.CheckpointException as error:
        raise CheckpointError(
            f"{path} is whole but could not be read: {explain(error)}. "
            "The model may hold a part of it; build it anew before the next try."
        ) from error


def _expect_one_process() -> None:
    # torch warns on each save and load without a process group, even if no_dist asks for it.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def _named(fingerprint: Any, samples: int) -> Any:
    """Return what a manifest would give back, so that a tuple equals the list it becomes."""
    named = fingerprint(samples) if callable(fingerprint) else fingerprint
    return json.loads(json.dumps(named))
