"""What a training step of adapters costs beside peft's, with the same model from transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import Times, band, ratio, take_turns

import forgekit as fk

PEFT, AGAIN, OURS = "peft", "peft again", "add_lora"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROUNDS = 20
RANK, ALPHA = 8, 32.0


@pytest.fixture(scope="module")
def measured() -> Times:
    build = {PEFT: _of_peft, AGAIN: _of_peft, OURS: _ours}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        entries = {name: _step(make(_base())) for name, make in build.items()}
        first = {name: float(step()) for name, step in entries.items()}
        assert first[OURS] == pytest.approx(first[PEFT], rel=1e-5), "the two do different work"
        return take_turns(entries, ROUNDS)


@pytest.mark.parametrize("name", [PEFT, AGAIN, OURS])
def test_lora_step(show, measured, name):
    here, noise = ratio(measured, name, PEFT), band(measured, AGAIN, PEFT)
    show("a step of adapters, float32, dim 256", measured, name, ratio=here, band=noise)
    assert name != OURS or here <= 1 + noise, f"{here:.3f} of peft's, A/A {noise:.3f}"


def _base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def _of_peft(base: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS))
    return peft.get_peft_model(base, config)


def _ours(base: Any) -> Any:
    return fk.add_lora(base, rank=RANK, alpha=ALPHA, targets=[f"*.{name}" for name in TARGETS])


def _step(model: Any) -> Callable[[], torch.Tensor]:
    """Forward, backward and AdamW: the same code for both, so that layers alone differ."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    ids = torch.arange(4 * 128).view(4, 128) % 512
    model.train()

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
