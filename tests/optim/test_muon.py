"""Muon: what it computes, for which parameters, and what it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from optim.optimizers import draw
from torch import nn

import forgekit as fk
from forgekit.optim import parameters_by_optimizer, roles_of

SHAPES = {"tall": (12, 5), "wide": (5, 12), "square": (7, 7)}
DENSE = {"vocab_size": 19, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24}


def stepped(parameters, make, gradients):
    """Parameters after a step for each list of gradients."""
    parameters = [nn.Parameter(p.clone()) for p in parameters]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


def muon(split=None, **options):
    """Make Muon of a list of matrices, whose names are numbers."""
    return lambda p: fk.muon(nn.ParameterList(p), roles={"*": "matrix"}, split=split, **options)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_it_is_the_formula_and_torchs_muon(adjust, monkeypatch):
    """Decay with lr * wd = 0.1; torch's is in bfloat16, and made to compute in float64."""
    weights = [draw(*shape, seed=3) for shape in SHAPES.values()]
    gradients = [[draw(*w.shape, seed=10 + s) for w in weights] for s in range(3)]
    options = {"lr": 0.2, "weight_decay": 0.5}
    plain = partial(torch.optim.Muon, adjust_lr_fn=adjust, **options)
    ours = stepped(weights, muon(adjust_lr=adjust, **options), gradients)
    torchs = stepped(weights, plain, gradients)
    exact = stepped(weights, muon(adjust_lr=adjust, ns_dtype=torch.float64, **options), gradients)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    torch.testing.assert_close(exact, stepped(weights, plain, gradients), rtol=0, atol=1e-12)
    for found, theirs, right in zip(ours, torchs, exact, strict=True):
        error, bound = (found - right).norm(), (theirs - right).norm()
        assert error < 1.5 * bound  # no farther from the exact result than torch's is
        assert (found - theirs).norm() < 2 * bound
        assert bound < 0.05 * right.norm()


def test_a_fused_matrix_is_its_parts_and_a_stack_its_matrices():
    """Rows of three matrices in one, and of each expert of a stack."""
    parts = [draw(rows, 6, seed=rows) for rows in (4, 9, 2)]
    grads = [draw(rows, 6, seed=20 + rows) for rows in (4, 9, 2)]
    make = {"ns_dtype": torch.float64, "lr": 0.1}
    expected = torch.cat(stepped(parts, muon(**make), [grads]))
    fused, both = muon({"0": (4, 9, 2)}, **make), [torch.cat(parts)] * 2
    found, whole = stepped(both, fused, [[torch.cat(grads)] * 2])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert (whole - expected).abs().max() > 0.01  # of which no pattern says anything
    stack, grad = torch.cat(parts).expand(3, -1, -1) * 2, draw(3, 15, 6, seed=5)
    (found,) = stepped([stack], fused, [[grad]])
    for expert in range(3):
        (alone,) = stepped([stack[expert]], fused, [[grad[expert]]])
        torch.testing.assert_close(found[expert], alone, rtol=0, atol=1e-12)


def test_matrices_go_to_muon_by_their_role_and_all_else_to_adamw():
    moe = fk.MoESpec(experts=4, top_k=2, ffn_dim=8, shared=1, first=1)
    model = fk.Transformer(
        fk.TransformerSpec(**DENSE, max_seq_len=8, qk_norm=True, qkv_bias=True, moe=moe)
    )
    attention = model.layers[0].attention
    attention.query.register_parameter("lora_a", nn.Parameter(torch.zeros(2, 16)))
    attention.query.register_module("lora_B", nn.Linear(2, 16, bias=False))
    model.layers[0].attention.key.weight.requires_grad_(False)
    optimizer = fk.muon(model, weight_decay=0.3, rest_lr_scale=4.0)
    found = parameters_by_optimizer(model, optimizer)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    ends = ("query", "key", "value", "output", "gate", "up", "down")
    inner = {name: name.removesuffix(".weight") for name in trainable if "layers" in name}
    matrices = {name for name, path in inner.items() if path.split(".")[-1] in ends}
    assert len(matrices) == 2 * (4 + 3) - 1 + 3  # attention, feed-forward; a frozen key; experts
    assert set(found["Muon"]) == matrices
    assert set(found["AdamW"]) == trainable - matrices
    roles = roles_of(model)
    assert roles["embedding.weight"] == "embedding"
    assert roles["output.weight"] == "head"
    assert roles["layers.1.feed_forward.router.weight"] == "router"
    assert roles["layers.1.attention.query_norm.weight"] == roles["norm.weight"] == "norm"
    assert {roles[f"layers.0.attention.query.{name}"] for name in ("lora_a", "bias")} == {"other"}
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays[model.layers[0].attention.query.weight] == 0.3
    assert decays[model.output.weight] == 0.3
    assert decays[model.embedding.weight] == decays[model.norm.weight] == 0.0
    assert [g.get("lr_scale", 1.0) for g in optimizer.param_groups] == [1.0, 4.0, 4.0]
