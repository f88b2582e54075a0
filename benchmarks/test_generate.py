"""New tokens from kept keys and values, beside whole texts and beside transformers.

A whole text for each new token takes a minute and a half for 512 of them. So it is timed where the
text has grown by 1/16, 3/16 ... 15/16 of them, two tokens each, and that time is multiplied: what a
token costs grows with the length, and these lengths are the middles of eight equal parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

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


def text_of(rows: int, length: int, spec: fk.TransformerSpec) -> torch.Tensor:
    """Ids without 0, which would be padding to transformers."""
    return 1 + torch.arange(rows * length).reshape(rows, -1) % (spec.vocab_size - 1)


def in_transformers(model: fk.Transformer, folder: Path) -> Callable[..., torch.Tensor]:
    """Load a model into transformers; what it returns continues a prompt greedily."""
    weight = next(model.parameters())
    fk.save_huggingface(model, folder / "llama", like="llama")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=weight.dtype)
    theirs.to(weight.device)

    def generate(prompt: torch.Tensor, count: int = NEW) -> torch.Tensor:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        return theirs.generate(prompt, pad_token_id=0, **options)

    return generate


@pytest.fixture(scope="module")
def times(tmp_path_factory) -> Times:
    model = fk.Transformer(SPEC)
    text = text_of(ROWS, PROMPT + NEW, SPEC)
    theirs = in_transformers(model, tmp_path_factory.mktemp("model"))
    run_theirs = partial(theirs, text[:, :PROMPT])

    def make(some: nn.Module, count: int = NEW, length: int = PROMPT) -> torch.Tensor:
        return fk.generate(some, text[:, :length], max_new_tokens=count, temperature=0)

    def run_whole() -> None:
        for part in range(PARTS):
            make(Foreign(model), TIMED, PROMPT + NEW * (2 * part + 1) // (2 * PARTS))

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
