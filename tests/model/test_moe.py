"""Experts against formulas in float64: values, and the gradient of every parameter."""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import patch

import attrs
import pytest
import torch
import torch.nn.functional as F
from distributed.experts import Dense
from lab import full_tensors, relative_error

import forgekit as fk
from forgekit.model import moe as moe_module
from forgekit.model.moe import MoE
from forgekit.model.moe_spec import cosine_rate, linear_rate
from forgekit.model.routing import Routing
from forgekit.parallel.activation_checkpoint import recompute

DIM, ROWS, POSITIONS = 16, 3, 7
SPEC = fk.MoESpec(experts=6, top_k=2, ffn_dim=8, shared=0, scale=1.7)
GROUPS = {"groups": 3, "top_groups": 2}
TERMS = {"aux_loss": 0.3, "z_loss": 0.2, "sequence_aux_loss": 0.4}
SEATS = {"shared": 2, "capacity": 1.1}
KINDS = {
    "softmax": {},
    "sigmoid": {"router": "sigmoid", "top_k": 3},
    "groups": {**GROUPS, "top_k": 3, "renormalize": False},
    "sigmoid groups and bias": {"router": "sigmoid", "selection_bias": True, **GROUPS},
    "shared": {"shared": 3},
    "capacity": {"capacity": 0.8},
    "turns": {"force_balance": True, "top_k": 4},
    "all terms": {"router": "sigmoid", "selection_bias": True, **TERMS, **SEATS},
}
MASKS = ("all", "padding", "padding and targets")


def build(dtype=torch.float64, dim=DIM, seed=0, **changes):
    """A layer whose router prefers some experts, so that others get little or nothing."""
    generator = torch.Generator().manual_seed(seed)
    layer = MoE(dim, attrs.evolve(SPEC, **changes), "layer").double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).double() / 3)
        layer.router.weight[-1] = layer.router.weight[-1] * 0.1
        load = torch.rand(layer.spec.experts, generator=generator) + 0.1
        layer.router.load.copy_(load / load.sum())
        if layer.router.selection_bias is not None:
            bias = torch.randn(layer.spec.experts, generator=generator) / 4
            layer.router.selection_bias.copy_(bias)
            layer.router.selection_bias[0] = -9.0  # never chosen
    return layer.to(dtype)


def inputs(mask="all", dtype=torch.float64, dim=DIM):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, POSITIONS, dim, generator=generator, dtype=torch.float64).to(dtype)
    is_token = targets = None
    if mask != "all":
        is_token = torch.arange(POSITIONS) < torch.tensor([[7], [4], [0]])
    if mask == "padding and targets":
        targets = is_token & (torch.arange(POSITIONS) % 3 != 1)
    return x, is_token, targets


def gradients(layer, x, value):
    given = {"x": x, **dict(layer.named_parameters())}
    found = torch.autograd.grad(value, [*given.values()], materialize_grads=True)
    return dict(zip(given, found, strict=True))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_experts_that_compute_every_token(kind, mask):
    layer = build(**KINDS[kind])
    dense = Dense(layer)
    x, is_token, targets = inputs(mask)
    x.requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).double()
    expected = dense(x, Routing(is_token=is_token, targets=targets))
    wanted = gradients(layer, x, (expected * direction).sum() + sum(dense.terms))
    routing = Routing(scale=0.125, is_token=is_token, targets=targets)
    out = layer(x, routing)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    found = gradients(layer, x, 0.125 * (out * direction).sum())
    assert relative_error({n: g / 0.125 for n, g in found.items()}, wanted) < 1e-12
    note = routing.notes["layer"]
    assert note["counts"].tolist() == dense.counts.tolist()
    assert int(note["kept"]) == dense.kept
    assert (dense.kept < dense.counts.sum()) == (layer.spec.capacity is not None)


# Grouped products


