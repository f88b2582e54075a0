"""A resumable stream of one rank's micro-batches.

The position in the stream is one integer, the number of rows that all ranks have consumed. The next
rows follow from it alone, so a run resumes exactly on another number of ranks or workers, and no
other state of the loader is stored.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from forgekit.checks import check_choice, check_integers, check_rank, nearest_multiples
from forgekit.data.batch import apply_transforms, mask_rows, read_rows
from forgekit.data.groups import count_micro_batches
from forgekit.data.order import Integers, Sizes, Skips, renumber, sample_rows
from forgekit.data.read_ahead import DeviceCopies, Reader, compute_ahead
from forgekit.devices import check_device

OF_THE_RUN = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals sent to the whole process group; workers ignore them, so a stopping run can still read.

Not SIGTERM, by which a pool ends its workers when one of them was killed.
"""


def make_loader(
    dataset: Any,
    batch_size: int | Sequence[int] = 8,
    *,
    sizes: Sizes | None = None,
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
    note_documents: Callable[[Tensor, Tensor], None] | None = None,
) -> Loader:
    """Load one data-parallel rank's micro-batches from a map-style dataset.

    Micro-batch ``m`` of ``R`` ranks with ``B`` rows takes, on rank ``r``, the samples
    ``start + (m * R + r) * B + (0..B-1)``. So the same range of samples is the same set of rows,
    however many ranks share it.

    Args:
        dataset: Has ``len()`` and ``[row]``; ``__getitems__(rows)``, if it has one, builds a whole
            micro-batch. Rows are TensorDicts of tensors. One with ``is_endless``, a mixture, needs
            no ``len()``: its row ``i`` is sample ``i``, and ``seed`` and ``shuffle`` are ignored.
        batch_size: Rows per rank and micro-batch; with ``sizes`` one number for each phase.
        sizes: How batch size and length change along the way, of data without end.
        seed: Selects the order of the rows; each epoch has another one.
        start: Rows that all ranks together have consumed before: ``state.samples``.
        skip: Samples to skip: ``state.skips``.
        rank: This data-parallel rank.
        world: Number of data-parallel ranks.
        workers: Threads that read ahead; 0 reads on request. The batches are the same.
        processes: Let each worker compute in its own process. That costs more than a millisecond
            per micro-batch, so it pays only for heavy transforms. The dataset must pickle, and a
            script needs its ``if __name__ == "__main__"``.
        shuffle: False keeps the rows in their own order.
        epochs: None never ends, reshuffled each epoch; a micro-batch may cross from one into the
            next. A number ends after that many. Then each rank gets the same number of
            micro-batches, and rows missing at the end are copies without a loss.
        transforms: Functions from micro-batch to micro-batch, applied in this order in the workers;
            the number of rows must not change. See ``pad_positions``.
        device: Where micro-batches are needed. To an accelerator they are copied from pinned
            memory, on a separate stream, while the step computes.
        ahead: Maximum number of micro-batches copied to the device ahead of use; 0 disables it.
        note_documents: Callback ``(device_ids, host_ids)`` for document ids:
            ``state.layout.documents.note``, where attention needs both.

    Returns:
        A loader, to be used in ``for``.

    Raises:
        TypeError: If ``epochs`` are given for a dataset without a length.
        ValueError: If the dataset is empty, a number is out of range, or the device is not there.

    Examples:
        >>> import torch
        >>> rows = [TensorDict({"input_ids": torch.tensor([i])}) for i in range(4)]
        >>> loader = make_loader(rows, batch_size=2, shuffle=False, epochs=1)
        >>> [batch["input_ids"].tolist() for batch in loader], loader.samples
        ([[[0], [1]], [[2], [3]]], 4)
    """
    check_rank(rank, world)
    batch_sizes = tuple(batch_size) if isinstance(batch_size, Sequence) else (batch_size,)
    for size in batch_sizes:
        check_integers(batch_size=(size, 1), start=(start, 0), workers=(workers, 0))
    if sizes is not None:
        _check_sizes(sizes, batch_sizes, dataset, world)
        check_choice("epochs", str(epochs), ("None",))  # a length is that of one size
    check_integers(epochs=(1 if epochs is None else epochs, 1))
    if not _is_endless(dataset):
        check_integers(**{"len(dataset)": (len(dataset), 1)})
    batches = MicroBatches(
        dataset=dataset,
        batch_sizes=batch_sizes,
        sizes=sizes,
        seed=seed,
        start=start,
        skips=tuple(skip),
        rank=rank,
        world=world,
        shuffle=shuffle,
        samples=None if epochs is None else epochs * len(dataset),
        transforms=tuple(transforms),
    )
    batches.check_start()
    target = torch.device(device or "cpu")
    if target.type != "meta":  # where batches are shapes only
        check_device(target)
    copies = None if target.type == "cpu" else DeviceCopies(target, ahead, note_documents)
    read = {"workers": workers, "processes": processes, "copies": copies, "spared": OF_THE_RUN}
    return Loader(batches, partial(compute_ahead, **read))


