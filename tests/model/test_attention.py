"""Causal attention inside documents: the naive formula in float64 is the oracle on every path."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import forgekit as fk
from forgekit.model import attention
from forgekit.parallel.activation_checkpoint import compile_blocks

PATHS = {"one by one": 0, "mask": 10**12}
"""What a call costs in pairs: nothing makes documents go one by one, much forces the mask."""

DOCUMENTS = {
    "one each": [[3] * 9, [1] * 9],
    "ragged": [[0, 0, 0, 0, 1, 2, 2, 2, 2], [5, 6, 6, 6, 6, 6, 6, 7, 8]],
    "ids fall": [[9, 9, 4, 4, 4, 2, 2, 0, 0], [8, 7, 6, 5, 4, 3, 2, 1, 0]],
    "same id in two rows": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0, 0, 0]],
    "padded": [[0, 0, 0, 1, 1, -1, -1, -1, -1], [-1] * 9],
    "comes back": [[0, 0, 1, 1, 0, 0, 1, 2, 2], [0, 1, 0, 1, 0, 1, 0, 1, 0]],
}


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    monkeypatch.setattr(attention, "CALL_COST", PATHS[request.param])
    return request.param


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


def draw(heads: int, kv_heads: int, places: int = 9, rows: int = 2, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(
            rows, places, h, 4, generator=generator, dtype=torch.float64, requires_grad=True
        )
        for h in (heads, kv_heads, kv_heads)
    ]


def naive(q: Tensor, k: Tensor, v: Tensor, doc_ids: Tensor | None) -> Tensor:
    """One softmax a row, head and place, over the places that it may see."""
    group = q.shape[2] // k.shape[2]
    out = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            seen = [j for j in range(i + 1) if doc_ids is None or doc_ids[b, j] == doc_ids[b, i]]
            for h in range(q.shape[2]):
                keys, values = k[b, seen, h // group], v[b, seen, h // group]
                scores = (keys @ q[b, i, h]) / math.sqrt(q.shape[-1])
                weights = scores.exp() / scores.exp().sum()
                out.append(weights @ values)
    return torch.stack(out).view(q.shape)


def compare(heads: int, kv_heads: int, doc_ids: Tensor | None) -> None:
    inputs = draw(heads, kv_heads)
    upstream = torch.randn(inputs[0].shape, dtype=torch.float64)
    found = fk.model.attend_causal(*inputs, doc_ids=doc_ids)
    expected = naive(*inputs, doc_ids)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    gradients = torch.autograd.grad((found * upstream).sum(), inputs)
    for mine, theirs in zip(
        gradients, torch.autograd.grad((expected * upstream).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 1)])
def test_without_documents_it_is_causal_softmax(heads, kv_heads):
    compare(heads, kv_heads, None)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_with_documents_it_is_causal_softmax_inside_each(path, documents, heads, kv_heads):
    compare(heads, kv_heads, torch.tensor(DOCUMENTS[documents]))


@pytest.mark.parametrize("documents", ["comes back", [[0, 1, 1, 0, 2, 2, 2, 2, 2], [3] * 9]])
def test_an_id_that_comes_back_goes_through_the_mask(monkeypatch, calls, documents):
    """One by one, its second part would not see its first."""
    monkeypatch.setattr(attention, "CALL_COST", 0)
    doc_ids = torch.tensor(
        DOCUMENTS.get(documents, documents) if isinstance(documents, str) else documents
    )
    fk.model.attend_causal(*draw(2, 1), doc_ids=doc_ids)
    assert len(calls) == 1
    assert calls[0] is not None


def test_padding_between_documents_does_not_force_the_mask(monkeypatch, calls):
    monkeypatch.setattr(attention, "CALL_COST", 0)
    doc_ids = torch.tensor([[0, 0, -1, 1, 1, -1, -1, 2, 2]])
    inputs = draw(2, 1, rows=1)
    found = fk.model.attend_causal(*inputs, doc_ids=doc_ids)
    assert calls == [None] * 5
    real = doc_ids[0] != -1
    torch.testing.assert_close(found[0, real], naive(*inputs, doc_ids)[0, real], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("places", "length", "masked"),
    [(1024, 512, False), (1024, 256, False), (512, 512, False), (512, 1, True), (128, 64, True)],
)
def test_the_cheaper_path_is_taken(calls, places, length, masked):
    """By the count of pairs: 4 heads, half of them one by one, and 30,000 more for each call."""
    doc_ids = torch.arange(places)[None] // length
    fk.model.attend_causal(*(x.float() for x in draw(4, 2, places, rows=1)), doc_ids=doc_ids)
    assert [mask is not None for mask in calls] == (
        [True] if masked else [False] * (places // length)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_changed_document_leaves_the_others_bit_equal(path, dtype, changed):
    lowered = torch.backends.cpu.get_cpu_capability() != "AVX512"
    if dtype == torch.bfloat16 and lowered and torch.cpu._is_avx512_supported():
        pytest.skip("torch's 16-bit kernel refuses ATEN_CPU_CAPABILITY below what the CPU has")
    doc_ids = torch.tensor([[0] * 7 + [1] * 30 + [2] * 27])
    before = [x.detach().to(dtype) for x in draw(4, 2, 64, rows=1)]
    after = [x.detach().to(dtype) * 3 for x in draw(4, 2, 64, rows=1, seed=1)]
    there = (doc_ids == changed)[..., None, None]
    mixed = [torch.where(there, b, a) for a, b in zip(before, after, strict=True)]
    first, second = (fk.model.attend_causal(*x, doc_ids=doc_ids) for x in (before, mixed))
    others = doc_ids != changed
    assert torch.equal(first[others], second[others])
    assert not torch.equal(first[~others], second[~others])


@pytest.mark.parametrize("row", [[-1] * 9, [-1] * 4 + [0] * 5, [0] * 3 + [-1] * 6])
def test_padding_is_finite_forward_and_backward(path, row):
    inputs = draw(4, 2)
    out = fk.model.attend_causal(*inputs, doc_ids=torch.tensor([row, [0] * 9]))
    gradients = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.isfinite(x).all() for x in (out, *gradients))


# Compiled

PACKINGS = {
    "one document": [512],
    "two": [200, 312],
    "three": [7, 300, 205],
    "many, under a mask": [8] * 64,
    "padding": [500, -12],
    "an id that comes back": [256, 128, 128],
}


def ids(name):
    """Documents of a row; of a negative length padding."""
    found = [torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(PACKINGS[name])]
    if name == "an id that comes back":
        found[2].fill_(0)
    return torch.cat(found)[None]


def run(model, doc_ids):
    model.zero_grad()
    tokens = torch.arange(512)[None] % 32
    out = model(tokens, doc_ids=doc_ids)
    out.square().sum().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_have_one_graph_for_all_packings_and_compute_the_same():
    """Under a mask: a graph that read the ids would be compiled again for each packing."""
    sizes = {"dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 16, "max_seq_len": 512}
    spec = fk.TransformerSpec(vocab_size=32, **sizes)
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = (fk.Transformer(spec).double() for _ in range(2))
    compile_blocks(compiled.layers, backend="aot_eager")
    for name in PACKINGS:
        found, expected = (run(model, ids(name)) for model in (compiled, plain))
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-12 * other.abs().max(), name
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