@pytest.mark.parametrize(("kind", "mask"), [("capacity", "all"), ("shared", "padding")])
@pytest.mark.parametrize(("dim", "is_grouped"), [(16, True), (18, False)])
def test_grouped_products_equal_a_loop_over_experts(kind, mask, dim, is_grouped):
    """Strides of 18 float32 are no multiple of 16 bytes."""
    layer = build(torch.float32, dim, **KINDS[kind])
    twin = build(torch.float64, dim, **KINDS[kind])
    twin.load_state_dict(layer.state_dict())
    x, is_token, _ = inputs(mask, torch.float32, dim)
    y = x.double()
    x.requires_grad_(), y.requires_grad_()
    with patch.object(moe_module.F, "grouped_mm", side_effect=F.grouped_mm) as called:
        out = layer(x, Routing(is_token=is_token))
    assert called.called == is_grouped
    found = gradients(layer, x, (out * out.detach()).sum())
    expected = twin(y, Routing(is_token=is_token))
    wanted = gradients(twin, y, (expected * expected.detach()).sum())
    assert relative_error(found, wanted) < 1e-5


def spoil(rows, end):
    """NaN in place of the rows past an offset."""
    return torch.cat([rows[:end], torch.full_like(rows[end:], math.nan)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "mask"), [("capacity", "all"), ("softmax", "padding"), ("all terms", "padding")]
)
def test_rows_past_the_last_offset_reach_neither_values_nor_gradients(kind, mask, dtype):
    layer = build(dtype, **KINDS[kind])
    with torch.no_grad():  # experts without tokens at both ends
        layer.router.weight[[0, -1]] = 0
    x, is_token, _ = inputs(mask, dtype)
    x = x.abs().requires_grad_()  # and the others' scores are above 0
    layer.router.weight.data.abs_()

    def run():
        out = layer(x, Routing(is_token=is_token))
        return {"out": out.detach(), **gradients(layer, x, out.float().square().sum())}

    clean, calls, product = run(), [], F.grouped_mm

    def poisoned(rows, weight, *, offs):
        """Forward and backward."""
        end = int(offs[-1])
        calls.append(len(rows) > end)
        rows = rows.clone()
        rows.register_hook(lambda gradient: spoil(gradient, end))
        return spoil(product(rows, weight, offs=offs), end)

    with patch.object(F, "grouped_mm", poisoned):
        found = run()
    assert calls == [True] * 3
    for name, expected in clean.items():
        assert found[name].isfinite().all(), name
        assert torch.equal(found[name], expected), name


def test_no_token_at_all_leaves_gradients_of_zero():
    layer = build(torch.float32, shared=1)
    x = inputs(dtype=torch.float32)[0].requires_grad_()
    out = layer(x, Routing(is_token=torch.zeros(ROWS, POSITIONS, dtype=torch.bool)))
    assert torch.equal(out, layer.shared(x))
    out.sum().backward()
    assert all((p.grad == 0).all() for p in layer.experts.parameters())


# Casts


def test_buffers_stay_float32_under_every_cast():
    layer = build(selection_bias=True)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        fresh = MoE(DIM, layer.spec, "layer")
    finally:
        torch.set_default_dtype(default)
    assert {b.dtype for b in fresh.buffers()} == {torch.float32}
    for cast in (layer.bfloat16, layer.half, layer.double, partial(layer.to, torch.float16)):
        cast()
        for name, buffer in layer.named_buffers():
            assert torch.equal(buffer, before[name]), name
            assert buffer.dtype == torch.float32
    layer.load_state_dict({n: t.bfloat16() for n, t in fresh.state_dict().items()})
    assert {b.dtype for b in layer.buffers()} == {torch.float32}


