"""The table that the oracle walks: layouts, what varies inside each, and which cells are run.

The default run takes rows in which each pair of values of any two factors occurs, of which the
layout is one. So a layout of two ranks takes all pairs of the others, and more where a cell costs
little; one of four or eight takes each value. ``make oracle`` takes the full product.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

__all__ = [
    "FACTORS",
    "LAYOUTS",
    "Cell",
    "Row",
    "default_cells",
    "factors_of",
    "full_cells",
    "pairwise",
]


@attrs.frozen(eq=False)
class Row:
    """A layout.

    Attributes:
        sizes: Mesh dimensions above 1; ``dp_shard`` is 1 if it is not named.
        micros: Numbers of micro-batches: the fewest that are legal and one more.
        steady: Further ones, with which a pipeline is full and which need several rounds; taken
            by the cells in bfloat16 and float64.
        options: Arguments of ``parallelize``.
        layers: Blocks of the model, one for each stage of a pipeline.
        dear: Whether a cell costs much more than others on as many ranks.
        experts: Whether the model's feed-forwards are spread over ``ep``.
    """

    sizes: Mapping[str, int]
    micros: tuple[int, int] = (1, 2)
    steady: tuple[int, int] | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict)
    layers: int = 2
    dear: bool = False
    experts: bool = False

    def size(self, name: str) -> int:
        """Size of a mesh dimension."""
        return self.sizes.get(name, 1)

    @property
    def world(self) -> int:
        """Number of ranks; ``ep`` is a view over others."""
        return math.prod(size for name, size in self.sizes.items() if name != "ep")

    @property
    def data_ranks(self) -> int:
        """Ranks that see different rows."""
        return self.size("dp_replicate") * self.size("dp_shard")


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on a rank; the others have two."""


def _pipeline(ranks: int, schedule: str) -> Row:
    fewest = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    return Row(
        {"pp": ranks},
        micros=(fewest, fewest + 1),
        steady=(ranks + 1, 2 * ranks) if fewest == 1 else None,
        options={"pipeline_schedule": schedule},
        layers=ranks if schedule in SINGLE else 2 * ranks,
        dear=schedule in ("interleaved_1f1b", "dualpipev"),
    )


def _context(method: str) -> dict[str, str]:
    return {"context_parallel": method}


EXPERTS_PLAN = {"layers.*.feed_forward.experts": "expert"}
LAYOUTS: dict[str, Row] = {
    "ddp2": Row({"dp_replicate": 2}),
    "fsdp2": Row({"dp_shard": 2}),
    "fsdp4": Row({"dp_shard": 4}),
    "hsdp2x2": Row({"dp_replicate": 2, "dp_shard": 2}),
    "tp2": Row({"tp": 2}, dear=True),
    "tp2-fsdp2": Row({"dp_shard": 2, "tp": 2}),
    "cp2-ring": Row({"cp": 2}, options=_context("ring")),
    "cp2-ulysses": Row({"cp": 2}, options=_context("ulysses"), dear=True),
    "cp4-both": Row({"cp": 4}, options=_context("both")),
    **{f"pp2-{name}": _pipeline(2, name) for name in SCHEDULES},
    **{f"pp4-{name}": _pipeline(4, name) for name in SCHEDULES},
    "pp2-fsdp2": Row({"pp": 2, "dp_shard": 2}, (2, 3)),
    "pp2-tp2": Row({"pp": 2, "tp": 2}, (2, 3)),
    "pp2-cp2": Row({"pp": 2, "cp": 2}, (2, 3)),
    "fsdp2-tp2-cp2": Row({"dp_shard": 2, "cp": 2, "tp": 2}, dear=True),
    "fsdp2-tp2-pp2": Row({"pp": 2, "dp_shard": 2, "tp": 2}, (2, 3), dear=True),
    "ep2": Row({"dp_shard": 2, "ep": 2}, options={"plan": EXPERTS_PLAN}, dear=True, experts=True),
    "ep2-fsdp2": Row({"dp_shard": 4, "ep": 2}, options={"plan": EXPERTS_PLAN}, experts=True),
}

