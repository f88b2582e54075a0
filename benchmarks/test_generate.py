"""New tokens from kept keys and values, beside whole texts and beside transformers.

A whole text for each new token takes a minute and a half for 512 of them. So it is timed where the
text has grown by 1/16, 3/16 ... 15/16 of them, two tokens each, and that time is multiplied: what a
token costs grows with the length, and these lengths are the middles of eight equal parts.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from pairs import Times, band, ratio, take_turns
from torch import nn

import forgekit as fk

OURS, AGAIN, WHOLE, THEIRS = "forgekit", "forgekit again", "the whole text", "transformers"
SPEC = fk.TransformerSpec(
    vocab_size=4096, dim=256, layers=4, heads=4, kv_heads=2, ffn_dim=704, max_seq_len=1024
)
ROWS, PROMPT, NEW, ROUNDS = 4, 8, 512, 5
PARTS, TIMED = 8, 2
"""Of the whole texts: lengths, and new tokens at each."""

LEAST_OVER_WHOLE = 10.0
LEAST_OVER_THEIRS = 1.2


class Foreign(nn.Module):
    """A model of which nothing is known: it runs over the whole text for each token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[b s]`` to ``[b s v]``."""
        return self.model(ids)


@pytest.fixture(scope="module")
def times(tmp_path_factory) -> Times:
    model = fk.Transformer(SPEC)
    folder = tmp_path_factory.mktemp("model") / "llama"
    fk.save_huggingface(model, folder, like="llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    # 0 would be padding to transformers.
    text = 1 + torch.arange(ROWS * (PROMPT + NEW)).reshape(ROWS, -1) % (SPEC.vocab_size - 1)
    prompt = text[:, :PROMPT]

    def make(some: nn.Module, count: int = NEW, length: int = PROMPT) -> torch.Tensor:
        return fk.generate(some, text[:, :length], max_new_tokens=count, temperature=0)

    def run_whole() -> None:
        for part in range(PARTS):
            make(Foreign(model), TIMED, PROMPT + NEW * (2 * part + 1) // (2 * PARTS))

    def run_theirs(count: int = NEW) -> torch.Tensor:
        return theirs.generate(
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )

    assert torch.equal(make(model, 16), run_theirs(16))
    assert torch.equal(make(model, 16), make(Foreign(model), 16))
    entries = {
        OURS: lambda: make(model),
        AGAIN: lambda: make(model),
        THEIRS: run_theirs,
        WHOLE: run_whole,
    }
    times = take_turns(entries, ROUNDS, warmup=0)  # both have made tokens above
    return {**times, WHOLE: [seconds * NEW / (PARTS * TIMED) for seconds in times[WHOLE]]}


@pytest.mark.parametrize("name", [OURS, AGAIN, WHOLE, THEIRS])
def test_generated_tokens(show, times, name):
    noise = band(times, AGAIN, OURS)
    here = ratio(times, name, OURS)
    rate = ROWS * NEW / sorted(times[name])[ROUNDS // 2]
    show(f"{NEW} new tokens of {ROWS} rows", times, name, ratio=here, band=noise, per_second=rate)
    least = {WHOLE: LEAST_OVER_WHOLE, THEIRS: LEAST_OVER_THEIRS}.get(name, 0)
    assert here >= least - noise, f"{here:.2f} times ours, A/A {noise:.3f}"
