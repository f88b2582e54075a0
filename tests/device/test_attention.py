"""Attention kernels on the pretend device: as one process on the CPU, and no wait for bounds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from device.pretend import NAME, watching
from device.test_layouts import SETUP, pinned
from distributed.cells import LaidOut, lay_out, merge, own_batches, run_cell
from distributed.compare import check
from distributed.matrix import Cell
from distributed.models import LOSSES, SCHEDULES
from flash_kernels import flash_kernels
from ranks import run_ranks
from tensordict import TensorDict

import forgekit as fk

KERNELS = {"dtypes": (torch.float64,), "keys": ("CPU", "PrivateUse1")}
CELLS = [
    Cell("fsdp2", 2, "ragged", True, "selective", "head", "fp64", steps=2),
    Cell("tp2", 1, "ragged", True, "full", "head", "fp64", steps=2),
    Cell("cp2-ulysses", 2, "ragged", True, "none", "head", "fp64", steps=2),
    Cell("pp2-1f1b", 2, "ragged", True, "none", "logits", "fp64", steps=2),
    Cell("cp2-ring", 2, "ragged", True, "selective", "head", "fp64", steps=2),
    Cell("cp2-ring", 1, "ragged", False, "none", "head", "fp64", steps=2),
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


@pytest.mark.parametrize("cell", CELLS, ids=str)
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


def load(_rank, _world):
    """A micro-batch that a loader has copied ahead."""
    rows = [
        TensorDict({"input_ids": torch.arange(6), "doc_ids": torch.tensor([0, 0, 1, 1, 1, 2])})
        for _ in range(4)
    ]
    with flash_kernels(**KERNELS):
        mesh = fk.build_mesh(device=NAME)
        model = fk.parallelize(fk.Transformer(SMALL).double(), mesh)
    documents = fk.TrainState.create(model, fk.adamw(model), mesh=mesh).layout.documents
    loader = fk.make_loader(rows, 2, workers=1, device=NAME, note_documents=documents.note)
    batch = next(iter(loader))
    with watching() as ledger:
        bounds = documents.bounds(batch["doc_ids"])
    changed = documents.bounds(batch["doc_ids"].clone())
    return bounds.starts.cpu(), bounds.longest, ledger.waits, ledger.copied["pageable"], changed


SMALL = fk.TransformerSpec(
    vocab_size=8, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=16, max_seq_len=8
)


def test_a_loader_notes_the_documents_that_it_copies_ahead():
    ((starts, longest, waits, pageable, changed),) = run_ranks(load, 1, setup=SETUP)
    assert starts.tolist() == [0, 2, 5, 6, 8, 11, 12]
    assert longest == 3
    assert waits == []
    assert pageable == 0
    assert changed is None
