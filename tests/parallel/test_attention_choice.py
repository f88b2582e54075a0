"""The kernel that a model's attention runs in: what is chosen, forced, refused and shown."""

from __future__ import annotations

import pytest
import torch
from distributed.cells import merge, run_cells
from distributed.compare import check
from distributed.matrix import Cell
from flash_kernels import flash_kernels
from lab import alone
from pool import run_again, run_ranks
from tensordict import TensorDict
from torch import nn

import forgekit as fk

SIZES = {"vocab_size": 11, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 16}
SPEC = fk.TransformerSpec(**SIZES, max_seq_len=16)
NARROW = fk.TransformerSpec(**SIZES | {"dim": 48}, max_seq_len=16)
F64 = (torch.float64,)


@pytest.fixture
def mesh():
    yield fk.build_mesh(device="cpu")
    fk.shutdown()


def packed_batch() -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (2, 13), generator=generator)
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2], [4] * 3 + [3] * 7 + [-1] * 2])
    labels = ids[:, 1:].masked_fill(documents == -1, -100)
    return TensorDict({"input_ids": ids[:, :-1], "labels": labels, "doc_ids": documents}, [2])


def loss_fn(model, batch):
    return fk.cross_entropy(model(batch["input_ids"], doc_ids=batch["doc_ids"]), batch["labels"])


def gradients(model):
    fk.accumulate(alone(model), [packed_batch()], loss_fn)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["auto", "varlen"])
def test_a_step_in_a_kernel_has_the_gradients_of_another(mesh, attention):
    wanted = gradients(fk.Transformer(SPEC).double())
    with flash_kernels(dtypes=F64) as calls:
        model = fk.parallelize(fk.Transformer(SPEC).double(), mesh, attention=attention)
        found = gradients(model)
    assert [call["kind"] for call in calls] == ["forward", "forward", "backward", "backward"]
    assert all(call["lengths"] == [5, 6, 1, 3, 7, 2] for call in calls)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)


REFUSED = {
    '.fast.; it is one of "auto", "flash", "varlen", "fl': (SPEC, {"attention": "fast"}),
    "8 divides, not of 12. For": (NARROW, {"attention": "flash", "precision": "bf16"}),
    "and no module of Linear has an 'attend' socke": (None, {"attention": "sdpa"}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_attention_that_cannot_run_is_refused_before_anything_is_laid_out(mesh, message):
    spec, options = REFUSED[message]
    model = nn.Linear(2, 2) if spec is None else fk.Transformer(spec)
    with flash_kernels(), pytest.raises(ValueError, match=message):
        fk.parallelize(model, mesh, **options)


def run_ring(rank, world, cell):
    with flash_kernels(dtypes=F64) as calls:
        (found,) = run_cells(rank, world, [cell])
    return found, {(call["kind"], call["causal"], call["k"][2]) for call in calls}


RINGS = [
    Cell("cp2-ring", 2, "rank_without", True, "full", "head", "fp64", steps=2),
    Cell("cp4-both", 2, "ragged", True, "none", "head", "fp64", steps=2),
]


@pytest.mark.oracle  # the default run has a ring on the pretend device
@pytest.mark.parametrize("cell", RINGS, ids=str)
def test_a_ring_in_the_flash_kernel_is_one_process(cell):
    by_rank = run_again(run_ring, cell.row.world, cell, timeout_s=200)
    check(cell, merge([found for found, _ in by_rank]))
    # The first step compares slices with whole sequences: packed ones are [t h c], c is 8.
    heads = 1 if "both" in cell.layout else 2
    expected = {
        (kind, causal, heads) for kind in ("forward", "backward") for causal in (True, False)
    }
    for _, calls in by_rank:
        assert {call for call in calls if call[2] != 8} == expected


def refuse_in_ring(_rank, _world):
    mesh = fk.build_mesh(fk.MeshSpec(cp=2, dp_shard=1), device="cpu")
    with flash_kernels(), pytest.raises(ValueError, match="'varlen', and it cannot compute ring"):
        fk.parallelize(fk.Transformer(SPEC), mesh, precision="bf16", attention="varlen")


def test_a_kernel_for_whole_rows_is_refused_in_a_ring():
    run_ranks(refuse_in_ring, 2)
