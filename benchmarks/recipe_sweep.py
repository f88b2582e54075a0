"""Which optimizer, rate and decay the shipped recipe learns fastest with, on the shipped corpus.

forgekit prepare stdlib --out data/stdlib --vocab 4096
python benchmarks/recipe_sweep.py rates momenta rest near --steps 150
python benchmarks/recipe_sweep.py chosen --seeds 0 1 2 --steps 400
python benchmarks/recipe_sweep.py --table

Each case trains the model of ``recipes/pretrain.py`` on its rows; nothing else differs. A row of
``runs/recipe_sweep.jsonl`` is written when a run has ended, and a run that has a row is not
repeated. The table has held-out bits per byte: the mean over the seeds, and how many there are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import torch

import forgekit as fk

ROWS = Path("runs/recipe_sweep.jsonl")


@attrs.frozen(kw_only=True)
class Case:
    """What one run does apart from the others.

    Attributes:
        optimizer: ``"muon"`` or ``"adamw"``.
        lr: Highest learning rate.
        shape: How it falls to ``final * lr``: ``"linear"``, ``"cosine"``, ``"rex"``; ``"wsd"`` and
            ``"wsd-sqrt"`` stay at ``lr`` for 40% of the steps.
        final: Last rate over the highest.
        warmup: Steps until the highest rate.
        weight_decay: Decay of the matrices, per unit of rate.
        momentum: Of Muon.
        beta1: Decay rate of AdamW's first moment, also beside Muon.
        beta2: Decay rate of its second moment.
        scale: Rate of what AdamW steps beside Muon, over Muon's.
        max_norm: Bound of the gradient norm.
    """

    optimizer: str = "muon"
    lr: float = 1.5e-2
    shape: str = "linear"
    final: float = 0.0
    warmup: int = 20
    weight_decay: float = 0.1
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    scale: float = 1.0
    max_norm: float = 1.0

    def __str__(self) -> str:
        """What differs from the defaults."""
        values = attrs.asdict(self)
        differs = {k: v for k, v in values.items() if v != getattr(Case(), k) and k != "optimizer"}
        return " ".join(
            [
                self.optimizer,
                *(
                    f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
                    for key, value in differs.items()
                ),
            ]
        )


ADAMW = partial(Case, optimizer="adamw")
MUON = partial(Case, lr=1e-2, momentum=0.85, scale=4.0, beta1=0.8, warmup=10)
BEFORE = ADAMW(lr=3e-3, shape="cosine", final=0.1)
SETS: dict[str, list[Case]] = {
    "rates": [
        BEFORE,
        *(ADAMW(lr=lr) for lr in (3e-3, 6e-3, 1.2e-2)),
        *(Case(lr=lr) for lr in (6e-3, 1e-2, 1.5e-2, 2.2e-2, 3.2e-2)),
    ],
    "shapes": [Case(shape=shape) for shape in ("cosine", "rex", "wsd", "wsd-sqrt")],
    "warmups": [Case(warmup=warmup) for warmup in (0, 5, 60)],
    "decays": [Case(weight_decay=decay) for decay in (0.0, 0.03, 0.3)],
    "momenta": [Case(momentum=momentum) for momentum in (0.85, 0.9, 0.97)],
    "rest": [Case(scale=scale) for scale in (0.3, 0.5, 2.0, 4.0)],
    "betas": [Case(beta1=0.8), Case(beta2=0.99), Case(beta1=0.8, beta2=0.98)],
    "combined": [
        Case(momentum=0.85, scale=4.0, beta1=0.8),
        Case(momentum=0.85, scale=6.0),
        Case(momentum=0.75, scale=4.0),
        Case(momentum=0.75),
        Case(momentum=0.85, scale=4.0, lr=1e-2),
        Case(momentum=0.85, scale=4.0, lr=2.2e-2),
        Case(momentum=0.85, scale=4.0, shape="wsd"),
        Case(momentum=0.85, scale=4.0, warmup=5),
    ],
    "long": [
        Case(momentum=0.85, scale=4.0, beta1=0.8),
        Case(momentum=0.9, scale=4.0, beta1=0.8),
        Case(momentum=0.85, scale=4.0, beta1=0.8, lr=1e-2),
        Case(momentum=0.85, scale=6.0, beta1=0.8),
        Case(momentum=0.85, scale=4.0, beta1=0.8, weight_decay=0.3),
        Case(momentum=0.85, scale=4.0, beta1=0.8, shape="wsd"),
    ],
    "near": [
        MUON(),
        MUON(warmup=5),
        MUON(scale=6.0),
        MUON(lr=7e-3, scale=6.0),
        MUON(lr=1.3e-2),
        MUON(momentum=0.8),
        MUON(shape="rex"),
        MUON(weight_decay=0.0),
    ],
    "chosen": [MUON(warmup=20), MUON(scale=6.0), BEFORE, ADAMW(lr=3e-3), ADAMW(lr=6e-3)],
    "norms": [Case(max_norm=norm) for norm in (0.3, 1e9)],
}


def schedule_of(case: Case, steps: int) -> Callable[[int], float]:
    """Build the learning rate of a case."""
    options: dict[str, Any] = {"warmup": case.warmup, "total": steps, "final": case.final * case.lr}
    if case.shape.startswith("wsd"):
        shape = "sqrt" if case.shape == "wsd-sqrt" else "linear"
        return fk.optim.wsd(case.lr, decay=int(0.6 * steps), shape=shape, **options)
    shapes = {"linear": fk.warmup_linear, "cosine": fk.warmup_cosine, "rex": fk.optim.rex}
    return shapes[case.shape](case.lr, **options)


def recipe() -> ModuleType:
    """Import ``recipes/pretrain.py``."""
    spec = importlib.util.spec_from_file_location("pretrain", "recipes/pretrain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(case: Case, seed: int, steps: int, data: Path) -> dict[str, Any]:
    """Train the recipe's model and measure it on the held-out documents.

    Returns:
        ``bits_per_byte``, and the seconds of the steps alone.
    """
    torch.set_num_threads(1)
    module = recipe()
    config = module.Config()
    dataset = fk.token_dataset(data, config.data.seq_len)
    model = fk.Transformer(config.model, seed=seed)
    betas, decay = (case.beta1, case.beta2), case.weight_decay
    if case.optimizer == "adamw":
        optimizer = fk.adamw(model, betas=betas, weight_decay=decay)
    else:
        optimizer = fk.muon(
            model,
            betas=betas,
            weight_decay=decay,
            momentum=case.momentum,
            rest_lr_scale=case.scale,
        )
    state = fk.TrainState.create(model, optimizer, seed=seed)
    schedule = schedule_of(case, steps)
    step = fk.make_step(module.loss_fn, schedule=schedule, max_norm=case.max_norm)
    loader = fk.train_loader(state, dataset, config.global_batch_size)
    seconds = time.perf_counter()
    for batches, _ in zip(fk.groups(loader, 1), range(steps), strict=False):
        state, _ = step(state, batches)
    seconds = time.perf_counter() - seconds
    held_out = fk.held_out_loader(state, dataset.held_out(), 8)
    assert held_out is not None
    result = fk.evaluate(state, held_out, module.loss_fn)
    return {"bits_per_byte": round(float(result["bits_per_byte"]), 5), "seconds": round(seconds, 1)}


def read() -> dict[tuple[str, int, int], dict[str, Any]]:
    """Return the runs that have a row, by case, steps and seed."""
    lines = ROWS.read_text().splitlines() if ROWS.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["case"], row["steps"], row["seed"]): row for row in rows}


def table() -> str:
    """Format the mean over the seeds of each case, best first."""
    by_case: dict[tuple[int, str], list[float]] = {}
    for (case, steps, _), row in read().items():
        by_case.setdefault((steps, case), []).append(row["bits_per_byte"])
    lines = [
        "| steps | case | bits per byte | lowest | highest | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for (steps, case), values in sorted(
        by_case.items(), key=lambda i: (i[0][0], statistics.mean(i[1]))
    ):
        mean, low, high = statistics.mean(values), min(values), max(values)
        lines.append(f"| {steps} | {case} | {mean:.4f} | {low:.4f} | {high:.4f} | {len(values)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the cases of the named sets that have no row yet, then show the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="*", choices=[*SETS, []], help="sets of cases")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"))
    args = parser.parse_args()
    ROWS.parent.mkdir(exist_ok=True)
    waiting = [(case, seed) for seed in args.seeds for name in args.sets for case in SETS[name]]
    waiting = [one for one in waiting if (str(one[0]), args.steps, one[1]) not in read()]
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool, ROWS.open("a") as rows:
        running = {pool.submit(train, *one, args.steps, args.data): one for one in waiting}
        for future in as_completed(running):
            case, seed = running[future]
            row = {"case": str(case), "steps": args.steps, "seed": seed, **future.result()}
            print(json.dumps(row), file=rows, flush=True)
            print(row, flush=True)
    print(table())


if __name__ == "__main__":
    main()
