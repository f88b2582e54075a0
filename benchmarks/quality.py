"""Steps, tokens and seconds until held-out text costs 1.94 bits per byte, beside others.

forgekit prepare stdlib --out data/stdlib --vocab 4096
python benchmarks/quality.py                    # 120 steps and one seed: a minute per entry
python benchmarks/quality.py --full             # 400 steps, three seeds
python benchmarks/quality.py recipe nanochat    # these alone

All entries train on the same rows in the same order, on one thread, each with its own schedule over
all steps. They take turns of some steps, and only these are timed: other load slows down all of
them alike, and seconds are compared within a seed. Where the target is crossed between two
evaluations is interpolated. The model is that of ``recipes/pretrain.py``, for Transformers a Llama
of equal sizes; nanochat's is its own, see ``nanochat.py``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any, NamedTuple

import torch
from nanochat import Model, build_update
from recipe_sweep import recipe
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

import forgekit as fk

TARGET = 1.94
ROWS, LENGTH = 8, 256


class Entry(NamedTuple):
    """One way to train: ``advance(n)`` goes on to step n, ``logits`` maps ids to logits."""

    advance: Callable[[int], None]
    logits: Callable[[Tensor], Tensor]


Points = list[tuple[float, float, float]]
"""Of each evaluation: steps so far, seconds of training, bits per byte."""
Rows = list[Tensor]
"""For each step token ids ``[b s+1]``."""


def forgekit_entry(rows: Rows, seed: int, name: str) -> Entry:
    """Train as the recipe does with ``optim.name=name``."""
    module = recipe()
    config, (build, lr) = module.Config(), module.OPTIMIZERS[name]
    model = fk.Transformer(config.model, seed=seed)
    optimizer = build(model, weight_decay=config.optim.weight_decay)
    state = fk.TrainState.create(model, optimizer, seed=seed)
    rate = fk.warmup_linear(lr, warmup=config.optim.warmup, total=len(rows))
    step = fk.make_step(module.loss_fn, schedule=rate, max_norm=config.max_norm)

    def advance(goal: int) -> None:
        nonlocal state
        for ids in rows[state.step : goal]:
            batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].contiguous()}
            state, _ = step(state, [TensorDict(batch, [len(ids)])])

    return Entry(advance, model)


def trainer_entry(rows: Rows, seed: int, settings: Mapping[str, Any]) -> Entry:
    """Train a Llama by transformers' Trainer, in a thread that stops at each goal."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.manual_seed(seed)
    spec = recipe().SMALL
    sizes = {"hidden_size": spec.dim, "intermediate_size": spec.ffn_dim}
    sizes |= {"num_hidden_layers": spec.layers, "num_attention_heads": spec.heads}
    sizes |= {"num_key_value_heads": spec.kv_heads, "max_position_embeddings": LENGTH}
    llama = LlamaConfig(vocab_size=spec.vocab_size, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(llama)
    goal, go_on, is_there = 0, Semaphore(0), Semaphore(0)
    failed: list[BaseException] = []

    class Turns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == goal < len(rows):
                is_there.release()
                go_on.acquire()

    options = {"max_steps": len(rows), "seed": seed, "use_cpu": True, "report_to": "none"}
    options |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    folder = tempfile.mkdtemp()
    arguments = TrainingArguments(
        folder, train_sampling_strategy="sequential", **options, **settings
    )
    # The model shifts labels itself, so each row has the target of its last position as well.
    # The last row of the file is padded with -100, which no embedding takes.
    data = [{"input_ids": row.clamp(min=0), "labels": row} for ids in rows for row in ids]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Turns()])

    def train() -> None:
        torch.set_num_threads(1)
        try:
            trainer.train()
        except BaseException as error:
            failed.append(error)
        is_there.release()

    def advance(step: int) -> None:
        nonlocal goal
        begins, goal = goal == 0, step
        Thread(target=train, daemon=True).start() if begins else go_on.release()
        is_there.acquire()
        if failed:
            raise failed[0]

    return Entry(advance, lambda ids: model(input_ids=ids).logits)


def nanochat_entry(rows: Rows, seed: int) -> Entry:
    """Train nanochat's model by a plain loop."""
    torch.manual_seed(seed)
    spec, done = recipe().SMALL, 0
    model = Model(spec.vocab_size, spec.dim, spec.layers, spec.heads, LENGTH)
    update = build_update(model, spec.dim, len(rows))

    def advance(goal: int) -> None:
        nonlocal done
        for ids in rows[done:goal]:
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            update(done)
            done += 1

    return Entry(advance, model)


