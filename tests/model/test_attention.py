"""Causal attention inside documents: a formula in float64 is the oracle of every path and kernel.

Kernels of accelerators run here as plain formulas on the CPU, see ``flash_kernels``.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from flash_kernels import flash_kernels
from lab import Watch, exact_attention, plain_attention

from forgekit.model import attention, attention_kernels
from forgekit.model.attention import Documents, attend_causal

CPU, HALF = torch.device("cpu"), torch.bfloat16
WIDE = {"dtypes": (torch.float64, torch.bfloat16)}
TOLERANCES = {torch.float64: 1e-12, torch.bfloat16: 2e-2}
PATHS = {"one by one": 0, "mask": 10**12}
"""What a call costs in pairs: nothing makes documents go one by one, much forces the mask."""
DOCUMENTS = {
    "none": None,
    "ragged": [[0, 0, 0, 0, 1, 2, 2, 2, 2], [5, 6, 6, 6, 6, 6, 6, 7, 8]],
    "ids fall, and are the same in two rows": [[9, 9, 4, 4, 4, 2, 2, 0, 0], [9] * 9],
    "padded": [[0, 0, -1, 1, 1, -1, -1, 2, 2], [-1] * 9],
}
VARLEN = [("varlen", documents) for documents in DOCUMENTS]
SCATTERED = [[0, 0, 1, 1, 0, 0, 1, 2, 2], [0, 1, 0, 1, 0, 1, 0, 1, 0]]
"""Ids that come back after another one."""


def ids_of(rows):
    return None if rows is None else torch.tensor(rows)


def draw(heads=4, kv_heads=2, *, dtype=torch.float64, positions=9, rows=2, seed=0):
    """Queries, keys, values and the gradient of what they give, of 8 channels a head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, positions, h, 8) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def assert_exact(rows, inputs, **options):
    """What attention gives forward and backward, on positions that are no padding."""
    doc_ids, (*inputs, upstream) = ids_of(rows), inputs
    wanted, bound = exact_attention(doc_ids, *inputs, upstream), TOLERANCES[upstream.dtype]
    leaves = [x.requires_grad_() for x in inputs]
    out = attend_causal(*leaves, doc_ids=doc_ids, **options)
    found = [out, *torch.autograd.grad(out, leaves, upstream)]
    real = torch.ones(upstream.shape[:2], dtype=torch.bool) if doc_ids is None else doc_ids != -1
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()  # on padding too
        torch.testing.assert_close(one[real].double(), other[real], rtol=bound, atol=bound)


