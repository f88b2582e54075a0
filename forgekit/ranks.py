"""Calls that several ranks make together: an error on one rank is raised on all.

A rank that raises alone leaves the others waiting in a collective. Work that can fail therefore
runs through ``Ranks``, which exchanges the outcome and raises the same error everywhere. What
interrupts one rank, a signal or Ctrl-C, is not a failure: it interrupts all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import attrs
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, is damaged, or does not belong to this run."""


class GroupThread(threading.Thread):
    """A thread that uses process groups; ``shutdown`` joins it."""


@attrs.frozen
class Ranks:
    """The ranks that share a model or a state, as a process group; without one, this rank."""

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
            # A broadcast: only the first rank reads directories.
            dist.broadcast_object_list(answers, group=self.group, group_src=0)
        value, error = answers[0]
        if error is not None:
            _raise_interruption(error)
            raise CheckpointError(error)
        return cast(T, value)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value on the first rank, and an empty list on the others."""
        if self.group is None:
            return [value]
        values = [value] * self.world if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values or []


def explain(error: BaseException) -> str:
    """Format an error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    # A directory that may not be replaced is refused in a sentence (files.atomic_directory).
    in_words = isinstance(error, CheckpointError | FileExistsError)
    return str(error) if in_words else f"{type(error).__name__}: {error}"


def all_ranks() -> Ranks:
    """Return the ranks of the default process group; this one alone if there is none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    return Ranks(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def ranks_sharing(tensors: Iterable[Tensor]) -> Ranks:
    """Return all ranks if some of a model's tensors are sharded, else this one alone."""
    # With pipelines a rank may shard over itself alone and still share the model.
    return all_ranks() if any(isinstance(tensor, DTensor) for tensor in tensors) else Ranks()


def _attempt(function: Callable[[], T]) -> tuple[Any, str | BaseException | None]:
    try:
        return function(), None
    except Exception as error:
        return None, explain(error)
    except BaseException as interruption:
        return None, interruption


def _raise_interruption(error: str | BaseException) -> None:
    if isinstance(error, BaseException):
        raise error
