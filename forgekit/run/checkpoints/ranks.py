"""Ranks that save or load together: what fails on one of them fails on all.

A rank that raises alone leaves the others waiting in a collective. Work that can fail therefore
runs through ``Ranks``, which exchanges the outcome and raises the same error everywhere. What
interrupts one rank, a signal or Ctrl-C, is no failure: it interrupts all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import attrs
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.state import TrainState

GROUP_NAME = "forgekit checkpoints"
"""Description of the process groups of saves, by which ``Health`` leaves their time-outs alone."""

T = TypeVar("T")


@attrs.frozen
class Ranks:
    """The ranks that share a state, over a process group that only checkpoints use."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    world: int = 1

    def each(self, function: Callable[[], T]) -> list[T]:
        """Call ``function`` on every rank; return all results, or raise on all if one raised."""
        answer = _attempt(function)
        answers = [answer] * self.world
        if self.group is not None:
            dist.all_gather_object(answers, answer, group=self.group)
        errors = [(rank, error) for rank, (_, error) in enumerate(answers) if error is not None]
        for _, error in errors:
            _raise_interruption(error)
        for rank, error in errors:
            raise CheckpointError(f"rank {rank}: {error}" if self.world > 1 else error)
        return [value for value, _ in answers]

    def together(self, function: Callable[[], T]) -> T:
        """Call ``function`` on every rank and return this rank's result, or raise on all of them.

        Unlike ``each`` it exchanges no results, which may hold tensors.
        """
        results: list[T] = []
        self.each(lambda: results.append(function()))
        return results[0]

    def first(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the first rank; return its result, or raise, on every rank."""
        answers = [_attempt(function) if self.rank == 0 else (None, None)]
        if self.group is not None:
            # Not a gather: only the first rank reads directories.
            dist.broadcast_object_list(answers, group=self.group, group_src=0)
        value, error = answers[0]
        if error is not None:
            _raise_interruption(error)
            raise CheckpointError(error)
        return cast(T, value)

    def torch_options(self) -> dict[str, Any]:
        """Return the arguments by which torch's own save and load take these ranks."""
        if self.group is None:  # torch would warn each time that there is no group
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        return {"process_group": self.group, "no_dist": self.group is None}

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on the first rank, and nothing on the others."""
        if self.group is None:
            return [value]
        values = [value] * self.world if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []


def _attempt(function: Callable[[], T]) -> tuple[Any, str | BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # torch's CheckpointException derives from it
        return None, interruption_of(error) or explain(error)


def _raise_interruption(error: str | BaseException) -> None:
    if isinstance(error, BaseException):
        raise error


def interruption_of(error: BaseException) -> BaseException | None:
    """Return the stop request or Ctrl-C behind an error: torch wraps it like any failure."""
    from torch.distributed.checkpoint import CheckpointException

    if isinstance(error, CheckpointException):
        causes = [interruption_of(cause) for cause, _ in error.failures.values()]
        return next(filter(None, causes), None)
    return None if isinstance(error, Exception) else error


def explain(error: BaseException) -> str:
    """Say what failed in one line, without the tracebacks that torch wraps around it."""
    from torch.distributed.checkpoint import CheckpointException

    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {explain(error)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


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
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is None or dist.get_rank() not in members:
        raise CheckpointError(
            f"this process is not one of the ranks {members} that hold the state, or its process "
            "groups are gone. Save and load on every rank, before forgekit.shutdown()."
        )
    key = default, members
    if state.saves.group is None or state.saves.group[0] != key:
        # A save runs in a thread beside the collectives of training. On the group of training
        # both would take each other's messages, which aborts the process.
        # In a plan the other ranks are not there, and its group can reach none.
        backend = "fake" if dist.get_backend() == "fake" else "gloo"
        options = {"backend": backend, "use_local_synchronization": True, "group_desc": GROUP_NAME}
        state.saves.group = key, dist.new_group(list(members), **options)
    group = state.saves.group[1]
    return Ranks(group, dist.get_rank(group), len(members))
