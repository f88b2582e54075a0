"""Compilation and recomputation: the gradient stays, less is kept, and no graph breaks.

The default run compiles blocks once; the rest is for the oracle.
"""

from __future__ import annotations

import warnings
from functools import partial
from unittest.mock import patch

import attrs
import pytest
import torch
from covering import some_of
from lab import SPEC, Watch, full_tensors, lay_out, logits_loss, mean_gradients, reference_gradients
from lab import relative_error as error
from parallel.test_context_parallel import Sockets, draw
from pool import run_again
from tensordict import TensorDict
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config

import forgekit as fk
from forgekit.model.moe import Experts
from forgekit.parallel.activation_checkpoint import compile_blocks, recompute
from forgekit.parallel.context.context_parallel import apply_context

# torch's own compiler does both, at import and while it traces.
WARNINGS = (
    "ignore:`torch.jit.script_method` is deprecated",
    r"ignore:The \.grad attribute of a Tensor that is not a leaf",
)
pytestmark = [pytest.mark.filterwarnings(text) for text in WARNINGS]
IDS = torch.randint(0, SPEC.vocab_size, (4, 12), generator=torch.Generator().manual_seed(3))
ONE_LAYER = attrs.evolve(SPEC, layers=1)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def kept_and_gradient(what, budget=1.0):
    """Bytes that a block's forward keeps for backward, parameters aside, and the gradients."""
    model = fk.Transformer(ONE_LAYER)
    if what is not None:
        recompute(model.layers[0], what)
        compile_blocks([model.layers[0]], what, backend="aot_eager", memory_budget=budget)
    fk.cross_entropy(model(IDS), IDS)  # compiles
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fk.cross_entropy(model(IDS), IDS).sum
    size = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in parameters)
    loss.backward()
    return size, full_tensors(model, gradients=True)


@pytest.mark.oracle
@pytest.mark.parametrize("what", ["budget", "full", "selective"])
def test_what_is_recomputed_is_not_kept_and_the_gradient_stays(what):
    expected = kept_and_gradient(None)[1]
    whole, gradients = kept_and_gradient("budget")
    assert error(gradients, expected) < 1e-6
    torch._dynamo.reset()
    counters.clear()
    found, gradients = kept_and_gradient(what, budget=0.5)
    assert counters["stats"]["unique_graphs"] == 1  # what is repeated is compiled all the same
    assert 1.25 * found < whole
    assert error(gradients, expected) < 1e-6
    assert config.activation_memory_budget == 1.0  # other programs compile as before


@pytest.mark.parametrize("what", ["full", "selective"])
def test_a_block_can_be_repeated_for_its_inputs_and_again_for_its_weights(what):
    """Pipeline schedules that part the backward pass do so."""
    block, found = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3)), {}
    for how in ("none", what):
        recompute(block, how)
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        loss = block(x).square().sum()
        (inputs,) = torch.autograd.grad(loss, x, retain_graph=True)
        found[how] = (inputs, *torch.autograd.grad(loss, list(block.parameters())))
    for plain, repeated in zip(found["none"], found[what], strict=True):
        torch.testing.assert_close(repeated, plain, rtol=1e-6, atol=0)


def test_selective_recomputation_repeats_no_product_and_no_attention():
    counts = {}
    for what in ("none", "full", "selective"):
        model = fk.Transformer(SPEC)
        for layer in model.layers:
            recompute(layer, what)
        with Watch() as seen:
            fk.cross_entropy(model(IDS), IDS).sum.backward()
        products = sum(name in ("mm", "addmm", "bmm") for name in seen.operations)
        counts[what] = (
            products,
            seen.operations.count("_scaled_dot_product_flash_attention_for_cpu"),
        )
    assert counts["selective"] == counts["none"]
    assert (counts["none"][1], counts["full"][1]) == (SPEC.layers, 2 * SPEC.layers)
    assert counts["full"][0] > counts["none"][0]


PACKINGS = {
    "one document": [0] * 16,
    "three": [0] * 3 + [1] * 7 + [2] * 6,
    "padding": [0] * 12 + [-1] * 4,
    "an id that comes back": [0] * 8 + [1] * 4 + [0] * 4,
}


@pytest.mark.parametrize("backend", some_of(["aot_eager", "inductor"], "inductor"))
def test_blocks_that_are_alike_have_one_graph_for_all_packings(backend):
    """Under a mask: a graph that read the ids would be compiled again for each packing."""
    plain, compiled = (fk.Transformer(attrs.evolve(SPEC, dim=48)).double() for _ in range(2))
    compile_blocks(compiled.layers, "budget", backend=backend)
    for name, documents in PACKINGS.items():
        results = []
        for model in (compiled, plain):
            model.zero_grad()
            out = model(torch.arange(16)[None] * 5 % 37, doc_ids=torch.tensor([documents]))
            out.square().sum().backward()
            results.append([out.detach(), *(parameter.grad for parameter in model.parameters())])
        for one, other in zip(*results, strict=True):
            assert (one - other).abs().max() <= 1e-12 * other.abs().max(), name
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_compile(dtype):
    """The compiler's own shapes of a grouped product are those of bfloat16 alone."""
    experts = Experts(16, 8, 6).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    x, counts = torch.randn(21, 16, dtype=dtype), torch.tensor([4, 0, 9, 5, 3, 0])
    found = torch.compile(experts, backend="eager")(x, counts)
    assert torch.equal(found, experts(x, counts))


# On ranks: one job, so that the compiler is loaded once


def sockets(world, method, doc_ids):
    """How far compiled attention over slices is from plain one; as one graph, without a break."""
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=1, cp=world), device="cpu")
    model = Sockets()
    apply_context(model, mesh, method)
    *inputs, upstream = draw(8, 2, torch.float64)
    inputs = [x.requires_grad_() for x in inputs]

    def twice(q, k, v):
        return model.attend(q * 2, k, v, doc_ids=doc_ids) * 2

    compiled = torch.compile(twice, backend="aot_eager", fullgraph=True)
    found, wanted = (
        (out, *torch.autograd.grad(out, inputs, upstream))
        for out in (compiled(*inputs), twice(*inputs))
    )
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, wanted, strict=True))


TENSOR = attrs.evolve(ONE_LAYER, vocab_size=40, dim=32, heads=8, kv_heads=4)
BATCH = TensorDict({"input_ids": IDS, "labels": IDS.roll(-1, 1)}, [4])


def compile_on_ranks(rank, world, backend):
    torch._dynamo.reset()
    counters.clear()
    for text in WARNINGS:
        warnings.filterwarnings("ignore", text.removeprefix("ignore:"))
    chosen = partial(compile_blocks, backend=backend)
    with patch("forgekit.parallel.parallelize.compile_blocks", chosen):
        state = lay_out(fk.Transformer(TENSOR).double(), {"tp": world}, compile=True)
    gradients = mean_gradients(state, [BATCH], logits_loss)
    graphs = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    documents = (torch.arange(48) // 18 + 2 * rank).expand(2, 48).contiguous()
    errors = [sockets(world, "ring", documents), sockets(world, "ulysses", None)]
    return gradients, graphs, errors


@pytest.mark.oracle
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_what_ranks_share_compiles_into_whole_graphs(backend):
    """The first step's look at what crosses breaks none."""
    expected, _ = reference_gradients(fk.Transformer(TENSOR), [[BATCH]])
    for gradients, (graphs, breaks), errors in run_again(compile_on_ranks, 2, backend):
        assert error(gradients, expected) < 1e-10
        assert graphs >= 1
        assert not breaks
        assert max(errors) <= 1e-12
