"""Which changes of the shipped recipe's model let it learn faster at equal time.

forgekit prepare stdlib --out data/stdlib --vocab 4096
python benchmarks/model_levers.py plain qk_norm values zero qk_norm+values --seeds 0 --steps 150
python benchmarks/model_levers.py qk_norm+values --time
python benchmarks/model_levers.py plain --seeds 0 1 2
python benchmarks/model_levers.py qk_norm+values --seeds 0 1 2 --ratio 1.03  # at equal time
python benchmarks/model_levers.py  # the table

Each case, levers joined by ``+``, trains the model of ``recipes/pretrain.py`` with its optimizer on
its rows. A row of ``runs/model_levers.jsonl`` is written when a run has ended, and a run that has a
row is not repeated. ``--time`` measures the time of a step over that of the plain model, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from pairs import Times, band, ratio
from recipe_sweep import recipe
from torch import Tensor, nn

import forgekit as fk
from forgekit.model.vocabulary import logits_of

ROWS = Path("runs/model_levers.jsonl")
PRETRAIN = recipe()
SPEC: fk.TransformerSpec = PRETRAIN.SMALL
LEVERS = {
    "zero": "projections into the residual stream begin at zero",
    "qk_norm": "queries and keys are normalised",
    "relu2": "squared ReLU without a gate, 1.5 times as wide",
    "softcap": "logits are 15 tanh(logits / 15)",
    "values": "every other layer adds an embedding of the token to its values",
    "scalars": "each block reads a learned mix of the stream and the embedding",
    "untied": "the output projection is a matrix of its own",
    "embed_norm": "the embedding is normalised",
    "half": "initial values are half as large",
    "double": "initial values are twice as large",
}
SCALES = {"half": 0.5, "double": 2.0}
INTO_STREAM = ("attention.output.weight", "feed_forward.down.weight")


class SquaredReLU(nn.Module):
    """``down(relu(up(x)) ** 2)``, with as many parameters as a gated one of ``ffn_dim``."""

    def __init__(self, dim: int, ffn_dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn_dim * 3 // 2, bias=False)
        self.down = nn.Linear(ffn_dim * 3 // 2, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[b s d]`` -> ``[b s d]``."""
        return self.down(self.up(x).relu().square())


class Value(nn.Linear):
    """Values with an embedding of the token in them; the model sets its ids before."""

    def __init__(self, spec: fk.TransformerSpec) -> None:
        super().__init__(spec.dim, spec.kv_heads * spec.channels, bias=False)
        self.embedding = nn.Embedding(spec.vocab_size, self.out_features)
        self.ids = torch.empty(0)

    def forward(self, input: Tensor) -> Tensor:
        """``[b s d]`` -> ``[b s k*c]``."""
        return super().forward(input) + self.embedding(self.ids)


