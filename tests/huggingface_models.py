"""Tiny random models of transformers, written to disk as people publish them."""

from __future__ import annotations

import attrs
import torch

import forgekit as fk

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
YARN = {"factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
EXPERTS = {"moe_intermediate_size": 12, "norm_topk_prob": True, "head_dim": 16}
QWEN_MOE = {**EXPERTS, "num_experts": 6, "num_experts_per_tok": 3, "decoder_sparse_step": 2}
DOTS = {
    **EXPERTS,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "layer_types": ["full_attention"] * 3,
}


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **values}}


MODELS = {
    "Llama": {},
    "Llama tied": {"tie_word_embeddings": True},
    "Llama head_dim": {"head_dim": 12},
    "Llama linear": rope("linear", factor=3.0),
    "Llama llama3": rope("llama3", factor=4.0, **BANDS),
    "Llama yarn": rope("yarn", **YARN),
    "Llama yarn, attention_factor": rope("yarn", **YARN, attention_factor=1.3),
    "Llama yarn, whole channels": rope("yarn", **YARN, truncate=False),
    "Mistral": {"sliding_window": 24, "max_position_embeddings": 24},
    "Qwen2": {},
    "Qwen2 tied": {"tie_word_embeddings": True, **rope("yarn", **YARN)},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Qwen3 untied": {"head_dim": 16},
    "Qwen3Moe": QWEN_MOE,
    "Qwen3Moe dense first": {**QWEN_MOE, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "Qwen3Moe not renormalised": {**QWEN_MOE, "norm_topk_prob": False},
    "Mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "Dots1": DOTS,
    "Dots1 groups": {**DOTS, "n_group": 3, "topk_group": 2},
}

DEFAULTS = (
    "Llama llama3",
    "Mistral",
    "Qwen2",
    "Qwen3 untied",
    "Mixtral",
    "Qwen3Moe",
    "Dots1 groups",
)
"""One of each family."""

KINDS = ("sliding_attention", "full_attention", "sliding_attention")
WINDOWS = {"head_dim": 8, "sliding_window": 6, "layer_types": [*KINDS]}
MORE = {
    "Gemma3": {**WINDOWS, "tie_word_embeddings": True, "rope_parameters": None},
    "Gemma3 untied": {**WINDOWS, "tie_word_embeddings": False, "rope_parameters": None},
    "Olmo2": {},
    "GptOss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2, **rope("yarn", **YARN)},
    "Phi3": {"pad_token_id": 0},
    "SeedOss": {"head_dim": 8, "attention_bias": False, "attention_dropout": 0.0},
}
"""What is no row of our families, and runs as it is."""


def make_model(kind, dtype=torch.float32, **options):
    """A random model with norms that are not 1 and biases that are not 0."""
    import transformers

    name = kind.split()[0]
    options = SIZES | (MODELS | MORE)[kind] | options
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**options)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.rand(tensor.shape, generator=generator)
            if name.endswith("norm.weight"):
                tensor.copy_(0.5 + noise)
            elif name.endswith(("proj.bias", "sinks", "router.bias", "proj_bias")):
                tensor.copy_(noise - 0.3)
            elif name.endswith("correction_bias"):
                tensor.copy_(noise / 4)
    return model.to(dtype)


def save_model(kind, directory, *, max_shard_size="30KB", **options):
    """Write one, sharded over several files, and return it."""
    model = make_model(kind, **options)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def load(directory, **changes):
    """Our model of a directory, with its weights."""
    model = fk.Transformer(attrs.evolve(fk.huggingface_spec(directory), **changes), seed=5)
    fk.load_huggingface(model, directory)
    return model.eval()


def some_ids(vocab=31, shape=(2, 24)):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))


def logits_of(model, ids):
    with torch.no_grad():
        out = model(ids)
    return getattr(out, "logits", out)
