"""Held-out loss of the experts' recipe beside a dense model that computes as much per token.

``python benchmarks/experts.py data/stdlib results.jsonl`` trains both from three seeds on equal
tokens, some minutes each on one core, and prints bits per byte. Runs whose result is in the file
are not made again.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import attrs
import torch

import forgekit as fk
from forgekit.cli import recipes_folder

SEEDS = (0, 1, 2)
EXPERTS, DENSE = "experts", "dense"


def recipe() -> ModuleType:
    """Import the recipe from its file."""
    path = recipes_folder() / "moe.py"
    spec = importlib.util.spec_from_file_location("moe_recipe", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dense_of(spec: fk.TransformerSpec) -> fk.TransformerSpec:
    """Return the dense model with at least as many parameters per token.

    Its feed-forwards are as wide as a token's experts together, and wider by what a router has.
    """
    moe = spec.moe
    if moe is None:
        return spec
    width = (moe.top_k + moe.shared) * moe.ffn_dim
    router = -(-moe.experts // 3)  # columns of three matrices
    return attrs.evolve(spec, ffn_dim=-(-(width + router) // 8) * 8, moe=None)


def parameters(spec: fk.TransformerSpec) -> tuple[int, int]:
    """Count parameters: all of them, and those that a token is computed with."""
    with torch.device("meta"):
        model = fk.Transformer(spec)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total, routed = sum(sizes.values()), sum(n for name, n in sizes.items() if ".experts." in name)
    idle = 0 if spec.moe is None else routed - routed * spec.moe.top_k // spec.moe.experts
    return total, total - idle


def train(module: ModuleType, config: Any) -> dict[str, float]:
    """Train as the recipe does, without its files, and measure the held-out loss."""
    built, began = module.setup(config), time.perf_counter()
    state, loader, metrics = built.state, built.loader, {}
    with loader:
        for batches in fk.groups(loader, loader.micro_batches(config.global_batch_size)):
            if state.step == config.steps:
                break
            state, metrics = built.step(state, batches)
    seconds = time.perf_counter() - began
    found = fk.evaluate(state, built.held_out, built.loss_fn)
    shown = {name: float(value) for name, value in metrics.items() if name.startswith("moe/")}
    return {"bits_per_byte": float(found["bits_per_byte"]), "seconds": seconds, **shown}


def results(data: Path, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the result of each model and seed, from the file or from a run that is made now."""
    lines = path.read_text().splitlines() if path.exists() else []
    known = {(row["model"], row["seed"]): row for row in map(json.loads, lines)}
    module = recipe()
    for seed in SEEDS:
        for name in (EXPERTS, DENSE):
            if (name, seed) not in known:
                spec = module.SMALL if name == EXPERTS else dense_of(module.SMALL)
                total, active = parameters(spec)
                row = {"model": name, "seed": seed, "parameters": total, "active": active}
                with TemporaryDirectory() as out:  # where no checkpoint is
                    settings = {"out": Path(out), "data": module.Data(path=data)}
                    config = module.Config(seed=seed, model=spec, **settings)
                    known[name, seed] = row | train(module, config)
                with path.open("a") as file:
                    file.write(f"{json.dumps(known[name, seed])}\n")
            yield known[name, seed]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in results(Path(sys.argv[1]), Path(sys.argv[2])):
        sys.stdout.write(f"{json.dumps(row)}\n")
        sys.stdout.flush()