class Model(fk.Transformer):
    """The recipe's model with levers."""

    levers: frozenset[str] = frozenset()

    def __init__(self, levers: frozenset[str], seed: int) -> None:
        flags = {"qk_norm": "qk_norm" in levers, "tied": "untied" not in levers}
        super().__init__(attrs.evolve(SPEC, **flags))
        self.levers = levers
        for index, block in enumerate(self.layers):
            if "relu2" in levers:
                block.feed_forward = SquaredReLU(SPEC.dim, SPEC.ffn_dim)
            if "values" in levers and index % 2:
                block.get_submodule("attention").value = Value(self.spec)
        self.mix = nn.Parameter(torch.empty(SPEC.layers, 2)) if "scalars" in levers else None
        fk.init_weights(self, seed)

    @property
    def roles(self) -> dict[str, str]:
        """Roles of parameters, with that of the embeddings of values."""
        return {"*.value.embedding.weight": "embedding", **super().roles}

    def initial_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial values; None for norms."""
        if name == "mix" or ("zero" in self.levers and name.endswith(INTO_STREAM)):
            return 0.0
        std = super().initial_std(name)
        scales = [scale for lever, scale in SCALES.items() if lever in self.levers]
        return std if std is None else std * math.prod(scales)

    def forward(self, input_ids: Tensor, *, head: Any = logits_of, **_: Any) -> Any:
        """Return what ``head`` makes of the last hidden states."""
        x = self.embedding(input_ids)
        if "embed_norm" in self.levers:
            x = F.rms_norm(x, x.shape[-1:], eps=SPEC.norm_eps)
        cos, sin = self._rotary(self.locate(input_ids.shape[1], x.device), x.dtype)
        first = x
        for index, block in enumerate(self.layers):
            value = block.get_submodule("attention.value")
            if isinstance(value, Value):
                value.ids = input_ids
            if self.mix is not None:
                x = (1 + self.mix[index, 0]) * x + self.mix[index, 1] * first
            x = block(x, cos, sin)
        return head(self.norm(x), (self.embedding if self.output is None else self.output).weight)


def capped_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Any:
    """Compute the cross-entropy of capped logits; a head."""
    return fk.cross_entropy(15 * torch.tanh(F.linear(hidden, weight) / 15), labels)


def loss_fn(model: Any, batch: Any) -> Any:
    """Compute the cross-entropy, of capped logits if the model has that lever."""
    loss = capped_loss if "softcap" in model.levers else fk.linear_cross_entropy
    return model(batch["input_ids"], head=partial(loss, labels=batch["labels"]))


def prepare(case: str, seed: int, steps: int) -> tuple[fk.TrainState, Callable[..., Any]]:
    """Build the state and the step of a case."""
    levers = frozenset(() if case == "plain" else case.split("+"))
    if unknown := levers - LEVERS.keys():
        raise SystemExit(f"{sorted(unknown)} are no levers; there are {list(LEVERS)}.")
    model = Model(levers, seed)
    build_optimizer, lr = PRETRAIN.OPTIMIZERS["muon"]
    state = fk.TrainState.create(model, build_optimizer(model, weight_decay=0.1), seed=seed)
    return state, fk.make_step(loss_fn, schedule=fk.warmup_linear(lr, warmup=20, total=steps))


def train(case: str, seed: int, steps: int, data: Path) -> float:
    """Train a case and return the bits per byte of the held-out documents."""
    dataset = fk.token_dataset(data, SPEC.max_seq_len)
    state, step = prepare(case, seed, steps)
    groups = fk.groups(fk.train_loader(state, dataset, 8), 1)
    for batches, _ in zip(groups, range(steps), strict=False):
        state, _ = step(state, batches)
    held_out = fk.held_out_loader(state, dataset.held_out(), 8)
    assert held_out is not None
    return round(float(fk.evaluate(state, held_out, loss_fn)["bits_per_byte"]), 5)


def time_steps(cases: list[str], rounds: int, data: Path) -> Times:
    """Measure the CPU time of a step of each case in turns, that of the plain model twice."""
    dataset = fk.token_dataset(data, SPEC.max_seq_len)
    entries: dict[str, list[Any]] = {}
    for case in ["plain", "again", *cases]:
        state, step = prepare("plain" if case == "again" else case, 0, 400)
        entries[case] = [state, step, iter(fk.groups(fk.train_loader(state, dataset, 8), 1))]
    times: Times = {case: [] for case in entries}
    for turn in range(rounds + 2):
        names = list(entries)
        for case in names[turn % len(names) :] + names[: turn % len(names)]:
            state, step, groups = entries[case]
            batches = list(next(groups))
            began = time.process_time()
            entries[case][0], _ = step(state, batches)
            times[case].append(time.process_time() - began)
    return {case: seconds[2:] for case, seconds in times.items()}


def rows() -> dict[tuple[str, int, int], float]:
    """Return bits per byte by case, steps and seed."""
    read = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    return {(row["case"], row["steps"], row["seed"]): row["bits_per_byte"] for row in read}


def table() -> str:
    """Format each case's mean, and what it is below the plain model on the same seeds.

    ``p``, two-sided, is of a paired t-test over three seeds: with two degrees of freedom it is
    ``1 - t / sqrt(t ** 2 + 2)``.
    """
    runs = rows()
    lines = ["| steps | case | bits per byte | below plain | p | seeds |", "|---" * 6 + "|"]
    for steps, case in sorted({(steps, case) for case, steps, _ in runs}):
        by_seed = {seed: bits for (*of, seed), bits in runs.items() if of == [case, steps]}
        plain = {seed: runs.get(("plain", steps, seed)) for seed in by_seed}
        below = [bits - by_seed[seed] for seed, bits in plain.items() if bits is not None]
        p, mean = "", statistics.mean(below or [0])
        if len(below) == 3 and (spread := statistics.stdev(below)):
            t = abs(mean) / spread * 3**0.5
            p = f"{1 - t / (t * t + 2) ** 0.5:.4f}"
        bits = f"{statistics.mean(by_seed.values()):.4f}"
        lines.append(f"| {steps} | {case} | {bits} | {mean:.4f} | {p} | {len(by_seed)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the cases that have no row yet and show the table, or time the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ratio", type=float, default=1, help="time of a step; so many fewer")
    parser.add_argument("--time", type=int, nargs="?", const=20, metavar="ROUNDS")
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    ROWS.parent.mkdir(exist_ok=True)
    if args.time:
        times = time_steps(args.cases, args.time, args.data)
        reach = band(times, "again", "plain")
        for case in args.cases:
            print(f"{case}: {ratio(times, case, 'plain'):.3f} (band {reach:.3f})")
        return
    for seed, case in product(args.seeds, args.cases):
        if (case, args.steps, seed) not in rows():
            row = {"case": case, "steps": args.steps, "seed": seed}
            row["taken"] = round(args.steps / args.ratio)
            row["bits_per_byte"] = train(case, seed, row["taken"], args.data)
            with ROWS.open("a") as file:
                print(json.dumps(row), file=file)
    print(table())


if __name__ == "__main__":
    main()
