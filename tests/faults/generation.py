"""Sampling and training that do not compute alike: log-probabilities that differ, by forward."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from evaluation.test_on_policy import build, differing, packed, padded, prompts_of
from faults.planting import function
from faults.table import Check, Fault, judge_numbers


def _sampled(_rank: int, _world: int) -> dict[str, float]:
    """How many of 120 differ; one would be too many."""
    model, prompts, differ = build(), prompts_of(6), {"padded": 0.0, "packed": 0.0}
    for rows in (prompts[:1], prompts[1:]):
        _, counts = differing(model, rows, (padded, packed), max_new_tokens=20)
        for name, count in zip(differ, counts, strict=True):
            differ[name] += count
    return differ


CHECKS = {"sampled log-probabilities": Check(measure=_sampled, world=1, judge=judge_numbers)}


def _attended_at_once(_: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, v, mask)


def _running_on(_: Any, doc_ids: Any) -> Any:
    return (doc_ids * 0 + 1).cumsum(1) - 1


def _warmer(original: Any, logits: Any, temperature: float = 1.0) -> Any:
    return original(logits, temperature**2)


WHOLE = function("by_tile", lambda _, compute, x, *read: compute(x))
CACHE, ON = (
    function("attend_cached", _attended_at_once),
    function("restarting_positions", _running_on),
)
WARM = function("log_probs_of", _warmer)
FAULTS = [
    Fault("products of whole batches", *CHECKS, WHOLE, "padded", least=2),
    Fault("a cache that is attended at once", *CHECKS, CACHE, "padded", least=2),
    Fault("positions that run through a packed row", *CHECKS, ON, "packed", least=2),
    Fault("log-probabilities at another temperature", *CHECKS, WARM, "padded", least=2),
]
