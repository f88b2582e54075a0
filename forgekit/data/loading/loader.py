"""The data as a resumable stream of one rank's micro-batches.

The position in the stream is one integer, the number of rows that all ranks have consumed. Which
rows come next follows from it alone, so a run resumes exactly on another number of ranks or
workers, and nothing else about the loading is ever stored.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from tensordict import TensorDict

from forgekit.data.batches.batch import mask_rows
from forgekit.data.loading.batch_size import count_micro_batches
from forgekit.data.loading.device_prefetch import Transfer
from forgekit.data.loading.skipped_samples import Skips, check_skips, positions
from forgekit.data.loading.workers import Stream
from forgekit.data.mixture.permutation import recall_rows, sample_rows
from forgekit.data.samples import apply_transforms, read_rows
from forgekit.inputs import check_integers

__all__ = ["Loader", "make_loader"]

MOST_ROWS = 2**31
"""Rows of a micro-batch, at most: they are in memory together."""

MOST_WORKERS = 1024

LAST_SAMPLE = 2**62
"""Samples are numbered in 64 bits, with room for those that come after the first."""

Integers = np.ndarray[Any, np.dtype[np.int64]]


def make_loader(
    dataset: Any,
    batch_size: int = 8,
    *,
    seed: int = 0,
    start: int = 0,
    skip: Skips = (),
    rank: int = 0,
    world: int = 1,
    workers: int = 0,
    processes: bool = False,
    shuffle: bool = True,
    epochs: int | None = None,
    transforms: Sequence[Callable[[TensorDict], TensorDict]] = (),
    device: str | torch.device | None = None,
    ahead: int = 1,
) -> Loader:
    """Load one data-parallel rank's micro-batches from a map-style dataset.

    Micro-batch ``m`` of ``R`` ranks with ``B`` rows takes, on rank ``r``, the samples
    ``start + (m * R + r) * B + (0..B-1)``. So the same stretch of samples is the same set of rows,
    however many ranks share it.

    Args:
        dataset: Has ``len()`` and ``[row]``; ``__getitems__(rows)``, if it has one, builds a whole
            micro-batch. Rows are TensorDicts of tensors. One with ``is_endless``, a mixture, needs
            no ``len()``: its row ``i`` is sample ``i``, and ``seed`` and ``shuffle`` play no part.
        batch_size: Rows per rank and micro-batch.
        seed: Names the order of the rows; each epoch has another one.
        start: Rows that were consumed before, by all ranks together: ``state.samples``.
        skip: What is left out of the samples: ``state.skips``.
        rank: This data-parallel rank.
        world: Number of data-parallel ranks.
        workers: Threads that read ahead; 0 reads when asked. The batches are the same.
        processes: Let each worker compute in a process of its own. That costs more than a
            millisecond per micro-batch, so it pays only for heavy transforms. The dataset must
            pickle, and a script needs its ``if __name__ == "__main__"``.
        shuffle: False keeps the rows in their own order.
        epochs: None goes on for ever, reshuffled each epoch; a micro-batch may straddle two. A
            number ends after that many. Then each rank gets the same number of micro-batches, and
            rows that are missing at the end are copies that carry no loss.
        transforms: Functions of a micro-batch that return one with as many rows, applied in this
            order where the rows are read, in the workers; see ``mask_prompts`` and ``pad_places``.
        device: Where micro-batches are wanted. To an accelerator they are copied from pinned
            memory, on a stream of its own, while the step computes.
        ahead: How many micro-batches may be on the device before they are asked for; with 0 each
            is copied when it is.

    Returns:
        A loader, to be used in ``for``.

    Raises:
        TypeError: If the dataset has no length.
        ValueError: If it is empty or a number is out of range, or ``epochs`` are asked of one
            without end.

    Examples:
        >>> import torch
        >>> rows = [TensorDict({"input_ids": torch.tensor([i])}) for i in range(4)]
        >>> loader = make_loader(rows, batch_size=2, shuffle=False, epochs=1)
        >>> [batch["input_ids"].tolist() for batch in loader], loader.samples
        ([[[0], [1]], [[2], [3]]], 4)
    """
    _check_dataset(dataset, epochs)
    _check_numbers(batch_size, seed, start, rank, world, workers, epochs, ahead)
    if processes and not workers:
        raise ValueError("processes=True needs workers of at least 1, it is 0; pass workers=4.")
    plan = Plan(
        dataset=dataset,
        batch_size=batch_size,
        seed=seed,
        start=start,
        skips=check_skips(skip),
        rank=rank,
        world=world,
        shuffle=shuffle,
        everything=None if epochs is None else epochs * len(dataset),
        transforms=tuple(transforms),
    )
    goal = torch.device(device or "cpu")
    transfer = None if goal.type == "cpu" else Transfer(goal, ahead)  # it is on the CPU already
    return Loader(plan, workers=workers, processes=processes, transfer=transfer)


@attrs.frozen(kw_only=True, eq=False)
class Plan:
    """Says of each micro-batch which samples it holds, and builds it."""

    dataset: Any
    batch_size: int
    seed: int
    start: int
    skips: Skips
    rank: int
    world: int
    shuffle: bool
    everything: int | None
    transforms: tuple[Callable[[TensorDict], TensorDict], ...]

    @property
    def stop(self) -> int | None:
        """The sample after the last one; None without end."""
        if self.everything is None:
            return None
        stop = self.everything
        for first, rows in self.skips:
            stop = max(min(stop, first), stop - rows)
        return stop

    def __call__(self, micro_batch: int) -> TensorDict:
        """Build this rank's micro-batch of that number."""
        first = self.start + (micro_batch * self.world + self.rank) * self.batch_size
        samples, stop = first + np.arange(self.batch_size), self.stop
        if stop is None or samples[-1] < stop:
            return apply_transforms(self._fetch(samples), self.transforms)
        real = max(0, stop - first)
        batch = self._fetch(np.minimum(samples, stop - 1))
        # Masked again afterwards: a transform may make labels.
        batch = mask_rows(batch, keep=real) if "labels" in batch else batch
        return mask_rows(apply_transforms(batch, self.transforms), keep=real)

    def __len__(self) -> int:
        if self.stop is None:
            raise TypeError("this loader never ends, so it has no length; pass epochs=1 for one.")
        return max(0, -(-(self.stop - self.start) // (self.world * self.batch_size)))

    def consumed(self, micro_batches: int) -> int:
        """Count the rows that all ranks have consumed after so many micro-batches."""
        rows = self.start + micro_batches * self.world * self.batch_size
        return rows if self.stop is None else max(self.start, min(rows, self.stop))

    def rows(self, samples: Integers) -> Integers:
        """Find the rows of samples in the dataset."""
        samples = positions(samples, self.skips)
        if _is_endless(self.dataset):
            return samples
        find = recall_rows if self.shuffle else partial(sample_rows, shuffle=False)
        return find(samples, len(self.dataset), self.seed)

    def _fetch(self, samples: Integers) -> TensorDict:
        return read_rows(self.dataset, self.rows(samples).tolist())


class Loader:
    """One rank's micro-batches, in order; ``make_loader`` makes one.

    A loader with an end has a length and starts anew in each ``for``. One without goes on where it
    stopped, like the stream it is. Close it, or use it in ``with``, to stop its workers early.

    Attributes:
        wait_seconds: How long the consumer has been kept waiting, over all micro-batches.
    """

    def __init__(
        self, plan: Plan, *, workers: int, processes: bool, transfer: Transfer | None
    ) -> None:
        self.wait_seconds = 0.0
        self._plan = plan
        self._transfer = transfer
        self._workers = workers
        self._processes = processes
        self._position = 0
        self._turn = 0
        self._stream: Stream | None = None

    @property
    def dataset(self) -> Any:
        """What the rows come from."""
        return self._plan.dataset

    def micro_batches(self, global_batch_size: int) -> int:
        """Count the micro-batches per optimizer step that make a global batch.

        Args:
            global_batch_size: Rows per optimizer step, over all ranks.

        Returns:
            ``global_batch_size / (batch_size * world)``.

        Raises:
            ValueError: If that is not a whole number of at least 1.
        """
        return count_micro_batches(global_batch_size, self._plan.batch_size, self._plan.world)

    @property
    def samples(self) -> int:
        """Rows that all ranks have consumed, padding left out, after the last micro-batch."""
        return self._plan.consumed(self._position)

    @property
    def is_endless(self) -> bool:
        """Whether it goes on epoch after epoch, and so has no length."""
        return self._plan.stop is None

    def seek(self, start: int, skip: Skips = ()) -> None:
        """Go on from another sample, in loops that are under way too, as a rolled-back run does.

        Args:
            start: As in ``make_loader``: ``state.samples``.
            skip: As in ``make_loader``: ``state.skips``.

        Raises:
            ValueError: If ``start`` or what is left out is negative.
        """
        check_integers(start=(start, 0, LAST_SAMPLE))
        self.close()
        self._plan = attrs.evolve(self._plan, start=start, skips=check_skips(skip))
        self._position = 0

    def locate(self, first: int, stop: int) -> list[tuple[str | None, int]]:
        """Say which row of the dataset each of some samples is.

        Args:
            first: The first sample.
            stop: The one after the last.

        Returns:
            Of each sample the name of its source, None where there is but one, and its row there.
        """
        rows = self._plan.rows(np.arange(first, stop))
        order = getattr(self.dataset, "order", None)
        return [(None, row) if order is None else order(row) for row in rows.tolist()]

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[TensorDict]:
        if not self.is_endless:
            self.close()
            self._position = 0
            self._turn += 1
        return self._iterate(self._turn)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers. Iterating again starts new ones."""
        if self._stream is not None:
            self._close_stream()
            self._stream = None

    def _iterate(self, turn: int) -> Iterator[TensorDict]:
        while self.is_endless or self._position < len(self):
            batch = self._next()
            self._position += 1
            yield batch
            if turn != self._turn:
                raise RuntimeError(
                    "this loader was started anew while an earlier loop over it was going on; "
                    "it has one position. Make a loader for each loop."
                )
        self.close()

    def _next(self) -> TensorDict:
        began = time.perf_counter()
        try:
            if self._stream is None:
                self._stream = self._open()
            return self._stream.take()
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_seconds += time.perf_counter() - began

    def _open(self) -> Stream:
        at = self._position
        numbers = itertools.count(at) if self.is_endless else range(at, len(self))
        stream = Stream(
            self._plan,
            numbers,
            workers=self._workers,
            processes=self._processes,
            transfer=self._transfer,
        )
        # Also at the interpreter's exit, before it takes the modules apart under the threads.
        self._close_stream = weakref.finalize(self, stream.close)
        return stream


def _is_endless(dataset: Any) -> bool:
    return getattr(dataset, "is_endless", False)


def _check_dataset(dataset: Any, epochs: int | None) -> None:
    if _is_endless(dataset):
        if epochs is not None:
            raise ValueError(
                f"epochs {epochs} of a {type(dataset).__name__}, which has no end; leave epochs "
                "out, and end the loop over its steps."
            )
        return
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"the dataset is a {type(dataset).__name__} without a length; a loader reads rows by "
            "number. Pass an endless stream of micro-batches to forgekit.groups directly."
        )
    if len(dataset) == 0:
        raise ValueError("the dataset has 0 rows; a loader needs at least one.")


def _check_numbers(
    batch_size: int,
    seed: int,
    start: int,
    rank: int,
    world: int,
    workers: int,
    epochs: int | None,
    ahead: int,
) -> None:
    anything = -(2**63)
    check_integers(rank=(rank, anything), world=(world, anything), seed=(seed, anything))
    if not 0 <= rank < world:
        raise ValueError(
            f"rank {rank} must lie in range(world={world}). "
            "rank, world = forgekit.data_ranks(mesh) gives both."
        )
    check_integers(
        batch_size=(batch_size, 1, MOST_ROWS),
        start=(start, 0, LAST_SAMPLE),
        workers=(workers, 0, MOST_WORKERS),
        ahead=(ahead, 0),
        epochs=(1 if epochs is None else epochs, 1),
    )
