"""Log-probabilities of sampling are those of the training forward, bit for bit, where it is asked.

The other side is the model's own forward over whole texts, ragged, padded or packed, with and
without a head; that it computes the right numbers is held to float64 without tiles.
"""

from __future__ import annotations

import attrs
import pytest
import torch
from lab import SPEC, full_tensors, relative_error
from ranks import run_again
from torch.nn.utils.rnn import pad_sequence

import forgekit as fk
from forgekit.model.batch_invariant import log_probs_of

WIDE = attrs.evolve(SPEC, vocab_size=211, max_seq_len=400)
LORA = {"rank": 4, "alpha": 8.0, "targets": ("*.query", "*.down", "*.output")}
TEMPERATURE = 0.8


def build(dtype=torch.float32, lora=None, spec=WIDE, **options):
    """A model that is far from indifferent, its adapters too."""
    model = fk.Transformer(spec, **{"batch_invariant": True, **options})
    if lora:
        model = fk.add_lora(model, **lora)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6).add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def prompts_of(count, seed=0, most=70):
    draw = torch.Generator().manual_seed(seed)
    sizes = [1, 16, 63, 64, *torch.randint(1, most, (count,), generator=draw).tolist()][:count]
    return [torch.randint(WIDE.vocab_size, (size,), generator=draw) for size in sizes]


def padded(model, texts):
    """Whole texts as rows, padded behind."""
    return list(model(pad_sequence(texts, batch_first=True)))


def alone(model, texts):
    return [model(text[None])[0] for text in texts]


def packed(model, texts):
    """Two texts a row behind padding, in another order, of which the model is told the ids alone."""
    order, rows, logits = torch.randperm(len(texts)).tolist(), [], {}
    for first in range(0, len(order), 2):
        mine, start = order[first : first + 2], 3
        ids = torch.cat([torch.zeros(3, dtype=torch.int64), *(texts[n] for n in mine)])
        documents = [torch.full((3,), -1), *(torch.full((len(texts[n]),), n) for n in mine)]
        rows.append((mine, ids, torch.cat(documents)))
    width = max(len(ids) for _, ids, _ in rows)
    for mine, ids, documents in rows:
        behind = (0, width - len(ids))
        pad = torch.nn.functional.pad
        row = model(pad(ids, behind)[None], doc_ids=pad(documents, behind, value=-1)[None])[0]
        start = 3
        for number in mine:
            logits[number] = row[start : start + len(texts[number])]
            start += len(texts[number])
    return [logits[number] for number in range(len(texts))]


DTYPES = (torch.float32, torch.bfloat16)
ADAPTERS = {"dense": None, "LoRA": LORA, "DoRA": {**LORA, "dora": True}}


def differing(model, prompts, forwards=(padded, alone, packed), **options):
    """How many log-probabilities are sampled, and of how many each forward finds other bits."""
    options = {"temperature": TEMPERATURE, "log_probs": True, **options}
    texts, sampled = fk.generate(model, prompts, **options)
    counts = []
    for forward in forwards:
        with torch.no_grad():
            every = [log_probs_of(logits, TEMPERATURE) for logits in forward(model, texts)]
        counts.append(0)
        for prompt, text, found, likely in zip(prompts, texts, sampled, every, strict=True):
            new = text[len(prompt) :, None]
            expected = likely[len(prompt) - 1 : -1].gather(1, new)[:, 0]
            assert found.shape == expected.shape
            counts[-1] += int((found != expected).sum())
    return sum(map(len, sampled)), counts


@pytest.mark.parametrize("lora", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_of_2000_tokens_are_those_of_training(dtype, lora):
    model = build(dtype, lora)
    assert differing(model, prompts_of(20), max_new_tokens=100) == (2000, [0, 0, 0])


@pytest.mark.oracle
@pytest.mark.parametrize("lora", ADAPTERS.values(), ids=ADAPTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probs_of_100000_tokens_are_those_of_training(dtype, lora):
    model = build(dtype, lora)
    for seed in range(10):
        prompts = prompts_of(100, seed, most=56)
        found = differing(model, prompts, max_new_tokens=100, seed=seed)
        assert found == (10_000, [0, 0, 0])
