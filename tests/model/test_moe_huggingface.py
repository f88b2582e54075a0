"""Experts and their routing, compared with DeepSeek-V3 in transformers."""

from __future__ import annotations

import pytest
import torch
from lab import relative_error

import forgekit as fk
from forgekit.model.moe import MoE
from forgekit.model.routing import Routing


@pytest.mark.parametrize("renormalize", [True, False])
def test_the_layer_equals_that_of_deepseek_v3(renormalize):
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    config = deepseek.DeepseekV3Config(
        hidden_size=32,
        moe_intermediate_size=12,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=renormalize,
    )
    torch.manual_seed(3)
    theirs = deepseek.DeepseekV3MoE(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.gate.e_score_correction_bias.copy_(torch.randn(8) / 2)
    spec = fk.MoESpec(
        experts=8,
        top_k=3,
        ffn_dim=12,
        shared=2,
        router="sigmoid",
        renormalize=renormalize,
        scale=2.5,
        groups=4,
        top_groups=2,
        selection_bias=True,
    )
    ours = MoE(32, spec, "layer")
    gate, up = theirs.experts.gate_up_proj.detach().chunk(2, dim=1)
    shared = theirs.shared_experts.state_dict()
    ours.load_state_dict(
        {
            "router.weight": theirs.gate.weight,
            "router.load": ours.router.load,
            "router.selection_bias": theirs.gate.e_score_correction_bias,
            "experts.gate": gate,
            "experts.up": up,
            "experts.down": theirs.experts.down_proj,
            **{f"shared.{name.replace('_proj', '')}": t for name, t in shared.items()},
        }
    )
    x = torch.randn(3, 9, 32)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, found = theirs(first), ours(second)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    expected.square().sum().backward(), found.square().sum().backward()
    gradients = {"x": second.grad, "router": ours.router.weight.grad, "up": ours.experts.up.grad}
    wanted = {
        "x": first.grad,
        "router": theirs.gate.weight.grad,
        "up": theirs.experts.gate_up_proj.grad.chunk(2, dim=1)[1],
    }
    assert relative_error(gradients, wanted) < 1e-5
    _, choice, _ = ours.router(x, Routing())
    indices = theirs.gate(x)[2].view(choice.shape)
    assert torch.equal(choice.sort(-1).values, indices.sort(-1).values)
    ours.router.selection_bias.zero_()  # without the bias others are chosen
    assert not torch.equal(ours.router(x, Routing())[1].sort(-1).values, choice.sort(-1).values)
