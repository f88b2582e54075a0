"""How many steps optimizers take to one loss: each at its best rate, ten seeds, paired tests.

OMP_NUM_THREADS=1 nice -n 10 python benchmarks/optimizer_order.py

A small transformer learns bytes of Python's standard library. The loss to reach is AdamW's after
``STEPS`` steps, on text that is held out. Each optimizer's rate is doubled or halved as long as
fewer steps suffice, with seeds of their own; then all run with the seeds that count. Two optimizers
see the same initial weights and rows for a seed, so steps are compared by pairs, and ``p`` is that
of the exact test that flips the signs of the differences.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

import forgekit as fk

STEPS, MOST, WARMUP, EVERY = 120, 480, 20, 5
"""Steps of AdamW to the loss, of a run at most, until the full rate, and between evaluations."""
ROWS, HELD_OUT, LENGTH = 8, 32, 64
SPEC = fk.TransformerSpec(
    vocab_size=256, dim=64, layers=2, heads=2, kv_heads=2, ffn_dim=128, max_seq_len=LENGTH
)
PARTS = fk.optim
ADAM = PARTS.adam(0.9, 0.95)
MUON = (PARTS.momentum(0.95), PARTS.orthogonal())
OPTIMIZERS = {
    "AdamW": ({"*": ADAM}, 2e-3),
    "Lion": ({"*": PARTS.lion_sign()}, 1e-3),
    "Muon": ({"matrix": MUON, "*": ADAM}, 8e-3),
    "NorMuon": ({"matrix": (*MUON, PARTS.row_norm()), "*": ADAM}, 8e-3),
    "SOAP": ({"matrix": PARTS.soap(every=10), "*": ADAM}, 4e-3),
}
"""Chains, without decay, and the rate with which the search begins."""


@cache
def text(is_held_out: bool) -> Tensor:
    """Bytes of the standard library's modules, those of every tenth held out."""
    files = sorted(Path(statistics.__file__).parent.glob("*.py"))
    chosen = [file for n, file in enumerate(files) if (n % 10 == 0) == is_held_out]
    content = bytearray(b"".join(map(Path.read_bytes, chosen)))
    return torch.frombuffer(content, dtype=torch.uint8).long()


def rows(count: int, seed: int, *, is_held_out: bool = False) -> Tensor:
    """Draw ``[count LENGTH+1]`` bytes from random positions."""
    source, generator = text(is_held_out), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(source) - LENGTH, (count, 1), generator=generator)
    return source[starts + torch.arange(LENGTH + 1)]


def loss_of(model: fk.Transformer, ids: Tensor) -> Tensor:
    """The mean cross entropy of each next byte."""
    loss = fk.cross_entropy(model(ids[:, :-1]), ids[:, 1:])
    return loss.sum / loss.count


def losses(name: str, lr: float, seed: int) -> Iterator[tuple[int, float]]:
    """Train with an optimizer; yield the held-out loss every few steps."""
    model = fk.Transformer(SPEC, seed=seed)
    optimizer = fk.optimizer(model, OPTIMIZERS[name][0])
    held_out = rows(HELD_OUT, 0, is_held_out=True)
    for step in range(1, MOST + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / WARMUP)
            if "state_step" in group:
                group["state_step"] = step - 1
        optimizer.zero_grad()
        loss_of(model, rows(ROWS, seed * MOST + step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % EVERY == 0:
            with torch.no_grad():
                loss = float(loss_of(model, held_out))
            yield step, loss


def steps_to(target: float, name: str, lr: float, seed: int) -> float:
    """Steps until the loss is reached, interpolated; above ``MOST`` the farther it stays."""
    before = (0, math.log(SPEC.vocab_size))
    for step, loss in losses(name, lr, seed):
        if loss <= target:
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (step - before[0])
        before = step, loss
    return MOST * (1 + before[1] - target)


def best_rate(cost: Callable[[float], float], lr: float) -> float:
    """Double a rate, or else halve it, as long as that costs less."""
    cost = cache(cost)
    for factor in (2.0, 0.5):
        while cost(lr * factor) < cost(lr):
            lr *= factor
    return lr


def flipped_p(differences: list[float]) -> float:
    """How many of all choices of signs give a sum as far from 0."""
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(s >= sums[0] * (1 - 1e-9) for s in sums) / len(sums)


def main() -> None:
    """Search the rates, measure, and print a table from the slowest to the fastest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="seeds that count")
    parser.add_argument("--tuning", type=int, default=2, help="further seeds, for the rates")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seeds, tuning = range(args.seeds), range(100, 100 + args.tuning)

    def final(lr: float) -> float:
        runs = (islice(losses("AdamW", lr, seed), STEPS // EVERY) for seed in tuning)
        return statistics.mean([loss for _, loss in run][-1] for run in runs)

    def mean_steps(name: str, lr: float) -> float:
        return statistics.mean(steps_to(target, name, lr, seed) for seed in tuning)

    adamw = best_rate(final, OPTIMIZERS["AdamW"][1])
    target = final(adamw)
    print(f"AdamW at {adamw:g} after {STEPS} steps: {target:.4f} nats per byte", flush=True)
    steps: dict[str, list[float]] = {}
    rates: dict[str, float] = {}
    for name, (_, first) in OPTIMIZERS.items():
        rates[name] = best_rate(partial(mean_steps, name), first) if name != "AdamW" else adamw
        steps[name] = [steps_to(target, name, rates[name], seed) for seed in seeds]
        print(name, rates[name], [round(s) for s in steps[name]], flush=True)
    print("| optimizer | rate | steps | lowest, highest | over the one above | p |")
    print("|---|---|---|---|---|---|")
    above = None
    for name in sorted(steps, key=lambda name: -statistics.mean(steps[name])):
        mine = steps[name]
        cells = [name, f"{rates[name]:g}", f"{statistics.mean(mine):.0f}"]
        cells += [f"{min(mine):.0f}, {max(mine):.0f}", "", ""]
        if above is not None:
            logs = [math.log(b / a) for a, b in zip(above, mine, strict=True)]
            cells[-2:] = f"{math.exp(statistics.mean(logs)):.3f}", f"{flipped_p(logs):.3f}"
        print(f"| {' | '.join(cells)} |")
        above = mine


if __name__ == "__main__":
    main()
