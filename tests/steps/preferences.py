"""Packed pairs of answers, and what they cost when every document is computed by itself.

The reference shares no code with the loss: it runs each document alone, takes logarithms of
softmaxes token by token, and writes the losses of a pair out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import forgekit as fk

SPEC = fk.TransformerSpec(
    vocab_size=40, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, max_seq_len=24, qk_norm=True
)
LENGTHS = ((5, 7, 2, 6), (3, 3, 8, 5), (9, 4), (2, 13))
"""Tokens of the documents of each row: chosen, rejected, chosen, ...; ragged."""
PROMPTS = ((2, 2, 0, 0), (1, 1, 4, 4), (3, 3), (1, 1))
"""Of which so many are the prompt; 0: an answer from its first token on."""


def rows(seed: int = 0, length: int = 24) -> TensorDict:
    """Four rows of packed pairs, as ``preference_dataset`` makes them, cut at a length."""
    generator = torch.Generator().manual_seed(seed)
    whole = {
        "input_ids": torch.zeros(4, 24, dtype=torch.long),
        "labels": torch.full((4, 24), -100),
        "doc_ids": torch.full((4, 24), -1),
        "position_ids": torch.zeros(4, 24, dtype=torch.long),
    }
    for row, (lengths, prompts) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        start = 0
        for document, (size, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            ids = torch.randint(40, (size,), generator=generator)
            here = slice(start, start + size)
            whole["input_ids"][row, here] = ids
            whole["doc_ids"][row, here] = document
            whole["position_ids"][row, here] = torch.arange(size)
            first = max(prompt - 1, 0)  # where the first scored token is predicted
            whole["labels"][row, start + first : start + size - 1] = ids[first + 1 :]
            start += size
    return TensorDict({key: value[:, :length] for key, value in whole.items()}, [4])


def pairs_of(batch: TensorDict, model: Callable[[Tensor], Any]) -> list[list[tuple[Tensor, int]]]:
    """Of each pair with labels the log-probability and scored tokens of both answers."""
    found = []
    for row in batch:
        answers = []
        for document in range(int(row["doc_ids"].max()) + 1):
            is_in = row["doc_ids"] == document
            ids, labels = row["input_ids"][is_in], row["labels"][is_in]
            likely = model(ids[None])[0].softmax(-1).log()
            scored = [likely[at, label] for at, label in enumerate(labels.tolist()) if label >= 0]
            answers.append((sum(scored, torch.zeros(())), len(scored)))
        pairs = [answers[at : at + 2] for at in range(0, len(answers), 2)]
        found += [pair for pair in pairs if len(pair) == 2 and all(count for _, count in pair)]
    return found


def expected(
    batch: TensorDict, model: Any, frozen: Any, kind: str, beta: float
) -> tuple[Tensor, int, dict[str, float]]:
    """Sum of the losses, number of pairs, and what is reported of them, means over pairs."""
    losses, measured = [], []
    with torch.no_grad():
        base = pairs_of(batch, frozen)
    for mine, theirs in zip(pairs_of(batch, model), base, strict=True):
        (chosen, n_chosen), (rejected, n_rejected) = mine
        a, b = chosen - theirs[0][0], rejected - theirs[1][0]
        losses.append(
            {
                "sigmoid": torch.log(1 + torch.exp(-beta * (a - b))),
                "hinge": torch.clamp(1 - beta * (a - b), min=0),
                "ipo": (a / n_chosen - b / n_rejected - 1 / (2 * beta)) ** 2,
            }[kind]
        )
        measured.append([beta * float(a.detach()), beta * float(b.detach())])
    if not losses:
        return torch.zeros((), dtype=torch.float64), 0, {}
    good, bad = (sum(part) / len(measured) for part in zip(*measured, strict=True))
    accuracy = sum(a > b for a, b in measured) / len(measured)
    metrics = {"chosen_reward": good, "rejected_reward": bad, "margin": good - bad}
    metrics = {f"dpo/{name}": value for name, value in {**metrics, "accuracy": accuracy}.items()}
    return torch.stack(losses).sum(), len(losses), metrics