TUNED = {"learning_rate": 3e-3, "warmup_steps": 20, "weight_decay": 0.1, "adam_beta2": 0.95}
"""Those of the recipe's AdamW."""
ENTRIES: dict[str, Callable[[Rows, int], Entry]] = {
    "recipe": lambda rows, seed: forgekit_entry(rows, seed, "muon"),
    "adamw": lambda rows, seed: forgekit_entry(rows, seed, "adamw"),
    "trainer": lambda rows, seed: trainer_entry(rows, seed, {}),
    "trainer tuned": lambda rows, seed: trainer_entry(rows, seed, TUNED),
    "nanochat": nanochat_entry,
}


@torch.no_grad()
def bits_per_byte(logits: Callable[[Tensor], Tensor], path: Path) -> float:
    """Measure the held-out text of a token file."""
    held_out = fk.data.open_tokens(path / "heldout")
    dataset = fk.token_dataset(path / "heldout", LENGTH)
    total, count = 0.0, 0
    for batch in fk.make_loader(dataset, batch_size=ROWS, epochs=1):
        labels = batch["labels"].flatten()
        values = logits(batch["input_ids"]).flatten(0, 1)
        total += F.cross_entropy(values, labels, reduction="sum", ignore_index=-100).item()
        count += int((labels != -100).sum())
    return total / count * held_out.tokens / held_out.metadata["text_bytes"] / math.log(2)


def rows_of(path: Path, seed: int, steps: int) -> Rows:
    """Read the rows of each step, in the order of the recipe's loader."""
    loader = fk.make_loader(fk.token_dataset(path, LENGTH), batch_size=ROWS, seed=seed)
    batches = (b for _, b in zip(range(steps), loader, strict=False))
    return [torch.cat([b["input_ids"], b["labels"][:, -1:]], dim=1) for b in batches]


def crossing(points: Points) -> tuple[float, float] | None:
    """Interpolate the step and the seconds at which the target is reached."""
    for (step, seconds, bits), after in pairwise(points):
        if after[2] <= TARGET:
            share = (bits - TARGET) / (bits - after[2])
            return step + share * (after[0] - step), seconds + share * (after[1] - seconds)
    return None


def measure(names: list[str], seed: int, steps: int, every: int, path: Path) -> dict[str, Points]:
    """Train all entries in turns."""
    rows = rows_of(path, seed, steps)
    entries = {name: ENTRIES[name](rows, seed) for name in names}
    points: dict[str, Points] = {
        name: [(0, 0.0, bits_per_byte(entry.logits, path))] for name, entry in entries.items()
    }
    for goal in range(every, steps + 1, every):
        for name, entry in entries.items():
            began = time.perf_counter()
            entry.advance(goal)
            seconds = points[name][-1][1] + time.perf_counter() - began
            points[name].append((goal, seconds, bits_per_byte(entry.logits, path)))
            sys.stderr.write(f"seed {seed}  {name}: {points[name][-1]}\n")
    return points


def table(results: list[dict[str, Points]]) -> str:
    """Format means over the seeds; seconds are divided by those of the first entry, per seed."""
    lines = [
        "| entry | steps | tokens | seconds | of a step | bits at the end |",
        "|---|---|---|---|---|---|",
    ]
    first = next(iter(results[0]))
    for name in results[0]:
        reached = [(crossing(result[name]), crossing(result[first])) for result in results]
        shown = "not reached | | "
        if all(own for own, _ in reached):
            step = statistics.mean(own[0] for own, _ in reached if own)
            ratios = [own[1] / base[1] for own, base in reached if own and base]
            over = f"{statistics.mean(ratios):.2f}" if ratios else ""
            shown = f"{step:.0f} | {step * ROWS * LENGTH:,.0f} | {over}"
        of_step = statistics.mean(r[name][-1][1] / r[first][-1][1] for r in results)
        bits = statistics.mean(r[name][-1][2] for r in results)
        lines.append(f"| {name} | {shown} | {of_step:.2f} | {bits:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the named entries and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("entries", nargs="*", help=f"of {', '.join(ENTRIES)}; none: all")
    parser.add_argument("--full", action="store_true", help="400 steps and three seeds")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--every", type=int, help="steps between evaluations")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = args.steps or (400 if args.full else 120)
    seeds = args.seeds or ([0, 1, 2] if args.full else [0])
    names, every = args.entries or [*ENTRIES], args.every or (25 if args.full else 30)
    results = [measure(names, seed, steps, every, args.data) for seed in seeds]
    sys.stdout.write(f"{table(results)}\n")


if __name__ == "__main__":
    main()
