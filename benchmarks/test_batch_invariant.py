"""What the same bits for a token cost, whatever is computed beside it.

Forward and backward over packed rows, as training takes them, and a decode of few rows, which
computes whole tiles for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from pairs import Times, band, ratio, take_turns

import forgekit as fk

ORDINARY, AGAIN, INVARIANT = "ordinary", "ordinary again", "batch_invariant"
SPEC = fk.TransformerSpec(
    vocab_size=4096, dim=256, layers=4, heads=4, kv_heads=2, ffn_dim=704, max_seq_len=512
)
ROWS, POSITIONS, DOCUMENTS, NEW, ROUNDS = 4, 512, 5, 64, 10
MOST = 3.0


def _times(dtype: torch.dtype, use: Callable[[fk.Transformer], object]) -> Times:
    options = {ORDINARY: False, AGAIN: False, INVARIANT: True}
    models = {n: fk.Transformer(SPEC, batch_invariant=is_on) for n, is_on in options.items()}
    return take_turns({n: partial(use, m.to(dtype)) for n, m in models.items()}, ROUNDS)


def _train(model: fk.Transformer) -> None:
    ids = torch.arange(ROWS * POSITIONS).view(ROWS, POSITIONS) % SPEC.vocab_size
    doc_ids = (torch.arange(POSITIONS) * DOCUMENTS // POSITIONS).expand(ROWS, -1)
    fk.cross_entropy(model(ids, doc_ids=doc_ids), ids).sum.backward()


def _generate(model: fk.Transformer) -> None:
    fk.generate(model, torch.ones(ROWS, 8, dtype=torch.int64), max_new_tokens=NEW, log_probs=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("what", "use", "tokens", "most"),
    [
        ("forward and backward of packed rows", _train, ROWS * POSITIONS, MOST),
        (f"{NEW} new tokens of {ROWS} rows", _generate, ROWS * NEW, float("inf")),
    ],
)
def test_the_same_bits_for_a_token(show, dtype, what, use, tokens, most):
    times = _times(dtype, use)
    noise = band(times, AGAIN, ORDINARY)
    for name in (ORDINARY, INVARIANT):
        cost = ratio(times, name, ORDINARY)
        rate = tokens / sorted(times[name])[ROUNDS // 2]
        show(f"{what}, {dtype}", times, name, ratio=cost, band=noise, per_second=rate)
        assert cost <= most + noise, f"{name}: {cost:.2f} times, A/A {noise:.3f}"
