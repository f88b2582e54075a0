"""The oracle sees every fault of a list that trainers have had: errors far above the bounds."""

from __future__ import annotations

import pytest
from distributed.cells import merge, run_layout
from distributed.compare import check, errors
from distributed.matrix import LAYOUTS, Cell
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


def _cell(layout: str, dtype: str = "fp32") -> Cell:
    return Cell(layout, LAYOUTS[layout].micros[1], "ragged", False, "none", "logits", dtype)


def _errors(cell: Cell, mutation: str | None) -> dict[str, float]:
    return errors(cell, merge(run_layout([cell], mutation)[0], agree=False))


@pytest.mark.parametrize(("mutation", "layout", "where"), SEEN)
def test_the_oracle_sees_a_fault(mutation, layout, where):
    assert _errors(_cell(layout), mutation)[where] > FAR


def test_a_loss_that_mixes_the_positions_of_a_slice_is_refused_before_the_oracle_sees_it():
    with pytest.raises(RankError, match="the loss at a position depends on other positions"):
        _errors(_cell("cp2-ring"), "labels shifted twice")


def test_the_oracle_sees_that_replicated_norms_are_counted_twice():
    """Their share of the gradient's norm is small, so the error is."""
    assert _errors(_cell("tp2"), "forget replicas in the norm")["sgd grad_norm"] > 50


@pytest.mark.parametrize("mutation", ["divide by micro-batches", "average over ranks"])
def test_a_factor_of_two_stands_out_in_bfloat16(mutation):
    assert _errors(_cell("fsdp2", "bf16"), mutation)["gradients"] > 10


@pytest.mark.parametrize("layout", dict.fromkeys(layout for _, layout, _ in SEEN))
def test_the_oracle_passes_the_step_without_a_fault(layout):
    cell = _cell(layout)
    check(cell, merge(run_layout([cell])[0]))
