"""Logits of tiny random models of transformers, from what is on disk; routing of DeepSeek-V3."""

from __future__ import annotations

import attrs
import pytest
import torch
from oracle import relative_error
from safetensors.torch import load_file

import forgekit as fk
from forgekit.model.huggingface_names import from_huggingface
from forgekit.model.moe import MoE
from forgekit.model.routing import Routing

SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000.0},
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
SPEC = fk.TransformerSpec(
    vocab_size=31,
    dim=32,
    layers=3,
    heads=4,
    kv_heads=2,
    ffn_dim=40,
    max_seq_len=32,
    norm_eps=1e-4,
    rope_theta=5_000.0,
    qk_norm=True,
)
QWEN = {
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 2,
    "head_dim": 8,
}
MODELS = {
    "Qwen3Moe": (
        QWEN | {"norm_topk_prob": True},
        fk.MoESpec(experts=6, top_k=3, ffn_dim=12, shared=0, first=1, every=2),
    ),
    "Qwen3Moe, not renormalised": (
        QWEN | {"norm_topk_prob": False},
        fk.MoESpec(experts=6, top_k=3, ffn_dim=12, shared=0, first=1, every=2, renormalize=False),
    ),
    "Mixtral": (
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        fk.MoESpec(experts=5, top_k=2, ffn_dim=40, shared=0),
    ),
    "Dots1": (
        {
            "moe_intermediate_size": 12,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
            "layer_types": ["full_attention"] * 3,
        },
        fk.MoESpec(
            experts=6,
            top_k=2,
            ffn_dim=12,
            shared=2,
            first=1,
            router="sigmoid",
            scale=2.5,
            selection_bias=True,
        ),
    ),
}


def scatter(model):
    """Norms that are not 1 and biases that are not 0, in place."""
    generator = torch.Generator().manual_seed(2)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("norm.weight", "correction_bias")):
            with torch.no_grad():
                noise = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(noise / 4 if name.endswith("bias") else 0.5 + noise)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_those_of_transformers(kind, tmp_path):
    import transformers

    name = kind.split(",")[0]
    options, moe = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    scatter(theirs)
    theirs.save_pretrained(tmp_path)
    ours = fk.Transformer(attrs.evolve(SPEC, moe=moe, qk_norm=name != "Mixtral"))
    loaded = from_huggingface(load_file(tmp_path / "model.safetensors"))
    missing, unexpected = ours.load_state_dict(loaded, strict=False)
    assert unexpected == []
    assert all(one.endswith("router.load") for one in missing)
    ids = torch.randint(0, 31, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(ids).logits, ours(ids)
    assert relative_error({"logits": found}, {"logits": expected}) < 1e-5
    for _, block in ours.named_modules():
        if isinstance(block, MoE):  # routing is no small part of it
            block.experts.down.data.zero_()
    with torch.no_grad():
        assert relative_error({"logits": ours(ids)}, {"logits": expected}) > 1e-2


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


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.vision.weight"], r"^'model\.vision\.weight' is no tensor of a model that has"),
        (
            [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in (0, 2)],
            r"^layers\.0\.feed_forward\.experts\.up has experts up to 2 and \[1\] are missing; ",
        ),
    ],
)
def test_names_of_other_models_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        from_huggingface(dict.fromkeys(names, torch.ones(2)))
