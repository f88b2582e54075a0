"""The oracle sees every fault of a list that trainers have had: errors far above the bounds."""

from __future__ import annotations

import pytest
from distributed.cells import merge, run_layout
from distributed.compare import check, errors
from distributed.matrix import LAYOUTS, Cell

FAR = 1000
"""How many times over its bound an error has to be."""

SEEN = [
    # The fault, a layout in which it can be, and the error that tells.
    ("divide by micro-batches", "fsdp2", "gradients"),
    ("mean of each micro-batch", "fsdp2", "gradients"),
    ("labels shifted twice", "fsdp2", "gradients"),
    ("average over ranks", "ddp2", "gradients"),
    ("average over ranks", "fsdp2", "gradients"),
    ("average over ranks", "hsdp2x2", "gradients"),
    ("forget replicas in the norm", "ddp2", "sgd grad_norm"),
    ("forget replicas in the norm", "hsdp2x2", "sgd moved"),
]


def _cell(layout: str) -> Cell:
    return Cell(layout, LAYOUTS[layout].micros[1], "ragged", False, "none", "logits")


@pytest.mark.parametrize(("mutation", "layout", "where"), SEEN)
def test_the_oracle_sees_a_fault(mutation, layout, where):
    cell = _cell(layout)
    found = merge(run_layout([cell], mutation)[0], agree=False)
    assert errors(cell, found)[where] > FAR


@pytest.mark.parametrize("layout", dict.fromkeys(layout for _, layout, _ in SEEN))
def test_the_oracle_passes_the_step_without_a_fault(layout):
    cell = _cell(layout)
    check(cell, merge(run_layout([cell])[0]))