FACTORS: dict[str, tuple[Any, ...]] = {
    "targets": ("ragged", "rank_without"),
    "packed": (False, True),
    "recompute": ("none", "full", "selective"),
    "loss": ("logits", "head"),
}


@attrs.frozen
class Cell:
    """One layout with one value of each factor; ``micros`` is the number of micro-batches."""

    layout: str
    micros: int
    targets: str
    packed: bool
    recompute: str
    loss: str
    dtype: str = "fp32"

    @property
    def row(self) -> Row:
        """The layout's row."""
        return LAYOUTS[self.layout]

    def __str__(self) -> str:
        packed = "packed" if self.packed else "rows"
        parts = (self.micros, self.targets, packed, self.recompute, self.loss, self.dtype)
        return "-".join((self.layout, *map(str, parts)))


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Rows in which every pair of values of any two factors occurs, few and deterministic.

    Greedy from several shuffles; ends early at the least possible number, the product of the two
    largest factors.

    Examples:
        >>> len(pairwise({"a": (0, 1), "b": (0, 1), "c": (0, 1)}, seed=0))
        4
    """
    generator = random.Random(seed)
    rows = [dict(zip(factors, values, strict=True)) for values in _product(factors)]
    least = math.prod(sorted(map(len, factors.values()))[-2:])
    best = rows
    for _ in range(300):
        generator.shuffle(rows)
        best = min(best, _greedy(rows), key=len)
        if len(best) == least:
            break
    return best


def _greedy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = [frozenset(itertools.combinations(row.items(), 2)) for row in rows]
    left = set().union(*pairs)
    chosen = []
    while left:
        index = max(range(len(rows)), key=lambda i: len(pairs[i] & left))
        chosen.append(rows[index])
        left -= pairs[index]
    return chosen


def default_cells(layouts: Sequence[str]) -> list[Cell]:
    """A covering choice in float32 and, along a diagonal, cells in bfloat16 and float64."""
    cells = []
    for index, layout in enumerate(layouts):
        is_small, is_dear = LAYOUTS[layout].world == 2, LAYOUTS[layout].dear
        choose = _covering if not is_small else pairwise if is_dear else _pairwise_and_more
        rows = choose(factors_of(layout), seed=index)
        cells += [Cell(layout, **row) for row in rows]
        steady = LAYOUTS[layout].steady or LAYOUTS[layout].micros
        for number, dtype in enumerate(("bf16", "fp64")):
            if is_small or (index % 2 == number and not is_dear):
                row = rows[(index + number) % len(rows)]
                cells.append(Cell(layout, **row | {"micros": steady[number]}, dtype=dtype))
    return cells


def _pairwise_and_more(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Pairwise rows, and more than as many others."""
    rows = pairwise(factors, seed)
    others = [dict(zip(factors, values, strict=True)) for values in _product(factors)]
    others = [row for row in others if row not in rows]
    return rows + random.Random(seed).sample(others, len(rows) + 1)


def _covering(factors: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """The fewest rows in which each value of each factor occurs."""
    generator, count = random.Random(seed), max(map(len, factors.values()))
    columns = [
        generator.sample([values[i % len(values)] for i in range(count)], count)
        for values in factors.values()
    ]
    return [dict(zip(factors, row, strict=True)) for row in zip(*columns, strict=True)]


def _product(factors: Mapping[str, Sequence[Any]]) -> itertools.product[tuple[Any, ...]]:
    return itertools.product(*factors.values())


def full_cells(layouts: Sequence[str]) -> list[Cell]:
    """Every combination in float32."""
    return [Cell(layout, *values) for layout in layouts for values in _product(factors_of(layout))]


def factors_of(layout: str) -> dict[str, tuple[Any, ...]]:
    """What varies inside a layout."""
    return {"micros": LAYOUTS[layout].micros, **FACTORS}
