"""A budget for what a compiled block keeps: less is kept, and the gradient stays."""

from __future__ import annotations

import itertools
from functools import cache

import attrs
import pytest
import torch
from covering import some_of
from lab import SPEC, full_tensors, relative_error
from torch._functorch import config

import forgekit as fk
from forgekit.parallel import activation_checkpoint
from forgekit.parallel.activation_checkpoint import compile_blocks

IDS = torch.randint(0, SPEC.vocab_size, (4, 12), generator=torch.Generator().manual_seed(3))
ONE_LAYER = attrs.evolve(SPEC, layers=1)


# torch's own compiler does both, at import and while it traces.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _kept_and_gradient(what, **options):
    """Bytes that a block's forward keeps for backward, parameters aside, and the gradients."""
    model = fk.Transformer(ONE_LAYER)
    if what is not None:
        activation_checkpoint.recompute(model.layers[0], what)
        compile_blocks([model.layers[0]], what, backend="aot_eager", **options)
    fk.cross_entropy(model(IDS), IDS)  # compiles
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = fk.cross_entropy(model(IDS), IDS).sum
    bytes_kept = sum(
        tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters
    )
    loss.backward()
    return bytes_kept, full_tensors(model, gradients=True)


@cache
def _once(what, **options):
    """The same for tests that compare with it: compiled once."""
    torch._dynamo.reset()
    return _kept_and_gradient(what, **options)


@pytest.mark.parametrize(
    "budgets", [(1.0, 0.5), pytest.param((1.0, 0.5, 0.0), marks=pytest.mark.oracle)], ids=str
)
def test_a_smaller_budget_keeps_less_and_the_gradient_stays(budgets):
    expected = _once(None)[1]
    kept = []
    for budget in budgets:
        found, gradients = _once("budget", memory_budget=budget)
        assert relative_error(gradients, expected) < 1e-6
        kept.append(found)
    assert all(more > 1.3 * less for more, less in itertools.pairwise(kept))
    assert config.activation_memory_budget == 1.0  # other programs compile as before


@pytest.mark.parametrize("what", some_of(["full", "selective"], "full"))
def test_a_block_that_is_repeated_is_compiled_all_the_same(what):
    expected, (kept, _) = _once(None)[1], _once("budget", memory_budget=1.0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found, gradients = _kept_and_gradient(what)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert found < 0.8 * kept
    assert relative_error(gradients, expected) < 1e-6


@pytest.mark.parametrize("what", ["full", "selective"])
def test_a_block_can_be_repeated_for_its_inputs_and_again_for_its_weights(what):
    """Pipeline schedules that part the backward pass do so."""
    found = {}
    for how in ("none", what):
        block = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 3))
        for parameter in block.parameters():
            torch.nn.init.constant_(parameter, 0.3)
        activation_checkpoint.recompute(block, how)
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        loss = block(x).square().sum()
        (inputs,) = torch.autograd.grad(loss, x, retain_graph=True)
        found[how] = (inputs, *torch.autograd.grad(loss, list(block.parameters())))
    for plain, repeated in zip(found["none"], found[what], strict=True):
        torch.testing.assert_close(repeated, plain, rtol=1e-6, atol=0)


def test_blocks_that_are_alike_are_compiled_once():
    """Torch gives up on a ninth block whose backend is another object."""
    model = fk.Transformer(attrs.evolve(SPEC, layers=9))
    torch._dynamo.utils.counters.clear()
    compile_blocks(model.layers, "budget", backend="aot_eager")
    with torch.no_grad():
        model(IDS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
