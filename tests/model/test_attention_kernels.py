"""The kernels of accelerators, on the CPU in plain formulas: float64 attention is the oracle."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from flash_kernels import flash_kernels
from lab import Watch
from torch import Tensor

from forgekit.model import attention, attention_kernels
from forgekit.model.attention import Documents, attend_causal
from forgekit.parallel.context.block_attention import attend_block, attend_block_backward

CPU, HALF = torch.device("cpu"), torch.bfloat16
WIDE = {"dtypes": (torch.float64, torch.bfloat16)}
TOLERANCES = {torch.float64: 1e-12, torch.bfloat16: 2e-2}
DOCUMENTS = {
    "none": None,
    "ragged": [[0, 0, 0, 0, 1, 2, 2, 2, 2], [5, 6, 6, 6, 6, 6, 6, 7, 8]],
    "ids fall, and are the same in two rows": [[9, 9, 4, 4, 4, 2, 2, 0, 0], [9] * 9],
    "padded": [[0, 0, 0, 1, 1, -1, -1, -1, -1], [-1] * 9],
}


def draw(dtype: torch.dtype, heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 9, n, 8) for n in (heads[0], heads[1], heads[1], heads[0])]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def exact(doc_ids: Tensor | None, *inputs: Tensor) -> list[Tensor]:
    """Output and gradients by the formula, in float64."""
    q, k, v, upstream = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    heads = [x.transpose(1, 2) for x in leaves]
    k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in heads[1:])
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    if doc_ids is not None:
        seen = seen & (doc_ids[:, None, :, None] == doc_ids[:, None, None, :])
    scores = (heads[0] @ k.mT / 8**0.5).masked_fill(~seen, float("-inf"))
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def ids_of(name: str) -> Tensor | None:
    rows = DOCUMENTS[name]
    return None if rows is None else torch.tensor(rows)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize(
    ("kernel", "documents"),
    [("flash", "none"), *(("varlen", documents) for documents in DOCUMENTS)],
)
def test_a_kernel_gives_what_the_formula_gives(kernel, documents, heads, dtype):
    doc_ids, (*inputs, upstream) = ids_of(documents), draw(dtype, heads)
    wanted = exact(doc_ids, *inputs, upstream)
    leaves = [x.requires_grad_() for x in inputs]
    with flash_kernels(**WIDE) as calls:
        out = attend_causal(*leaves, doc_ids=doc_ids, attention=kernel)
        found = [out, *torch.autograd.grad(out, leaves, upstream)]
    assert [call["kind"] for call in calls] == ["forward", "backward"]
    assert all(call["k"][-2] == heads[1] for call in calls)  # keys are not repeated
    for one, other in zip(found, wanted, strict=True):
        real = torch.ones(2, 9, dtype=torch.bool) if doc_ids is None else doc_ids != -1
        torch.testing.assert_close(
            one[real].double(), other[real], rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_flex_gives_forward_what_the_formula_gives(documents, monkeypatch):
    monkeypatch.setattr(attention_kernels, "_offers", lambda device, needs: True)
    monkeypatch.setattr(attention_kernels, "KERNELS", {"flex": _wide_flex()})
    doc_ids, inputs = ids_of(documents), draw(torch.float64)
    with torch.no_grad():
        found = attend_causal(*inputs[:3], doc_ids=doc_ids, attention="flex")
    torch.testing.assert_close(found, exact(doc_ids, *inputs)[0], rtol=1e-6, atol=1e-6)


def _wide_flex():
    return attention_kernels.Requirements(attention_kernels.TRITON, (torch.float64,), 8, 256)


def test_what_auto_chooses_follows_from_what_the_device_offers():
    choose = partial(attention_kernels.choose, device=CPU, channels=64)
    assert choose("documents", dtype=torch.bfloat16) == "sdpa"
    with flash_kernels():
        assert choose("rows", dtype=torch.bfloat16) == "sdpa"  # torch chooses by itself
        assert choose("documents", dtype=torch.bfloat16) == "varlen"
        assert choose("documents", dtype=torch.float32) == "sdpa"
        assert choose("ring", dtype=torch.bfloat16) == "flash"
        assert choose("ring", dtype=torch.bfloat16, channels=20) == "sdpa"
    assert choose("documents", dtype=torch.bfloat16) == "sdpa"


def test_a_device_without_the_generation_that_a_kernel_needs_does_not_offer_it(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_device_capability", lambda: (7, 5), raising=False)
    with flash_kernels():
        assert attention_kernels.choose("documents", CPU, torch.bfloat16, 64) == "sdpa"


REFUSED = {
    "no compiler": ("flex", "rows", torch.bfloat16, 64, "cpu has no Triton for it"),
    "float32": ("flash", "rows", torch.float32, 64, "bfloat16, not torch.float32"),
    "wide": ("varlen", "documents", torch.bfloat16, 264, "up to 256 channels that 8 divides"),
    "ring by varlen": ("varlen", "ring", torch.float16, 64, "pass 'flash', 'sdpa' or 'auto'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_kernel_that_cannot_run_is_refused_with_what_would_work(case):
    kernel, use, dtype, channels, message = REFUSED[case]
    offered = nullcontext() if case.startswith("no ") else flash_kernels()
    with offered, pytest.raises(ValueError, match=message):
        attention_kernels.choose(use, CPU, dtype, channels, kernel)


def test_ids_are_known_until_they_change_or_end():
    documents, ids = Documents(), torch.tensor([[0, 0, 1]])
    host = ids.clone()
    documents.note(ids, host)
    assert documents.host(ids) is host
    assert documents.bounds(ids) is documents.bounds(ids)
    assert documents.bounds(ids).starts.tolist() == [0, 2, 3]
    assert documents.bounds(ids).longest == 2
    ids[0, 1] = 1
    assert documents.bounds(ids).starts.tolist() == [0, 1, 3]
    gone = weakref.ref(host)
    del ids, host
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("kernel", ["auto", "varlen"])
def test_an_id_that_comes_back_is_no_document_of_its_own(kernel):
    doc_ids = torch.tensor([[0, 1, 1, 0, 2, 2, 2, 2, 2]] * 2)
    *inputs, upstream = draw(torch.float64)
    with flash_kernels(**WIDE) as calls:
        if kernel == "varlen":
            with pytest.raises(ValueError, match="comes back after another in a row"):
                attend_causal(*inputs, doc_ids=doc_ids, attention=kernel, documents=Documents())
        else:
            found = attend_causal(*inputs, doc_ids=doc_ids, documents=Documents())
            torch.testing.assert_close(found, exact(doc_ids, *inputs, upstream)[0])
    assert calls == []


def test_nothing_of_all_pairs_is_allocated_for_a_long_row():
    """Shapes at 128 k: the largest tensor is one of the inputs."""
    s = 2**17
    leaves = [torch.empty(1, s, n, 64, device="meta", dtype=torch.bfloat16) for n in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in leaves]
    bounds = attention.Bounds(torch.empty(9, dtype=torch.int32, device="meta"), s // 4)
    with Watch() as largest:
        out = attention._flash(*leaves, bounds)
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == leaves[0].shape
    assert [x.shape for x in gradients] == [x.shape for x in leaves]
    assert largest.largest == leaves[0].numel()


def test_a_block_mask_is_made_once_and_does_not_keep_its_ids(monkeypatch):
    made = []
    original = attention._block_mask
    monkeypatch.setattr(attention, "_block_mask", lambda *a: made.append(1) or original(*a))
    documents, ids = Documents(), torch.tensor([[0, 0, 1]])
    assert documents.block_mask(ids) is documents.block_mask(ids)
    assert made == [1]
    gone = weakref.ref(ids)
    del ids
    gc.collect()
    assert gone() is None


def test_under_autocast_a_kernel_gets_what_torchs_own_attention_would():
    """Normalised queries and keys are float32 there, values in 16 bits."""
    doc_ids, (q, k, v, _) = ids_of("ragged"), draw(torch.float32)
    with flash_kernels() as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend_causal(q, k, v.bfloat16(), doc_ids=doc_ids, documents=Documents())
        wanted = attend_causal(q, k, v.bfloat16(), doc_ids=doc_ids, attention="sdpa")
    assert [call["dtype"] for call in calls] == [torch.bfloat16]
    assert found.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_the_kernels_of_a_ring_hold_nothing_of_all_pairs_at_128_k():
    """A chunk of a slice of 16 k positions, forward and backward, on shapes alone."""
    q, k, v = (torch.empty(1, n, 2**13, 64, device="meta", dtype=HALF) for n in (4, 2, 2))
    with Watch() as largest:
        out, lse = attend_block(q, k, v, offset=0, kernel="flash")
        shares = attend_block_backward(out, q, k, v, out, lse, offset=0, kernel="flash")
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert [x.shape for x in shares] == [x.shape for x in (q, k, v)]
    assert largest.largest == q.numel()
