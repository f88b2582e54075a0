"""Sampling and training that do not compute alike: log-probabilities that differ, by forward."""

from __future__ import annotations

import torch.nn.functional as F
from faults.planting import function
from faults.table import Check, Fault, judge_numbers
from run.test_on_policy import build, differing, packed, padded, prompts_of

__all__ = ["CHECKS", "FAULTS"]


def _sampled(_rank: int, _world: int) -> dict[str, float]:
    """How many of 120 differ; one would be too many."""
    model, prompts, differ = build(), prompts_of(6), {"padded": 0.0, "packed": 0.0}
    for rows in (prompts[:1], prompts[1:]):
        _, counts = differing(model, rows, (padded, packed), max_new_tokens=20)
        differ = {
            n: before + count for (n, before), count in zip(differ.items(), counts, strict=True)
        }
    return differ


CHECKS = {"sampled log-probabilities": Check(measure=_sampled, world=1, judge=judge_numbers)}
FAULTS = [
    Fault(name, *CHECKS, function(planted, by), seen, least=2)
    for name, planted, by, seen in (
        (
            "products of whole batches",
            "by_tile",
            lambda _, compute, x, *read: compute(x),
            "padded",
        ),
        (
            "a cache that is attended at once",
            "attend_cached",
            lambda _, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
            "padded",
        ),
        (
            "positions that run through a packed row",
            "restarting_positions",
            lambda _, doc_ids: (doc_ids * 0 + 1).cumsum(1) - 1,
            "packed",
        ),
        (
            "log-probabilities at another temperature",
            "log_probs_of",
            lambda original, logits, temperature=1.0: original(logits, temperature**2),
            "padded",
        ),
    )
]
