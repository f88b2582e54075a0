"""Compiled blocks over packed documents: one graph, and what the uncompiled ones compute."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

import forgekit as fk
from forgekit.model.attention import attend_causal
from forgekit.parallel.activation_checkpoint import compile_blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]
SPEC = fk.TransformerSpec(
    vocab_size=32, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=16, max_seq_len=512
)
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
    tokens = torch.arange(512)[None] % SPEC.vocab_size
    out = model(tokens, doc_ids=doc_ids)
    out.square().sum().backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


def test_compiled_blocks_have_one_graph_for_all_packings_and_compute_the_same():
    torch._dynamo.reset()
    counters.clear()
    plain, compiled = (fk.Transformer(SPEC).double() for _ in range(2))
    compile_blocks(compiled.layers, backend="aot_eager")
    for name in PACKINGS:
        found, expected = (run(model, ids(name)) for model in (compiled, plain))
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-12 * other.abs().max(), name
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", PACKINGS)
def test_the_operator_is_one_to_torch(name):
    """Its fake kernel, its schema and its backward; on rows of several documents."""
    shapes = [(1, 512, heads, 4) for heads in (4, 2, 2)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    operator = torch.ops.forgekit.attend_documents.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, (*inputs, ids(name)), test_utils=checks)
    found = operator(*inputs, ids(name))[0]
    expected = attend_causal(*inputs, doc_ids=ids(name))
    assert (found - expected).abs().max() <= 1e-14
