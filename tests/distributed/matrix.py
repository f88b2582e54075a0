"""The table that the oracle walks: layouts, what varies inside each, and which cells are run.

The default run takes a cell of two steps for each cheap layout, among which each mesh dimension
meets each value of each factor, in float32 and in float64; a few are in bfloat16 too. Layouts of
eight ranks and most of those of four are left to ``make oracle``, which takes the full product,
five steps of each cell.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import attrs


@attrs.frozen(eq=False)
class Row:
    """A layout.

    Attributes:
        sizes: Mesh dimensions above 1; ``dp_shard`` is 1 if it is not named.
        micros: Numbers of micro-batches: the fewest that are legal, and more;
            with those a pipeline is full.
        options: Arguments of ``parallelize``.
        layers: Blocks of the model, one for each stage of a pipeline.
        experts: Whether the model's feed-forwards are spread over ``ep``.
        routed: Whether the model has the library's own layers of experts.
    """

    sizes: Mapping[str, int]
    micros: tuple[int, int] = (1, 2)
    options: Mapping[str, Any] = attrs.field(factory=dict)
    layers: int = 2
    experts: bool = False
    routed: bool = False

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


WIDTHS = ("fp32", "fp64")
"""What the cells of the default run compute in."""
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
SINGLE = ("gpipe", "1f1b")
"""Schedules with one stage on a rank; the others have two."""


def _pipeline(ranks: int, schedule: str) -> Row:
    fewest = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    micros, options = (fewest, max(2 * ranks, fewest + 1)), {"pipeline_schedule": schedule}
    return Row({"pp": ranks}, micros, options, layers=ranks * (1 if schedule in SINGLE else 2))


def _context(ranks: int, method: str) -> Row:
    return Row({"cp": ranks}, options={"context_parallel": method})


def _experts(ranks: int) -> Row:
    plan = {"layers.*.feed_forward.experts": "expert"}
    return Row({"dp_shard": ranks, "ep": 2}, options={"plan": plan}, experts=True)


LAYOUTS: dict[str, Row] = {
    "ddp2": Row({"dp_replicate": 2}),
    "fsdp2": Row({"dp_shard": 2}),
    "fsdp4": Row({"dp_shard": 4}),
    "hsdp2x2": Row({"dp_replicate": 2, "dp_shard": 2}),
    "tp2": Row({"tp": 2}),
    "tp2-fsdp2": Row({"dp_shard": 2, "tp": 2}),
    "cp2-ring": _context(2, "ring"),
    "cp2-ulysses": _context(2, "ulysses"),
    "cp4-both": _context(4, "both"),
    **{f"pp2-{name}": _pipeline(2, name) for name in SCHEDULES},
    **{f"pp4-{name}": _pipeline(4, name) for name in SCHEDULES},
    "pp2-fsdp2": Row({"pp": 2, "dp_shard": 2}, (2, 3)),
    "pp2-tp2": Row({"pp": 2, "tp": 2}, (2, 3)),
    "pp2-cp2": Row({"pp": 2, "cp": 2}, (2, 3)),
    "fsdp2-tp2-cp2": Row({"dp_shard": 2, "cp": 2, "tp": 2}),
    "fsdp2-tp2-pp2": Row({"pp": 2, "dp_shard": 2, "tp": 2}, (2, 3)),
    "ep2": _experts(2),
    "ep2-fsdp2": _experts(4),
}

BROAD = ("fsdp2-tp2-cp2", "fsdp2-tp2-pp2")
"""Layouts of eight ranks: the default run has one cell of each, in which all factors differ."""
LONG = {"fsdp4", "ep2-fsdp2"} | {f"pp4-{name}" for name in SCHEDULES if name != "1f1b"}
"""Layouts of which the default run has no cell; each of their dimensions has some."""
ROUGH = ("fsdp2", "tp2", "cp2-ring", "pp2-zbv")
"""Layouts that compute in bfloat16 too."""
SEED = 3987
"""With which each mesh dimension meets each value of each factor: `test_matrix.py`."""


def _routed(sizes: Mapping[str, int], micros: tuple[int, int] = (1, 3), **options: Any) -> Row:
    return Row(sizes, micros, options=options, layers=4, routed=True)


def _schedule(name: str) -> Row:
    micros = {"1f1b": (2, 3), "dualpipev": (4, 5)}.get(name, (1, 3))  # some cannot run a single one
    return _routed({"pp": 2}, micros, pipeline_schedule=name)


ROUTED: dict[str, Row] = {
    "moe-fsdp2": _routed({"dp_shard": 2}),
    "moe-ep2": _routed({"dp_shard": 2, "ep": 2}),
    "moe-ep4": _routed({"dp_shard": 4, "ep": 4}),
    "moe-ep2-fsdp2": _routed({"dp_shard": 4, "ep": 2}),
    "moe-ep2-ddp2": _routed({"dp_replicate": 2, "dp_shard": 2, "ep": 2}),
    "moe-tp2": _routed({"tp": 2}),
    "moe-ep2-tp2": _routed({"dp_shard": 2, "tp": 2, "ep": 2}),
    "moe-cp2-ring": _routed({"cp": 2}, context_parallel="ring"),
    "moe-cp2-ulysses": _routed({"cp": 2}, context_parallel="ulysses"),
    "moe-cp4-both": _routed({"cp": 4}, context_parallel="both"),
    "moe-cp2-ep2": _routed({"cp": 2, "ep": 2}),
    "moe-cp2-fsdp2-ep2": _routed({"dp_shard": 2, "cp": 2, "ep": 2}),
    **{f"moe-pp2-{name}": _schedule(name) for name in SCHEDULES},
    "moe-pp2-fsdp2": _routed({"pp": 2, "dp_shard": 2}, (2, 3)),
    "moe-pp2-ep2": _routed({"pp": 2, "dp_shard": 2, "ep": 2}, (2, 3)),
    "moe-pp2-cp2": _routed({"pp": 2, "cp": 2}, (2, 3)),
}
"""Layouts of models with ``MoESpec``, in float64: rounding could send a token to another expert."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "targets": ("ragged", "rank_without"),
    "packed": (False, True),
    "recompute": ("none", "full", "selective"),
    "loss": ("logits", "head"),
}


