"""The step on the pretend device in every layout: as on the CPU, and the host waits for nothing.

Some cells run in attention kernels, see ``flash_kernels``; no wait for the bounds of documents.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext

import lab
import pytest
import torch
from covering import first_of
from device.pretend import NAME, watching
from distributed.cells import LaidOut, merge, own_batches, run_cell
from distributed.compare import check
from distributed.matrix import LAYOUTS, Cell
from distributed.models import LOSSES, SCHEDULES
from flash_kernels import flash_kernels
from pool import run_again, run_ranks
from tensordict import TensorDict

import forgekit as fk

SETUP = "device.pretend:install"
KERNELS = {"dtypes": (torch.float64,), "keys": ("CPU", "PrivateUse1")}


def cell(layout, micros, recompute, loss="head", targets="ragged"):
    return Cell(layout, micros, targets, True, recompute, loss, "fp64", steps=2)


CHOSEN = [(cell("tp2", 1, "none"), None), (cell("cp2-ring", 2, "selective"), KERNELS)]
LARGE = [
    (cell("pp2-zbv", 3, "none"), None),
    (cell("ep2", 2, "selective"), None),
    (cell("cp4-both", 2, "none"), KERNELS),
    (cell("tp2", 1, "full"), KERNELS),
    (cell("cp2-ulysses", 2, "none"), KERNELS),
    (cell("pp2-1f1b", 2, "none", "logits"), KERNELS),
    *((cell(n, r.micros[1], "full", targets="rank_without"), None) for n, r in LAYOUTS.items()),
]


def run_and_watch(_rank, _world, cell, kernels=None):
    """What a cell finds; of a later step what the host did and the kernels' calls."""
    with flash_kernels(**kernels) if kernels else nullcontext([]) as calls:
        laid_out = LaidOut(cell, NAME)
        found, state = run_cell(cell, laid_out), laid_out.state("adamw")
        step = fk.make_step(LOSSES[cell.loss], schedule=SCHEDULES["adamw"], max_norm=1.0)
        for _ in range(2):
            batches = [batch.apply(pinned) for batch in own_batches(cell, state.mesh, 0)]
            calls.clear()
            with watching() as ledger:
                state, _ = step(state, batches)
    return found, ledger, Counter(call["kind"] for call in calls), state.layout.attention


def pinned(tensor):
    return tensor.contiguous().pin_memory()


@pytest.mark.parametrize(("cell", "kernels"), first_of(CHOSEN, LARGE), ids=str)
def test_a_layout_gives_what_one_process_gives_and_the_host_waits_for_nothing(cell, kernels):
    world, run = cell.row.world, run_ranks if kernels else run_again
    by_rank = run(run_and_watch, world, cell, kernels, setup=SETUP, timeout_s=200)
    check(cell, merge([found for found, *_ in by_rank]))
    exchanges = cell.row.layers * cell.micros if cell.row.experts else 0
    is_ring = cell.layout in ("cp2-ring", "cp4-both")
    chosen = {"ring": "flash"} if is_ring else {"rows": "sdpa", "documents": "varlen"}
    for _, ledger, calls, attention in by_rank:
        # Ranks that exchange tokens have to know how many will come.
        waits = [wait for wait in ledger.waits if not wait.endswith(" _splits")]
        assert not waits, waits[0]
        assert len(ledger.waits) == exchanges * (2 if cell.recompute != "none" else 1)
        assert ledger.copied["pageable"] == 0
        if kernels:  # selective recomputation keeps what attention gave
            assert attention == chosen
            assert calls["backward"] > 0
            assert calls["forward"] == (1 + (cell.recompute == "full")) * calls["backward"]


SMALL = fk.TransformerSpec(
    vocab_size=8, dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=16, max_seq_len=8
)
ROWS = [
    {"input_ids": torch.arange(6), "labels": torch.arange(6), "doc_ids": torch.tensor(documents)}
    for documents in ([0, 0, 1, 1, 1, 2], [4] * 6, [1, 0, 0, 0, 0, 3], [0, 1, 2, 2, 2, -1])
]


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"], doc_ids=batch["doc_ids"]), batch["labels"])


def load(_rank, _world):
    """A step and an evaluation on what a recipe's loaders have copied ahead."""
    with flash_kernels(**KERNELS) as calls:
        state = lab.lay_out(fk.Transformer(SMALL).double(), device=NAME)
        rows = [TensorDict(row) for row in ROWS]
        step = fk.make_step(loss_fn, schedule=lambda _: 1e-3)
        loader, held_out = fk.train_loader(state, rows, 2), fk.held_out_loader(state, rows, 2)
        for batches in itertools.islice(fk.groups(loader, 2), 2):
            calls.clear()
            with watching() as ledger:
                state, _ = step(state, list(batches))
        trained = Counter(call["kind"] for call in calls)
        calls.clear()
        fk.evaluate(state, held_out, loss_fn)
    assert not ledger.waits, ledger.waits[0]
    assert ledger.copied["pageable"] == 0
    return trained, len(calls)


def test_a_recipes_loaders_note_the_documents_that_they_copy_ahead():
    """Two blocks, two micro-batches."""
    found = run_ranks(load, 1, setup=SETUP)
    assert found == [({"forward": 4, "backward": 4}, 4)]
