"""Attention kernels on the pretend device: as one process on the CPU, and no wait for bounds."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from covering import some_of
from device.pretend import NAME, watching
from device.test_layouts import SETUP, pinned
from distributed.cells import LaidOut, lay_out, merge, own_batches, run_cell
from distributed.compare import check
from distributed.matrix import Cell
from distributed.models import LOSSES, SCHEDULES
from flash_kernels import flash_kernels
from pool import run_ranks
from tensordict import TensorDict

import forgekit as fk

KERNELS = {"dtypes": (torch.float64,), "keys": ("CPU", "PrivateUse1")}
CELLS = [
    Cell("cp2-ring", 2, "ragged", True, "selective", "head", "fp64", steps=2),
    Cell("tp2", 1, "ragged", True, "full", "head", "fp64", steps=2),
    Cell("cp2-ulysses", 2, "ragged", True, "none", "head", "fp64", steps=2),
    Cell("pp2-1f1b", 2, "ragged", True, "none", "logits", "fp64", steps=2),
]


def run_with_kernels(rank, world, cell):
    """What a cell finds, and calls of the kernels, waits and kernels' names of a later step."""
    with flash_kernels(**KERNELS) as calls:
        mesh = fk.build_mesh(fk.MeshSpec(**{"dp_shard": 1, **cell.row.sizes}), device=NAME)
        laid_out = LaidOut(lay_out(cell, mesh), mesh)
        found, state = run_cell(cell, laid_out), laid_out.state("adamw")
        step = fk.make_step(LOSSES[cell.loss], schedule=SCHEDULES["adamw"], max_norm=1.0)
        for _ in range(2):
            batches = list(pinned(own_batches(cell, mesh, 0)))
            calls.clear()
            with watching() as ledger:
                state, _ = step(state, batches)
    return found, Counter(call["kind"] for call in calls), ledger, state.layout.attention


@pytest.mark.parametrize("cell", some_of(CELLS, *CELLS[1:]), ids=str)
def test_a_kernel_gives_what_one_process_gives_and_the_host_waits_for_nothing(cell):
    by_rank = run_ranks(run_with_kernels, cell.row.world, cell, setup=SETUP, timeout_s=200)
    check(cell, merge([found for found, *_ in by_rank]))
    whole_rows = {"rows": "sdpa", "documents": "varlen"}
    again = cell.recompute == "full"  # selective recomputation keeps what attention gave
    for _, calls, ledger, attention in by_rank:
        assert attention == ({"ring": "flash"} if "ring" in cell.layout else whole_rows)
        assert calls["backward"] > 0
        assert calls["forward"] == (1 + again) * calls["backward"]
        assert not ledger.waits, ledger.waits[0]
        assert ledger.copied["pageable"] == 0


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
    """A step and an evaluation on what a recipe's loaders have copied ahead, and a plain loop."""
    with flash_kernels(**KERNELS) as calls:
        mesh = fk.build_mesh(device=NAME)
        model = fk.parallelize(fk.Transformer(SMALL).double(), mesh)
        state = fk.TrainState.create(model, fk.adamw(model), mesh=mesh)
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
        documents = state.layout.documents
        ids = next(iter(held_out))["doc_ids"].clone()
        with watching() as read:
            found = documents.bounds(ids), documents.bounds(ids, may_read=True)
            again = documents.bounds(ids)
    assert found[0] is None
    assert found[1] is again
    return trained, ledger, len(calls), again.starts.cpu().tolist(), again.longest, len(read.waits)


def test_a_recipes_loaders_note_the_documents_that_they_copy_ahead():
    ((trained, ledger, evaluated, starts, longest, waits),) = run_ranks(load, 1, setup=SETUP)
    assert trained == {"forward": 4, "backward": 4}  # two blocks, two micro-batches
    assert not ledger.waits, ledger.waits[0]
    assert ledger.copied["pageable"] == 0
    assert evaluated == 4
    assert (starts, longest) == ([0, 2, 5, 6, 12], 6)
    assert waits == 1
