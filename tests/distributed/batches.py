"""The global batches of a cell: the same samples whatever the layout, made on every process."""

from __future__ import annotations

import torch
from distributed.matrix import Row
from tensordict import TensorDict
from torch import Tensor

VOCABULARY = 40
ROWS = 2
LENGTHS = (16, 8, 24)
"""Places of the micro-batches in turn; what the layouts of the table need divides them."""


def global_batch(row: Row, micros: int, targets: str, packed: bool, step: int) -> list[TensorDict]:
    """The micro-batches of a step; the one of data rank ``r`` at turn ``m`` is ``m * ranks + r``.

    Args:
        row: The layout; pipelines get micro-batches of one length.
        micros: Micro-batches on each data rank.
        targets: ``"ragged"``: each micro-batch has another share of targets; ``"rank_without"``:
            besides, the last data rank has none. With one data rank it is the last of the ranks
            that share a sequence, else the last micro-batch, else the second half of the places.
        packed: Whether rows hold several documents.
        step: Each step has a batch of its own.
    """
    generator = torch.Generator().manual_seed(1000 * step + 2 * micros + packed)
    batches = []
    for index in range(micros * row.data_ranks):
        micro, rank = divmod(index, row.data_ranks)
        places = LENGTHS[0] if row.size("pp") > 1 else LENGTHS[micro % len(LENGTHS)]
        batch = _micro_batch(places, packed, generator)
        dropped = _draw(10, (ROWS, places), generator) < 2 + (micro + 2 * rank) % 5
        batch["labels"][dropped] = -100
        if targets == "rank_without":
            batch["labels"][:, _without(row, micro, micros, rank, places)] = -100
        batches.append(batch)
    return batches


def _micro_batch(places: int, packed: bool, generator: torch.Generator) -> TensorDict:
    ids = _draw(VOCABULARY, (ROWS, places + 1), generator)
    batch = {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
    if packed:
        batch |= _documents(places, batch["labels"], generator)
    return TensorDict(batch, [ROWS])


def _documents(places: int, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Document and position of each place, labels cut accordingly; padding ends the second row."""
    starts = _draw(4, (ROWS, places), generator) == 0
    starts[:, 0] = True
    documents = starts.long().cumsum(1) - 1
    place = torch.arange(places).expand(ROWS, places)
    positions = place - torch.where(starts, place, 0).cummax(1).values
    labels[:, :-1][starts[:, 1:]] = -100  # the next place belongs to another document
    documents[1, -3:], labels[1, -4:] = -1, -100
    return {"doc_ids": documents, "position_ids": positions}


def _without(row: Row, micro: int, micros: int, rank: int, places: int) -> slice:
    """The places of a micro-batch that get no target."""
    nothing, everything = slice(0), slice(None)
    if row.data_ranks > 1:
        return everything if rank == row.data_ranks - 1 else nothing
    if row.size("cp") > 1:
        return _last_places(row, places)
    if micros > 1:
        return everything if micro == micros - 1 else nothing
    return slice(places // 2, None)


def _last_places(row: Row, places: int) -> slice:
    """What the last of the ranks that share a sequence holds, read from the picture of slices.

    Ulysses cuts the places evenly. A ring of n cuts 2n chunks and gives rank r the chunks r and
    2n-1-r, so the last one has the two in the middle. Both together, on 2 x 2: the second of these.
    """
    middle, quarter = places // 2, places // 4
    return {
        "ulysses": slice(middle, None),
        "ring": slice(middle - quarter, middle + quarter),
        "both": slice(middle, middle + quarter),
    }[row.options.get("context_parallel", "ring")]


def _draw(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, high, shape, generator=generator)
