"""What the same bits for a token cost, whatever is computed beside it.

Forward and backward over packed rows, as training takes them, and a decode of few rows, which
computes whole tiles for them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

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


def _train(model: fk.Transformer) -> None:
    ids = torch.arange(ROWS * POSITIONS).view(ROWS, POSITIONS) % SPEC.vocab_size
    doc_ids = (torch.arange(POSITIONS) * DOCUMENTS // POSITIONS).expand(ROWS, -1)
    fk.cross_entropy(model(ids, doc_ids=doc_ids), ids).sum.backward()


def _generate(model: fk.Transformer) -> None:
    fk.generate(model, torch.ones(ROWS, 8, dtype=torch.int64), max_new_tokens=NEW, log_probs=True)


USES = {
    "forward and backward of packed rows": (_train, ROWS * POSITIONS, MOST),
    f"{NEW} new tokens of {ROWS} rows": (_generate, ROWS * NEW, float("inf")),
}
KINDS = [(what, dtype) for what in USES for dtype in (torch.float32, torch.bfloat16)]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def timed(request) -> tuple[Any, Times]:
    what, dtype = request.param
    use, *facts = USES[what]
    options = {ORDINARY: False, AGAIN: False, INVARIANT: True}
    models = {n: fk.Transformer(SPEC, batch_invariant=is_on) for n, is_on in options.items()}
    entries = {n: partial(use, model.to(dtype)) for n, model in models.items()}
    return (f"{what}, {dtype}", *facts), take_turns(entries, ROUNDS)


@pytest.mark.parametrize("name", [ORDINARY, AGAIN, INVARIANT])
def test_the_same_bits_for_a_token(show, timed, name):
    (what, tokens, most), times = timed
    noise, cost = band(times, AGAIN, ORDINARY), ratio(times, name, ORDINARY)
    rate = tokens / sorted(times[name])[ROUNDS // 2]
    show(what, times, name, ratio=cost, band=noise, per_second=rate)
    assert cost <= most + noise, f"{name}: {cost:.2f} times, A/A {noise:.3f}"