@attrs.frozen(kw_only=True, eq=False)
class MicroBatches:
    """One rank's micro-batches by number: the samples of each, and how to build it."""

    dataset: Any
    batch_sizes: tuple[int, ...]
    sizes: Sizes | None
    seed: int
    start: int
    skips: Skips
    rank: int
    world: int
    shuffle: bool
    samples: int | None
    transforms: tuple[Callable[[TensorDict], TensorDict], ...]

    @property
    def stop(self) -> int | None:
        """The sample after the last; None if endless."""
        return None if self.samples is None else self._without_skips(self.samples)

    def _without_skips(self, sample: int) -> int:
        """Return the number of the first sample from this one on that is not skipped."""
        for first, rows in self.skips:
            sample = max(min(sample, first), sample - rows)
        return sample

    def locate(self, number: int) -> tuple[int, int]:
        """Return the first sample of a micro-batch, over all ranks, and the number of its phase."""
        first, phase = self.start, 0
        for end in self._ends:
            count = max(end - first, 0) // (self.world * self.batch_sizes[phase])
            if number < count:
                break
            number, first, phase = number - count, max(first, end), phase + 1
        return first + number * self.world * self.batch_sizes[phase], phase

    @property
    def _ends(self) -> list[int]:
        """The first samples of all phases of sizes but the first."""
        return [] if self.sizes is None else [*map(self._without_skips, self.sizes.starts[1:])]

    def check_start(self) -> None:
        """Raise unless steps from the start on end where the next phase of sizes begins."""
        _, phase = self.locate(0)
        if self.sizes is None or phase == len(self._ends):
            return
        left, rows = self._ends[phase] - self.start, self.sizes.global_batch_sizes[phase]
        if left % rows:
            raise ValueError(
                f"from sample {self.start} to the next phase there are {left} rows, which steps of "
                f"{rows} rows do not fill; {nearest_multiples(left, rows)}. Move the phase."
            )

    def __call__(self, number: int) -> TensorDict:
        """Build this rank's micro-batch ``number``."""
        first, phase = self.locate(number)
        batch_size = self.batch_sizes[phase]
        first += self.rank * batch_size
        samples, stop = first + np.arange(batch_size), self.stop
        if stop is not None:  # samples past the end are padding: copies of the last row
            samples = np.minimum(samples, stop - 1)
        batch = read_rows(self.dataset, self.rows(samples).tolist())
        if stop is None or first + batch_size <= stop:
            return apply_transforms(batch, self.transforms)
        real = max(0, stop - first)
        # Masked before and after the transforms, which may read labels or make them.
        batch = mask_rows(batch, keep=real) if "labels" in batch else batch
        return mask_rows(apply_transforms(batch, self.transforms), keep=real)

    def __len__(self) -> int:
        if self.stop is None:
            raise TypeError("this loader never ends, so it has no length; pass epochs=1 for one.")
        return max(0, -(-(self.stop - self.start) // (self.world * self.batch_sizes[0])))

    def consumed(self, number: int) -> int:
        """Count the rows that all ranks have consumed after ``number`` micro-batches."""
        rows, _ = self.locate(number)
        return rows if self.stop is None else max(self.start, min(rows, self.stop))

    def rows(self, samples: Integers) -> Integers:
        """Return the dataset rows of samples."""
        samples = renumber(samples, self.skips)
        if _is_endless(self.dataset):
            return samples
        return sample_rows(samples, len(self.dataset), self.seed, shuffle=self.shuffle)


@attrs.frozen(eq=False)
class Share:
    """One replica group's micro-batches of a step: sized, lazy, iterable once.

    Attributes:
        first_number: Number of the first one in the step; dropout is seeded by it, so that it does
            not depend on who computes which micro-batch.
        samples: Rows in them, over the group's ranks and without padding; 0 for a surplus group,
            which recomputes another group's micro-batch and contributes nothing.
        whole: Number of micro-batches of the whole step, and rows of each over the group's ranks.
    """

    first_number: int
    samples: int
    whole: tuple[int, int]
    _size: int
    _take: Callable[[], TensorDict]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[TensorDict]:
        return (self._take() for _ in range(self._size))


class _Part(NamedTuple):
    """The part of each step's ``whole`` micro-batches that is taken: ``first`` to ``stop``."""

    first: int
    stop: int
    whole: int

    def number(self, position: int) -> int:
        """Map a position within this part to the micro-batch number, counted over whole steps."""
        steps, within = divmod(position, self.stop - self.first)
        return steps * self.whole + self.first + within


class Loader:
    """One rank's micro-batches, in order; made by ``make_loader``.

    A loader with an end has a length, and each ``for`` starts from its beginning. An endless one
    continues where it stopped. Close it, or use it in ``with``, to stop its workers early.

    Attributes:
        dataset: The dataset that the rows come from.
        sizes: How batch size and length change; None if they do not.
    """

    def __init__(self, batches: MicroBatches, compute: Callable[..., Generator[Any]]) -> None:
        self.dataset, self.sizes = batches.dataset, batches.sizes
        self._batches = batches
        self._compute = compute
        self._reader = Reader()
        self._position = 0  # micro-batches taken since batches.start
        self._loops = 0
        self._part = _Part(0, 1, 1)

    @property
    def wait_seconds(self) -> float:
        """Total time that the consumer has waited for micro-batches."""
        return self._reader.wait_seconds

    @property
    def samples(self) -> int:
        """Rows that all ranks have consumed, without padding, after the last micro-batch."""
        return self._batches.consumed(self._part.number(self._position) - self._part.first)

    @property
    def is_endless(self) -> bool:
        """Whether epochs repeat without end, so that there is no length."""
        return self._batches.stop is None

    def micro_batches(self, global_batch_size: int | None = None) -> int:
        """Count the micro-batches per optimizer step that make a global batch.

        Args:
            global_batch_size: Rows per optimizer step, over all ranks; left out where ``sizes``
                give those of the step that begins at ``samples``.

        Returns:
            ``global_batch_size / (batch_size * world)``.

        Raises:
            ValueError: If that is not a whole number of at least 1, or ``sizes`` change.
        """
        batches, phase = self._batches, 0
        if self.sizes is not None and global_batch_size is None:
            _, phase = batches.locate(self._part.number(self._position))
            global_batch_size = self.sizes.global_batch_sizes[phase]
        elif len(batches.batch_sizes) > 1:
            raise ValueError("this loader's batch size changes: use groups(loader).")
        return count_micro_batches(global_batch_size, batches.batch_sizes[phase], batches.world)  # pyright: ignore[reportArgumentType]

    def seek(self, start: int, skip: Skips = ()) -> None:
        """Continue from another sample, even within a loop, as a rolled-back run does.

        Args:
            start: As in ``make_loader``: ``state.samples``.
            skip: As in ``make_loader``: ``state.skips``.

        Raises:
            ValueError: If ``start`` is negative.
        """
        check_integers(start=(start, 0))
        batches = attrs.evolve(self._batches, start=start, skips=tuple(skip))
        batches.check_start()
        self.close()
        self._batches, self._position = batches, 0

    def share(
        self,
        start: int,
        micro_batches: int,
        index: int = 0,
        participants: int = 1,
        *,
        multiple: int = 1,
        skip: Skips = (),
    ) -> Share:
        """Take a replica group's part of the next step's micro-batches.

        The parts are runs of micro-batches that differ in length by one multiple at most. What is
        read ahead is thrown away where the step or the part is not the one that was expected: when
        a group has come or gone, and after a step that is done again.

        Args:
            start: As in ``make_loader``: ``state.samples``.
            micro_batches: Those of the whole step, ``micro_batches(global_batch_size)``.
            index: Of this group among the participants of the step.
            participants: Their number.
            multiple: Of which every part is a whole number; a pipeline needs several micro-batches.
            skip: As in ``make_loader``: ``state.skips``.

        Raises:
            ValueError: If the loader has an end, there is no such participant, or ``micro_batches``
                is not a multiple.

        Examples:
            >>> import torch
            >>> rows = [TensorDict({"input_ids": torch.tensor([i])}) for i in range(8)]
            >>> loader = make_loader(rows, batch_size=1, shuffle=False)
            >>> [batch["input_ids"].item() for batch in loader.share(0, 4, 1, 3)]
            [1]
            >>> [batch["input_ids"].item() for batch in loader.share(4, 4, 1, 2)]
            [6, 7]
        """
        check_rank(index, participants)
        if not self.is_endless:
            raise ValueError("shares need an endless loader, epochs=None: a step may be repeated.")
        units, rest = divmod(micro_batches, multiple)
        if rest or not units:
            raise ValueError(
                f"micro_batches {micro_batches} must be a multiple of {multiple}; change "
                f"global_batch_size: {nearest_multiples(micro_batches, multiple)}."
            )
        low, high = (g * units // participants * multiple for g in (index, index + 1))
        part = _Part(low, max(high, low + multiple), micro_batches)
        if (start, tuple(skip), part) != (self.samples, self._batches.skips, self._part):
            self.seek(start, skip)
            self._part = part
        _, phase = self._batches.locate(part.number(self._position))
        rows = self._batches.world * self._batches.batch_sizes[phase]
        samples, whole = (high - low) * rows, (micro_batches, rows)
        return Share(low, samples, whole, part.stop - part.first, self._take)

    def locate(self, first: int, stop: int) -> list[tuple[str | None, int]]:
        """Return the dataset row of each sample.

        Args:
            first: The first sample.
            stop: The one after the last.

        Returns:
            For each sample the name of its source, None if there is only one, and its row there.
        """
        rows = self.rows(first, stop)
        order = getattr(self.dataset, "order", None)
        return [(None, row) if order is None else order(row) for row in rows.tolist()]

    def rows(self, first: int, stop: int) -> Integers:
        """Return the dataset rows of samples; those of a mixture are the samples themselves.

        Args:
            first: The first sample.
            stop: The one after the last.

        Returns:
            ``[stop - first]`` int64.
        """
        return self._batches.rows(np.arange(first, stop))

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[TensorDict]:
        if not self.is_endless:
            self.close()
            self._position = 0
            self._loops += 1
        return self._iterate(self._loops)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers. Iterating again starts new ones."""
        self._reader.close()

    def _iterate(self, loop: int) -> Iterator[TensorDict]:
        while self.is_endless or self._position < len(self):
            yield self._take()
            if loop != self._loops:
                raise RuntimeError(
                    "another loop restarted this loader: it has one position; make two loaders."
                )
        self.close()

    def _take(self) -> TensorDict:
        batch = self._reader.take(self._open)
        self._position += 1
        return batch

    def _open(self) -> Generator[Any]:
        at = self._position
        positions = itertools.count(at) if self.is_endless else range(at, len(self))
        return self._compute(self._batches, map(self._part.number, positions))


def _is_endless(dataset: Any) -> bool:
    return getattr(dataset, "is_endless", False)


def _check_sizes(sizes: Sizes, batch_sizes: tuple[int, ...], dataset: Any, world: int) -> None:
    """Raise unless sizes are those of the data, and all ranks can share each of them."""
    for rows, batch_size in zip(sizes.global_batch_sizes, batch_sizes, strict=True):
        count_micro_batches(rows, batch_size, world)
    lengths = {getattr(one, "seq_len", 0) for one in getattr(dataset, "datasets", (dataset,))}
    if lengths != {0} and lengths != set(sizes.seq_lens):
        raise ValueError(
            f"the rows of the data have {sorted(lengths)} positions, and sizes those of "
            f"{sorted(set(sizes.seq_lens))}; make the data by forgekit.data.vary_length."
        )
