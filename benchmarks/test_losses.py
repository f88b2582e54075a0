"""Time and memory of a loss that never holds all logits."""

from __future__ import annotations

import json
import subprocess
import sys

import losses
import pytest
from losses import FULL, LOG_PROBS, OURS, SPARSE_KL, WAYS, LossSize, train
from pairs import Times, band, ratio, take_turns

AGAIN = "full logits again"
SIZE = LossSize(tokens=4096, dim=256, vocab_size=8192)
ROUNDS = 20
MEMORY_ROUNDS = 2
MOST_TIME = 1.05
MOST_MEMORY = 1 / 5
MOST_BESIDE_OURS = 1.2


@pytest.fixture(scope="module")
def times() -> Times:
    entries = {name: train(name, SIZE) for name in WAYS} | {AGAIN: train(FULL, SIZE)}
    return take_turns(entries, ROUNDS)


@pytest.fixture(scope="module")
def growth() -> dict[str, list[dict[str, float]]]:
    """Several fresh processes for each way, in turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    for _ in range(MEMORY_ROUNDS):
        for name in WAYS:
            command = [sys.executable, losses.__file__, name]
            found[name].append(json.loads(subprocess.check_output(command)))
    return found


@pytest.mark.parametrize("name", [*WAYS, AGAIN])
def test_linear_cross_entropy_time(show, times, name):
    here, noise = ratio(times, name, FULL), band(times, AGAIN, FULL)
    group = f"loss, {SIZE.tokens} targets, width {SIZE.dim}, vocabulary {SIZE.vocab_size}"
    rate = SIZE.tokens / sorted(times[name])[ROUNDS // 2]
    show(group, times, name, ratio=here, band=noise, tokens_per_second=rate)
    if name == OURS:
        assert here <= MOST_TIME + noise, f"{here:.3f} of full logits, A/A {noise:.3f}"


@pytest.mark.parametrize("name", WAYS)
def test_linear_cross_entropy_memory(show, growth, name):
    peaks = {way: max(one["mib"] for one in found) for way, found in growth.items()}
    seconds = {way: [one["seconds"] for one in found] for way, found in growth.items()}
    share = peaks[name] / peaks[FULL]
    group = "loss in a fresh process, 4096 targets, width 256, vocabulary 32768"
    show(group, seconds, name, peak_mib=peaks[name], memory_ratio=share)
    if name == OURS:
        assert share <= MOST_MEMORY, f"{peaks[OURS]:.0f} MiB of {peaks[FULL]:.0f} MiB"
    if name in (LOG_PROBS, SPARSE_KL):
        least = {way: min(one["mib"] for one in found) for way, found in growth.items()}
        assert least[name] <= MOST_BESIDE_OURS * least[OURS]  # its noise is up to 1.8
