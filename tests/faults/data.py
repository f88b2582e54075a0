"""Samples that are lost, read twice, or read by the wrong rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from faults.planting import value
from faults.table import Check, Fault
from tensordict import TensorDict

import forgekit as fk

ROWS, SIZE, SEED = 23, 3, 7
USER: dict[str, Any] = {
    "rank": lambda rank, world: (rank, world),
    "seed": lambda rank: SEED,
    "resume": lambda samples: samples,
    "stream": iter,
    "weights": lambda: {"a": 3, "b": 1},
}


class Rows:
    """A row for each number below ``n``, which stands in it."""

    def __init__(self, n: int, first: int = 0) -> None:
        self.n, self.first = n, first
        self.fingerprint = {"rows": n}

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> TensorDict:
        ids = torch.full((3,), self.first + row)
        return TensorDict({"input_ids": ids, "labels": ids.clone(), "doc_ids": ids * 0})


def _read(
    dataset: Any, rank: int, world: int, start: int, count: int | None, **options: Any
) -> tuple[Any, int]:
    """Rows with a target that a rank reads, and where the next run goes on."""
    own, ranks = USER["rank"](rank, world)
    options |= {"seed": USER["seed"](rank), "start": start, "rank": own, "world": ranks}
    loader = fk.make_loader(dataset, **options)
    rows = []
    for batch in itertools.islice(USER["stream"](loader), count):
        has_target = (batch["labels"] != -100).any(1)
        rows += batch["input_ids"][has_target, 0].tolist()
    return rows, loader.samples


def _epoch(rank: int, world: int) -> list[int]:
    """One epoch in two runs, with a stop between them."""
    options = {"batch_size": SIZE, "epochs": 1}
    before, samples = _read(Rows(ROWS), rank, world, 0, 2, **options)
    after, _ = _read(Rows(ROWS), rank, world, USER["resume"](samples), None, **options)
    return before + after


def _judge_epoch(by_rank: Sequence[list[int]]) -> str:
    """Which rows were lost and which were read more than once."""
    rows = sorted(itertools.chain(*by_rank))
    lost = sorted(set(range(ROWS)) - set(rows))
    again = sorted({row for row in rows if rows.count(row) > 1})
    said = [f"lost: {lost}"] * bool(lost) + [f"read again: {again}"] * bool(again)
    return ", ".join(said)


def _mixture(rank: int, world: int) -> list[int]:
    """A block of 16,384 rows of two sources, 3 of the one to 1 of the other."""
    sources = {"a": Rows(200), "b": Rows(200, first=1000)}
    order = fk.make_order(
        {name: len(rows) for name, rows in sources.items()}, USER["weights"](), seed=1
    )
    return _read(fk.mixture_dataset(sources, order), rank, world, 0, 128, batch_size=64)[0]


def _judge_mixture(by_rank: Sequence[list[int]]) -> str:
    rows = list(itertools.chain(*by_rank))
    share = sum(row >= 1000 for row in rows) / len(rows)
    return "" if abs(share - 0.25) < 0.0005 else f"the share of b is {share:.3f}"


def _padding_trains(loader: Any) -> Any:
    for batch in loader:
        yield batch.copy().update({"labels": batch["input_ids"]})


def _doubled(loader: Any) -> Any:
    return (batch for batch in loader for _ in range(2))


CHECKS = {
    "epoch": Check(measure=_epoch, judge=_judge_epoch),
    "mixture": Check(measure=_mixture, judge=_judge_mixture),
}
EPOCH = "epoch"
RESUME, STREAM = partial(value, USER, "resume"), partial(value, USER, "stream")
ONE_RANK, OWN_SEED = value(USER, "rank", lambda *_: (0, 1)), value(USER, "seed", lambda rank: rank)
DROPS = STREAM(lambda loader: itertools.islice(loader, 1, None))
HALF, FURTHER = RESUME(lambda samples: samples // 2), RESUME(lambda samples: samples + 2 * SIZE)
OTHER = value(USER, "weights", lambda: {"a": 2, "b": 1})
FAULTS = [
    Fault("a resume from the start", EPOCH, RESUME(lambda _: 0), "^read again"),
    Fault("a resume that counts one rank's rows", EPOCH, HALF, "read again"),
    Fault("a resume one micro-batch further", EPOCH, FURTHER, "^lost"),
    Fault("ranks that read the same", EPOCH, ONE_RANK, "read again"),
    Fault("a shuffle for each rank", EPOCH, OWN_SEED, "^lost.*again"),
    Fault("a loader that repeats", EPOCH, STREAM(_doubled), "read again"),
    Fault("a loader that drops", EPOCH, DROPS, "^lost"),
    Fault("padding with labels", EPOCH, STREAM(_padding_trains), "read again"),
    Fault("other weights", "mixture", OTHER, "share of b"),
]