def test_routers_compute_in_float32_under_autocast_and_in_16_bits():
    layer = build(torch.bfloat16)
    x = inputs(dtype=torch.bfloat16)[0]
    scores = F.linear(x.float(), layer.router.weight.float()).softmax(-1)
    chosen = scores.topk(2)
    expected = chosen.values / chosen.values.sum(-1, keepdim=True) * SPEC.scale
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights, choice, _ = layer.router(x, Routing())
    assert weights.dtype == torch.float32
    assert torch.equal(choice, chosen.indices)
    assert torch.allclose(weights, expected, rtol=1e-6)
    assert layer(x).dtype == torch.bfloat16


# Rates


def test_rates_are_functions_of_step_and_total():
    assert linear_rate(0.1, warmup=4)(9, None) == 0.1
    assert [cosine_rate(0.2)(step, 8) for step in (0, 8)] == pytest.approx([0.2, 0.0])
    assert [rate(0.3), rate(lambda step, total: step / total), SPEC.rate(5, None)] == [0.3, 0.25, 0]


# The model


TINY_MOE = attrs.evolve(SPEC, shared=1, first=1, every=2, selection_bias=True)
TINY = fk.TransformerSpec(
    vocab_size=19, dim=16, layers=4, heads=2, kv_heads=1, ffn_dim=24, max_seq_len=8, moe=TINY_MOE
)
IDS = torch.randint(0, 19, (2, 6), generator=torch.Generator().manual_seed(0))
LAYERS = ["layers.1.feed_forward", "layers.3.feed_forward"]


def tiny(**changes):
    model = fk.Transformer(attrs.evolve(TINY, moe=attrs.evolve(TINY.moe, **changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(12)
    return model


def test_every_second_block_from_the_first_one_on_has_experts():
    model = tiny()
    assert list(model.spec.routed.values()) == LAYERS
    assert [isinstance(block.feed_forward, MoE) for block in model.layers] == [False, True] * 2
    ends = [
        name for name, _ in model.named_parameters() if "feed_forward" in name and "down" in name
    ]
    assert all(model.initial_std(name) < 0.02 for name in ends)
    assert len(ends) == 2 + 2 * len(LAYERS)


@pytest.mark.parametrize("what", ["full", "selective"])
def test_recomputation_repeats_the_choice_of_the_forward(what):
    """Also when the bias has moved in between, as a pipeline's next micro-batch might see it."""

    def run(model, *, moves):
        routing = Routing()
        loss = model(IDS, routing=routing).square().sum()
        noted = {layer: dict(note) for layer, note in routing.notes.items()}
        if moves:
            for layer in LAYERS:
                model.get_submodule(layer).router.selection_bias.add_(torch.arange(6.0))
        loss.backward()
        for layer in LAYERS:
            assert torch.equal(routing.notes[layer]["counts"], noted[layer]["counts"])
        return full_tensors(model, gradients=True)

    expected = run(tiny(z_loss=0.1), moves=False)
    model = tiny(z_loss=0.1)
    for block in model.layers:
        recompute(block, what)
    found = run(model, moves=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def dense():
    return fk.Transformer(attrs.evolve(TINY, moe=None))


def rate(bias_rate):
    return attrs.evolve(SPEC, bias_rate=bias_rate).rate(2, 8)


REFUSED = {
    r"^targets has shape \(2, 5\)": lambda: tiny()(IDS, targets=IDS[:, 1:] > 3),
    r"^'capacity' must be > 0\.0: 0$": lambda: attrs.evolve(SPEC, capacity=0),
    r"^router is 'tanh'; it must be one of": lambda: attrs.evolve(SPEC, router="tanh"),
    "^groups is 3 and top_groups None; give both": lambda: attrs.evolve(SPEC, groups=3),
    "^top_k 3 is above the 2 exp": lambda: attrs.evolve(SPEC, groups=3, top_groups=1, top_k=3),
    r"^moe\.first is 4, but layers 4: no block": lambda: tiny(first=4),
    "^bias_rate is -2; it must be": lambda: rate(lambda step, _: -step),
    r"pass make_step\(\.\.\., total=steps\)": lambda: cosine_rate(0.1)(3, None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_train_something_else_is_refused(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
