"""The oracle sees every fault of a list that trainers have had: errors far above the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from covering import first_of, some_of
from distributed.cells import Found, merge, run_layout
from distributed.compare import check, errors
from distributed.matrix import LAYOUTS, ROUTED, Cell
from ranks import RankError

FAR = 1000
"""How many times over its bound an error has to be."""

SEEN = [
    # The fault, a layout in which it can be, and the error that tells.
    ("divide by micro-batches", "fsdp2", "gradients"),
    ("divide by micro-batches", "pp2-1f1b", "gradients"),
    ("divide by micro-batches in the schedule", "pp2-gpipe", "gradients"),
    ("divide by micro-batches in the schedule", "pp2-zbv", "gradients"),
    ("mean of each micro-batch", "fsdp2", "gradients"),
    ("labels shifted twice", "fsdp2", "gradients"),
    ("average over ranks", "ddp2", "gradients"),
    ("average over ranks", "fsdp2", "gradients"),
    ("average over ranks", "hsdp2x2", "gradients"),
    ("average over ranks", "cp2-ulysses", "gradients"),
    ("forget replicas in the norm", "ddp2", "sgd grad_norm"),
    ("forget replicas in the norm", "hsdp2x2", "sgd moved"),
    ("clip per stage", "pp2-1f1b", "sgd grad_norm"),
    ("clip per stage", "pp2-1f1b", "sgd moved"),
    ("drop the causal offset", "cp2-ring", "gradients"),
    ("drop the causal offset", "cp4-both", "gradients"),
    ("count the shape-inference call", "pp2-1f1b", "gradients"),
    ("count each tensor-parallel rank", "tp2", "gradients"),
]
ROUTED_SEEN = [
    # Of models with experts, in float64.
    ("divide experts by ep", "moe-ep2", "gradients of experts"),
    ("forget to reduce routers", "moe-ep2", "gradients of router"),
    ("average norms", "moe-ep2", "sgd grad_norm"),
    ("count twice", "moe-ep2", "counts"),
    ("count twice", "moe-ep2", "balance"),
    ("halve counts", "moe-ep2", "counts"),
    ("terms times micro-batches", "moe-ep2", "gradients of router"),
    ("terms times micro-batches", "moe-ep2", "gradients of dense"),
    ("rows of slices", "moe-cp2-ring", "gradients of router"),
]


CONTROLS = dict.fromkeys(layout for _, layout, _ in [*SEEN, *ROUTED_SEEN])
AGAIN = "hsdp2x2", "pp2-zbv", "cp4-both", "moe-cp2-ring"
"""Layouts whose faults the default run sees in another one."""
SMALLER = [
    # Faults whose errors are smaller, and how many times over their bound these are at least.
    # The share of replicated norms in the gradient's norm is small.
    ("forget replicas in the norm", "tp2", "fp32", "sgd grad_norm", 50),
    # In bfloat16 a factor of two stands out.
    ("divide by micro-batches", "fsdp2", "bf16", "gradients", 10),
    ("average over ranks", "fsdp2", "bf16", "gradients", 10),
]
CASES = [
    *((fault, layout, "fp32", where, FAR) for fault, layout, where in SEEN),
    *((fault, layout, "fp64", where, FAR) for fault, layout, where in ROUTED_SEEN),
    *SMALLER,
]


def _cell(layout: str, dtype: str) -> Cell:
    micros = (LAYOUTS | ROUTED)[layout].micros[1]
    return Cell(layout, micros, "ragged", False, "none", "logits", dtype, steps=1)


def _plain(layout: str) -> str:
    """The dtype in which a layout is run without a fault."""
    return "fp64" if layout in ROUTED else "fp32"


@cache
def _run(layout: str) -> dict[tuple[str | None, str], tuple[Cell, Sequence[Found]]]:
    """What the ranks of a layout find with each of its faults and without one, in one job."""
    faults = {(fault, dtype): None for fault, name, dtype, *_ in CASES if name == layout}
    jobs = [(None, _plain(layout)), *faults]
    cells = [_cell(layout, dtype) for _, dtype in jobs]
    found = run_layout(cells, [fault for fault, _ in jobs])
    return dict(zip(jobs, zip(cells, found, strict=True), strict=True))


@pytest.mark.parametrize(
    ("fault", "layout", "dtype", "where", "least"),
    first_of([case for case in CASES if case[1] not in AGAIN], CASES),
)
def test_the_oracle_sees_a_fault(fault, layout, dtype, where, least):
    cell, found = _run(layout)[fault, dtype]
    assert errors(cell, merge(found, agree=False))[where] > least


def test_a_loss_that_mixes_the_positions_of_a_slice_is_refused_before_the_oracle_sees_it():
    with pytest.raises(RankError, match="loss_fn is no sum over positions: its sums are"):
        run_layout([_cell("cp2-ring", "fp32")], ["labels shifted twice"])


@pytest.mark.parametrize("layout", some_of(CONTROLS, *AGAIN))
def test_the_oracle_passes_the_step_without_a_fault(layout):
    cell, found = _run(layout)[None, _plain(layout)]
    check(cell, merge(found))