@pytest.fixture
def calls(monkeypatch):
    """The mask of each call of torch's attention, None for a plain causal one."""
    masks = []
    original = F.scaled_dot_product_attention

    def record(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return original(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    return masks


@pytest.mark.parametrize("heads", [(6, 2), (6, 1)])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("documents", [*DOCUMENTS, "scattered"])
def test_on_a_cpu_it_is_causal_softmax_inside_each_document(path, documents, heads, monkeypatch):
    monkeypatch.setattr(attention, "CALL_COST", PATHS[path])
    assert_exact(DOCUMENTS.get(documents, SCATTERED), draw(*heads))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("kernel", "documents"), [("flash", "none"), *VARLEN])
def test_a_kernel_gives_what_the_formula_gives(kernel, documents, dtype):
    with flash_kernels(**WIDE) as calls:
        assert_exact(DOCUMENTS[documents], draw(dtype=dtype), attention=kernel)
    assert [call["kind"] for call in calls] == ["forward", "backward"]
    assert all(call["k"][-2] == 2 for call in calls)  # keys are not repeated


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gives_forward_what_the_formula_gives(monkeypatch):
    monkeypatch.setattr(attention_kernels, "_offers", lambda device, needs: True)
    flex = attention_kernels.Requirements(attention_kernels.TRITON, (torch.float64,), 8, 256)
    monkeypatch.setattr(attention_kernels, "KERNELS", {"flex": flex})
    doc_ids, inputs = ids_of(DOCUMENTS["padded"]), draw()
    with torch.no_grad():
        found = attend_causal(*inputs[:3], doc_ids=doc_ids, attention="flex")
    torch.testing.assert_close(found, plain_attention(*inputs[:3], doc_ids), rtol=1e-6, atol=1e-6)


# Which path


CHEAPER = [(1024, 256, False), (512, 512, False), (512, 1, True), (128, 64, True)]


@pytest.mark.parametrize(("positions", "length", "masked"), CHEAPER)
def test_the_cheaper_path_is_taken(calls, positions, length, masked):
    """By the count of pairs: 4 heads, half of them one by one, and 30,000 more for each call."""
    doc_ids = torch.arange(positions)[None] // length
    inputs = draw(dtype=torch.float32, positions=positions, rows=1)
    attend_causal(*inputs[:3], doc_ids=doc_ids)
    count = 1 if masked else positions // length
    assert [mask is not None for mask in calls] == [masked] * count


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_changed_document_leaves_the_others_bit_equal(path, dtype, monkeypatch):
    lowered = torch.backends.cpu.get_cpu_capability() != "AVX512"
    if dtype == torch.bfloat16 and lowered and torch.cpu._is_avx512_supported():
        pytest.skip("torch's 16-bit kernel refuses ATEN_CPU_CAPABILITY below what the CPU has")
    monkeypatch.setattr(attention, "CALL_COST", PATHS[path])
    doc_ids = torch.tensor([[0] * 7 + [1] * 30 + [2] * 27])
    before, after = (draw(dtype=dtype, positions=64, rows=1, seed=s)[:3] for s in (0, 1))
    first = attend_causal(*before, doc_ids=doc_ids)
    for changed in range(3):
        there = (doc_ids == changed)[..., None, None]
        mixed = [torch.where(there, 3 * b, a) for a, b in zip(before, after, strict=True)]
        second = attend_causal(*mixed, doc_ids=doc_ids)
        others = doc_ids != changed
        assert torch.equal(first[others], second[others])
        assert not torch.equal(first[~others], second[~others])


def test_what_auto_chooses_follows_from_what_the_device_offers(monkeypatch):
    choose = partial(attention_kernels.choose, device=CPU, channels=64)
    assert choose("documents", dtype=HALF) == "sdpa"
    with flash_kernels():
        assert choose("rows", dtype=HALF) == "sdpa"  # torch chooses by itself
        assert choose("documents", dtype=HALF) == "varlen"
        assert choose("documents", dtype=torch.float32) == "sdpa"
        assert choose("ring", dtype=HALF) == "flash"
        assert choose("ring", dtype=HALF, channels=20) == "sdpa"
        monkeypatch.setattr(torch.cpu, "get_device_capability", lambda: (7, 5), raising=False)
        assert choose("documents", dtype=HALF) == "sdpa"  # of a generation that has no kernel


REFUSED = {
    "cpu has no Triton for it": ("flex", "rows", HALF, 64),
    "bfloat16, not torch.float32": ("flash", "rows", torch.float32, 64),
    "up to 256 channels that 8 divides": ("varlen", "documents", HALF, 264),
    "pass 'flash', 'sdpa' or 'auto'": ("varlen", "ring", torch.float16, 64),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_kernel_that_cannot_run_is_refused_with_what_would_work(message):
    kernel, use, dtype, channels = REFUSED[message]
    with flash_kernels(), pytest.raises(ValueError, match=message):
        attention_kernels.choose(use, CPU, dtype, channels, kernel)


@pytest.mark.parametrize("kernel", ["auto", "varlen"])
def test_an_id_that_comes_back_is_no_document_of_its_own(kernel):
    message = "is interrupted by another"
    expected = nullcontext() if kernel == "auto" else pytest.raises(ValueError, match=message)
    with flash_kernels(**WIDE) as calls, expected:
        assert_exact(SCATTERED, draw(), attention=kernel, documents=Documents())
    assert calls == []


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
    assert documents.block_mask(ids) is documents.block_mask(ids)
    gone = weakref.ref(host), weakref.ref(ids)
    del ids, host
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_under_autocast_a_kernel_gets_what_torchs_own_attention_would():
    """Normalised queries and keys are float32 there, values in 16 bits."""
    doc_ids, (q, k, v, _) = ids_of(DOCUMENTS["ragged"]), draw(dtype=torch.float32)
    with flash_kernels() as calls, torch.autocast("cpu", dtype=HALF):
        found = attend_causal(q, k, v.bfloat16(), doc_ids=doc_ids, documents=Documents())
        wanted = attend_causal(q, k, v.bfloat16(), doc_ids=doc_ids, attention="sdpa")
    assert [call["dtype"] for call in calls] == [HALF]
    assert found.dtype == wanted.dtype == HALF
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


# Long rows, on shapes alone: the largest tensor is one of the inputs


def test_nothing_of_all_pairs_is_allocated_for_a_long_row():
    s = 2**17
    leaves = [torch.empty(1, s, n, 64, device="meta", dtype=HALF) for n in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in leaves]
    bounds = attention.Bounds(torch.empty(9, dtype=torch.int32, device="meta"), s // 4)
    with Watch() as largest:
        out = attention._flash(*leaves, bounds)
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert [x.shape for x in (out, *gradients)] == [leaves[0].shape, *(x.shape for x in leaves)]
    assert largest.largest == leaves[0].numel()
