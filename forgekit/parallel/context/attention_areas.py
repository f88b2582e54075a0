"""Plan of ring attention: the query-key areas of each step, before anything is computed.

A rank holds a zigzag slice: chunk ``rank`` of a sequence split in twice as many chunks as ranks,
and its mirror image from the back. Of an earlier rank's slice it sees the front chunk, from all its
positions; of a later rank's slice both chunks, from its back chunk. So each step but the first is
two whole pairs of chunks, and all ranks always have as much to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
from torch import Tensor

from forgekit.model.attention_kernels import Kernel
from forgekit.parallel.context.block_attention import Ids, has_flash

MOST_SCORES = 2**23
"""Maximum number of query-key pairs, over all heads, whose scores or mask are held at once."""

LEAST_QUERIES = 64


@attrs.frozen
class Area:
    """A rectangle of queries and keys that one call computes.

    Attributes:
        queries: Positions within this rank's slice.
        keys: Positions within the slice that came round.
        offset: Position of the first query among the keys, where a query sees those up to its own;
            None where it sees all.
        rows: Rows of the batch.
    """

    queries: slice
    keys: slice
    offset: int | None = None
    rows: slice = slice(None)


def areas_seen(rank: int, source: int, positions: int) -> list[Area]:
    """Return the areas of a slice that a rank attends to, documents aside: full or causal chunks.

    Args:
        rank: The rank that attends.
        source: The rank whose slice it is.
        positions: Positions of a slice, even.

    Examples:
        >>> [(a.queries.start, a.keys.start, a.offset) for a in areas_seen(1, 1, positions=8)]
        [(0, 0, 0), (4, 4, 0), (4, 0, None)]
        >>> [(a.queries.start, a.keys.start, a.offset) for a in areas_seen(1, 0, positions=8)]
        [(0, 0, None), (4, 0, None)]
        >>> [(a.queries.start, a.keys.start, a.offset) for a in areas_seen(0, 1, positions=8)]
        [(4, 0, None), (4, 4, None)]
    """
    # Two ranks, chunks 0 to 3 (rank 0 holds 0 and 3, rank 1 holds 1 and 2); o causal, # whole:
    #     keys       0 3   1 2
    #     queries 0  o .   . .     from rank 1's slice rank 0 sees all, from its back chunk
    #             3  # o   # #
    #             1  # .   o .     from rank 0's slice rank 1 sees the front chunk
    #             2  # .   # o
    front, back = slice(0, positions // 2), slice(positions // 2, positions)
    if source == rank:
        # Each position sees itself first, so no sum of exponentials is ever zero.
        return [Area(front, front, offset=0), Area(back, back, offset=0), Area(back, front)]
    if source < rank:
        return [Area(front, front), Area(back, front)]
    return [Area(back, front), Area(back, back)]


def areas_of_queries(area: Area, rows: int, heads: int) -> list[Area]:
    """Split an area into blocks of queries, to bound the memory of scores.

    Args:
        area: What is seen, documents aside.
        rows: Rows of the batch, ``b``.
        heads: Query heads, ``h``.

    Returns:
        Areas of at least ``LEAST_QUERIES`` queries, without the keys that come after all of them.
    """
    first, last = area.queries.start, area.queries.stop
    # Few queries against all keys: memory is bounded, and each block is still one matmul.
    keys = area.keys.stop - area.keys.start
    step = max(LEAST_QUERIES, MOST_SCORES // (rows * heads * keys))
    blocks = []
    for start in range(first, last, step):
        stop = min(start + step, last)
        queries, keys, offset = slice(start, stop), area.keys, None
        if area.offset is not None:
            offset = area.offset + start - first
            keys = slice(keys.start, keys.start + offset + stop - start)
        blocks.append(Area(queries, keys, offset))
    return blocks


def areas_of_documents(area: Area, queries: Tensor, keys: Tensor) -> list[Area]:
    """Split an area by documents: one rectangle for each that queries and keys share.

    Two chunks without a common document have no area.

    Args:
        area: What is seen, documents aside.
        queries: ``[b s]`` documents of this rank's slice, on the CPU.
        keys: ``[b s]`` documents of the slice that came round, on the CPU.
    """
    rows = zip(queries.numpy(), keys.numpy(), strict=True)
    return [part for row, (q, k) in enumerate(rows) for part in _shared_runs(area, row, q, k)]


def areas_of_step(
    rank: int, size: int, ids: Tensor | None, kernel: Kernel, q: Tensor, step: int
) -> list[tuple[Area, Ids | None]]:
    """Return the areas that a rank computes in a step, with the slice of ``step`` ranks before.

    Args:
        rank: This rank.
        size: Ranks in the ring.
        ids: ``[b size*s]`` documents of all slices, on the CPU for ``"flash"``; None for one
            document a row.
        kernel: What computes an area.
        q: ``[b h s c]`` queries.
        step: The step.

    Returns:
        Areas, and the document ids of their queries and keys where those need a mask.
    """
    (rows, heads, positions, _), source = q.shape, (rank - step) % size
    seen = areas_seen(rank, source, positions)
    slices = None if ids is None else ids.chunk(size, 1)
    if kernel == "flash":  # the kernel holds no scores and takes a whole area of one document
        if slices is not None:
            split = (areas_of_documents(area, slices[rank], slices[source]) for area in seen)
            seen = itertools.chain.from_iterable(split)
        return [(area, None) for area in seen]
    if slices is None and has_flash(q):
        return [(area, None) for area in seen]
    blocks = [block for area in seen for block in areas_of_queries(area, rows, heads)]
    if slices is None:
        return [(block, None) for block in blocks]
    return [(b, (slices[rank][:, b.queries], slices[source][:, b.keys])) for b in blocks]


def _shared_runs(
    area: Area, row: int, queries: np.ndarray[Any, Any], keys: np.ndarray[Any, Any]
) -> list[Area]:
    rows = slice(row, row + 1)
    by_document: dict[int, list[slice]] = {}
    for document, run in _runs(keys, area.keys):
        by_document.setdefault(document, []).append(run)
    shared = []
    for document, run in _runs(queries, area.queries):
        for seen in by_document.get(document, ()):
            # In a causal square a run attends to all of earlier runs, and causally to itself.
            if area.offset is None or seen.start < run.start:
                shared.append(Area(run, seen, rows=rows))
            elif seen == run:
                shared.append(Area(run, seen, offset=0, rows=rows))
    return shared


def _runs(ids: np.ndarray[Any, Any], where: slice) -> Iterator[tuple[int, slice]]:
    """Yield runs of equal ids, with their positions."""
    ids = ids[where]
    starts = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
    for start, stop in itertools.pairwise(starts):
        yield int(ids[start]), slice(where.start + start, where.start + stop)
