"""States that are saved, all that they hold, and checkpoints that somebody changed."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lab import full, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forgekit as fk
from forgekit.checkpoints.directory import format_manifest
from forgekit.checkpoints.state_dict import model_tensors

COUNTERS = ("step", "samples", "targets", "skipped", "loss_scale", "good_steps")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Own(torch.optim.SGD):
    """An optimizer of a user's own: its module is not torch's."""

    def __init__(self, parameters: Any, momentum: float = 0.9) -> None:
        super().__init__(parameters, lr=0.1, momentum=momentum)


class Elsewhere(Own):
    """Keeps its momentum where no checkpoint looks."""

    memory: dict[Any, Any]

    def step(self) -> None:
        shown, self.state = self.state, vars(self).setdefault("memory", defaultdict(dict))
        super().step()
        self.state = shown


def build(world: int = 1, seed: int = 0, optimizer: Any = adamw, step: int = 0) -> fk.TrainState:
    """A state over ``world`` ranks, 1 without a process group; no size divides evenly."""
    torch.manual_seed(seed)
    model, mesh = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), None
    model.register_buffer("scale", torch.full((2,), float(seed)))
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    state = fk.TrainState.create(model, optimizer(model.parameters()), mesh=mesh)
    return fk.donate(state, step=step, samples=4 * step)


def save(directory: Any, *steps: int, state: fk.TrainState | None = None, **options: Any) -> Any:
    """Train through ``steps``, save each, and return the state."""
    state = build() if state is None else state
    for step in steps:
        state = train(state, step - state.step)
        fk.checkpoint_save(state, directory, blocking=True, **options)
    return state


def load(rank: int, world: int, directory: Any) -> dict[str, Tensor]:
    """All that a state holds which takes over the newest checkpoint."""
    return everything(fk.checkpoint_load(build(world, seed=1), directory))


def everything(state: fk.TrainState) -> dict[str, Tensor]:
    """Weights, buffers, moments and averages as whole tensors by name, and the numbers."""
    tensors = model_tensors(state.model)
    for name, parameter in state.model.named_parameters():
        entries = state.optimizer.state.get(parameter, {})
        tensors |= {f"{name}.{key}": value for key, value in entries.items()}
    if state.average is not None:
        tensors |= {f"average.{name}": value for name, value in state.average.values.items()}
    tensors |= {name: torch.as_tensor(getattr(state, name)) for name in COUNTERS}
    return {name: full(tensor).detach().clone() for name, tensor in tensors.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as with an editor: its checksum stays."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and its checksum with it."""
    edit(folder, change)
    file = folder / "manifest.json"
    file.write_bytes(format_manifest(json.loads(file.read_text())))