@attrs.frozen
class Cell:
    """One layout with one value of each factor; ``micros`` is the number of micro-batches.

    ``steps`` of each optimizer are compared. On eight ranks most of the time goes into what DTensor
    finds out once about each operation, those of an optimizer too.
    """

    layout: str
    micros: int
    targets: str
    packed: bool
    recompute: str
    loss: str
    dtype: str = "fp32"
    steps: int = 5
    optimizers: tuple[str, ...] = ("sgd", "adamw")

    @property
    def row(self) -> Row:
        """The layout's row."""
        return (LAYOUTS | ROUTED)[self.layout]

    def __str__(self) -> str:
        packed = "packed" if self.packed else "rows"
        parts = (self.micros, self.targets, packed, self.recompute, self.loss, self.dtype)
        return "-".join((self.layout, *map(str, parts)))


def default_cells() -> list[Cell]:
    """The cells of the default run: combinations that are drawn, so that they differ."""
    layouts = [*(name for name in LAYOUTS if name not in LONG and name not in BROAD), *ROUGH]
    every = list(itertools.product((0, 1), *FACTORS.values(), WIDTHS))
    cells = []
    for layout, row in zip(layouts, random.Random(SEED).sample(every, len(layouts)), strict=True):
        which, *values = row
        cells.append(Cell(layout, LAYOUTS[layout].micros[which], *values, steps=2))
    for name in BROAD:
        most = LAYOUTS[name].micros[1]
        values = name, most, "rank_without", True, "selective", "head"
        cells.insert(0, Cell(*values, steps=2, optimizers=("sgd",)))
    return [*cells[: -len(ROUGH)], *(attrs.evolve(c, dtype="bf16") for c in cells[-len(ROUGH) :])]


def some_cells(layout: str) -> list[Cell]:
    """The fewest cells of a layout in which each value of each factor occurs."""
    return [Cell(layout, *row) for row in _covering(LAYOUTS[layout], seed=0)]


def _covering(row: Row, seed: int) -> list[tuple[Any, ...]]:
    """The fewest rows in which each value of each factor occurs."""
    factors = (row.micros, *FACTORS.values())
    generator, count = random.Random(seed), max(map(len, factors))
    columns = ([values[i % len(values)] for i in range(count)] for values in factors)
    return list(zip(*(generator.sample(column, count) for column in columns), strict=True))


def full_cells() -> list[Cell]:
    """Every combination in float32."""
    return [
        Cell(layout, *values)
        for layout, row in LAYOUTS.items()
        for values in itertools.product(row.micros, *FACTORS.values())
    ]


def routed_cells() -> list[Cell]:
    """The fewest cells of each layout with experts in which each value of each factor occurs."""
    return [
        Cell(layout, *values, dtype="fp64")
        for index, (layout, row) in enumerate(ROUTED.items())
        for values in _covering(row, seed=index)
    ]


def routed_default() -> list[Cell]:
    """A few cheap cells with experts, for the default run."""
    return [
        Cell("moe-ep2", 3, "rank_without", True, "full", "head", "fp64", 2),
        Cell("moe-pp2-interleaved_zero_bubble", 3, "ragged", True, "none", "logits", "fp64", 2),
    ]
