"""Blocks of a softmax: the naive formula in float64 is the oracle, for kernel and product."""

from __future__ import annotations

import math

import pytest
import torch
from covering import covering
from flash_kernels import flash_kernels
from torch import Tensor

from forgekit.parallel.context import block_attention
from forgekit.parallel.context.block_attention import (
    attend_block,
    attend_block_backward,
    merge_block,
)

ROWS, QUERIES, KEYS, CHANNELS = 2, 7, 9, 4
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2}


WAYS = ["kernel", "product"]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    if request.param == "product":
        monkeypatch.setattr(block_attention, "has_flash", lambda tensor: False)
    return request.param


MASKS = {
    "all": (None, None),
    "causal": (0, None),
    "offset": (2, None),
    "documents": (None, ([0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1, 2, 2])),
    "causal documents": (2, ([0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1, 2, 2])),
    "square documents": (0, ([0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1, 2, 2])),
    "some see none": (None, ([5, 0, 1, 7, 1, 2, 9], [0, 0, 0, 1, 1, 1, 1, 2, -1])),
    "none sees any": (None, ([5] * 7, [6] * 9)),
}


def draw(heads: int, kv_heads: int, queries: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, queries), (kv_heads, KEYS), (kv_heads, KEYS)]
    return [
        torch.randn(ROWS, n, h, CHANNELS, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        for h, n in shapes
    ]


def case(name: str) -> tuple[int, int | None, tuple[Tensor, Tensor] | None, Tensor]:
    """Number of queries, offset, documents, and the ``[b m n]`` pairs by hand."""
    offset, documents = MASKS[name]
    queries = KEYS if offset == 0 else QUERIES
    pairs = torch.ones(ROWS, queries, KEYS, dtype=torch.bool)
    for i in range(queries):
        for j in range(KEYS):
            after = offset is not None and j > i + offset
            other = documents is not None and documents[0][i] != documents[1][j]
            pairs[:, i, j] = not (after or other)
    ids = documents and tuple(torch.tensor([row] * ROWS) for row in documents)
    return queries, offset, ids, pairs


def naive(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sum of exponentials in float64, zero where nothing is seen."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(CHANNELS)).masked_fill(~pairs[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.where(pairs[:, None], (scores - lse[..., None]).exp(), 0.0)
    return weights @ v, lse


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("way", "name", "heads", "dtype"),
    covering(WAYS, list(MASKS), [(2, 2), (6, 2), (4, 1)], list(TOLERANCES)),
    indirect=["way"],
)
def test_a_block_and_its_gradients_are_the_naive_formula(way, name, heads, dtype):
    queries, offset, ids, pairs = case(name)
    inputs = draw(*heads, queries, dtype)
    exact = [x.double().requires_grad_() for x in inputs]
    wanted, wanted_lse = naive(*exact, pairs)
    out, lse = attend_block(*inputs, offset=offset, ids=ids)
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    close(out, wanted.detach(), dtype)
    close(lse, wanted_lse.detach(), dtype)
    if not wanted_lse.isfinite().all():  # backward takes that of the whole softmax, which is
        return
    upstream = torch.randn(wanted.shape, dtype=torch.float64).to(dtype)
    merged = wanted.detach().to(dtype), wanted_lse.detach().to(lse.dtype)
    found = attend_block_backward(upstream, *inputs, *merged, offset=offset, ids=ids)
    for gradient, exactly in zip(
        found, torch.autograd.grad(wanted, exact, upstream.double()), strict=True
    ):
        close(gradient, exactly, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_blocks_merge_to_the_whole_in_any_order(way, dtype):
    q, k, v = draw(6, 2, QUERIES, dtype)
    pairs = torch.ones(ROWS, QUERIES, KEYS, dtype=torch.bool)
    wanted = naive(*(x.double() for x in (q, k, v)), pairs)
    wide = torch.promote_types(dtype, torch.float32)
    for order in ([(0, 2), (2, 3), (3, 9)], [(3, 9), (0, 2), (2, 3)]):
        out = torch.zeros(q.shape, dtype=wide)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=wide)
        for start, stop in order:
            merge_block(out, lse, *attend_block(q, k[:, :, start:stop], v[:, :, start:stop]))
        close(out, wanted[0], dtype)
        close(lse, wanted[1], dtype)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)], ids=str)
@pytest.mark.parametrize("name", ["all", "causal"])
def test_blocks_of_the_flash_kernel_are_the_naive_formula(monkeypatch, name, heads):
    """Backward with the output and the logarithm of a softmax over more keys than the block's."""
    monkeypatch.setattr(f"{__name__}.CHANNELS", 8)
    queries, offset, _, pairs = case(name)
    q, k, v = inputs = draw(*heads, queries, torch.float64)
    exact = [x.clone().requires_grad_() for x in inputs]
    upstream = torch.randn(q.shape, dtype=torch.float64)
    block, block_lse = naive(*exact, pairs)
    # Of the whole softmax: the block has this share of it, all else gives an output of zeros.
    share = torch.rand(q.shape[:3], dtype=torch.float64) + 0.1
    lse = block_lse.detach() - share.log()
    whole = block * (block_lse - lse).exp()[..., None]
    with flash_kernels(dtypes=(torch.float64,)) as calls:
        out, found_lse = attend_block(q, k, v, offset=offset, kernel="flash")
        found = attend_block_backward(
            upstream, q, k, v, whole.detach(), lse, offset=offset, kernel="flash"
        )
    assert [call["k"][2] for call in calls] == [heads[1]] * 2
    close(out, block.detach(), torch.float64)
    close(found_lse, block_lse.detach(), torch.float64)
    wanted = block_gradients(*exact, pairs, lse, upstream, whole.detach())
    for gradient, exactly in zip(found, wanted, strict=True):
        close(gradient, exactly, torch.float64)


def block_gradients(q, k, v, pairs, lse, upstream, whole):
    """A block's share by the formula: weights of the whole softmax, keys of the block."""
    group = q.shape[1] // k.shape[1]
    repeated = [x.repeat_interleave(group, 1) for x in (k, v)]
    scores = q @ repeated[0].mT / math.sqrt(CHANNELS)
    weights = torch.where(pairs[:, None], (scores - lse[..., None]).exp(), 0.0).detach()
    inner = (upstream * whole).sum(-1, keepdim=True)
    of_scores = weights * (upstream @ repeated[1].mT - inner).detach()
    total = (of_scores * scores).sum() + (weights @ repeated[1] * upstream).sum()
    return torch.autograd.grad(total, (q, k, v))


def test_large_scores_do_not_overflow(way):
    q, k, v = (x * 200 for x in draw(6, 2, QUERIES, torch.float32))
    pairs = torch.ones(ROWS, QUERIES, KEYS, dtype=torch.bool)
    out, lse = attend_block(q, k, v)
    wanted = naive(*(x.double() for x in (q, k, v)), pairs)
    assert lse.max() > 1e4
    torch.testing.assert_close(out.double(), wanted[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-6, atol=0)
