"""What happens to a checkpoint between a save and a load, and what a load has to bring back.

Two ranks train, save after each step, and a second run goes on. It has to end bitwise where a run
without a stop ends; what is damaged is told, and never taken for whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from faults.folders import by_rank_0, shared_folder
from faults.planting import Plant, value
from faults.table import Check, Fault
from lab import SPEC, global_batch, logits_loss

import forgekit as fk

__all__ = ["CHECKS", "FAULTS"]

SAVES, STEPS = 3, 5
USER: dict[str, Any] = {
    "happens": lambda directory: None,
    "optimizer": fk.adamw,
    "spec": lambda: SPEC,
    "fingerprint": lambda: {"data": "a"},
    "loaded": lambda state: state,
}
"""What a user passes, and what the world does; faults change the second run."""


def _begin(mesh: Any, *, is_second: bool) -> fk.TrainState:
    """The first run's state; the second one's has other weights until it loads."""
    spec = USER["spec"]() if is_second else SPEC
    model = fk.parallelize(fk.Transformer(spec, seed=9 if is_second else 3), mesh)
    optimizer = USER["optimizer"](model) if is_second else fk.adamw(model)
    return fk.TrainState.create(model, optimizer, mesh=mesh)


def _train(state: fk.TrainState, mesh: Any, until: int, directory: Path | None) -> fk.TrainState:
    step = fk.make_step(logits_loss, schedule=fk.warmup_cosine(peak=0.05, warmup=2, total=9))
    while state.step < until:
        batches = global_batch(2, seed=state.samples)
        state, _ = step(state, [row[dist.get_rank()] for row in batches])
        if directory is not None:
            fk.checkpoint_save(state, directory, fingerprint={"data": "a"}, blocking=True)
    return state


def _weights(state: fk.TrainState) -> list[Any]:
    return [p.full_tensor().detach().tolist() for p in state.model.parameters()]


def _resume(rank: int, world: int) -> str:
    mesh = fk.build_mesh(fk.MeshSpec(dp_shard=world), device="cpu")
    whole = _weights(_train(_begin(mesh, is_second=False), mesh, STEPS, None))
    with shared_folder() as folder:
        _train(_begin(mesh, is_second=False), mesh, SAVES, folder)
        by_rank_0(USER["happens"], folder)
        return _go_on(mesh, folder, whole)


def _go_on(mesh: Any, directory: Path, whole: list[Any]) -> str:
    try:
        state = fk.checkpoint_load(
            _begin(mesh, is_second=True), directory, fingerprint=USER["fingerprint"]()
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    step, state = state.step, USER["loaded"](state)
    said = [f"loaded step {step}"] * (step != SAVES)
    is_same = _weights(_train(state, mesh, STEPS, None)) == whole
    return ", ".join(said + ["another run than without a stop"] * (not is_same))


def _files(directory: Path, step: int = SAVES) -> list[Path]:
    """Files of a checkpoint from the largest, the weights, to the smallest."""
    folder = directory / f"step_{step:08d}"
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(files, key=lambda path: (-path.stat().st_size, path.name))


def _to_largest(change: Callable[[Path], None]) -> Plant:
    return value(USER, "happens", lambda directory: change(_files(directory)[0]))


def _to_others(change: Callable[[Path], None], place: int) -> Plant:
    """One of the files that say what is in the others: the smaller ones."""
    return value(USER, "happens", lambda directory: change(_files(directory)[::-1][place]))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _truncate_all(directory: Path) -> None:
    for step in range(1, SAVES + 1):
        _truncate(_files(directory, step)[0])


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 16
    path.write_bytes(content)


def _mix(directory: Path) -> None:
    """The largest file of one save in the folder of the next."""
    newest = _files(directory)[0]
    shutil.copy(directory / f"step_{SAVES - 1:08d}" / newest.name, newest)


def _moments_lost(state: fk.TrainState) -> fk.TrainState:
    state.optimizer.state.clear()
    return state


def _moments_swapped(state: fk.TrainState) -> fk.TrainState:
    for entry in state.optimizer.state.values():
        entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"].abs()
    return state


CHECKS = {"resume": Check(measure=_resume, timeout_s=60)}
FAULTS = [
    Fault("a torn file", "resume", _to_largest(_truncate), "^loaded step 2$", quick=True),
    Fault("a flipped bit", "resume", _to_largest(_flip), "^loaded step 2$"),
    Fault("an empty file of weights", "resume", _to_largest(_empty), "^loaded step 2$"),
    Fault("a file that is gone", "resume", _to_largest(Path.unlink), "^loaded step 2$"),
    Fault("a mixture of two saves", "resume", value(USER, "happens", _mix), "^loaded step 2$"),
    Fault("the smallest file empty", "resume", _to_others(_empty, 0), "^loaded step 2$"),
    Fault("the second smallest empty", "resume", _to_others(_empty, 1), "^loaded step 2$"),
    Fault("the smallest file torn", "resume", _to_others(_truncate, 0), "^loaded step 2$"),
    Fault(
        "all checkpoints torn",
        "resume",
        value(
            USER,
            "happens",
            lambda d: [_truncate(_files(d, step)[0]) for step in range(1, SAVES + 1)],
        ),
        "^CheckpointError",
    ),
    Fault(
        "other data",
        "resume",
        value(USER, "fingerprint", lambda: {"data": "b"}),
        "^CheckpointError.*other data",
    ),
    Fault(
        "another model",
        "resume",
        value(USER, "spec", lambda: attrs.evolve(SPEC, ffn_dim=48)),
        seen="^CheckpointError.*another model",
    ),
    Fault(
        "another optimizer, whose state is not there",
        "resume",
        value(
            USER,
            "optimizer",
            lambda model: torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9),
        ),
        "^CheckpointError",
    ),
    Fault("moments lost", "resume", value(USER, "loaded", _moments_lost), "another run"),
    Fault("moments swapped", "resume", value(USER, "loaded", _moments_swapped), "another run"),
    Fault(
        "samples counted from zero",
        "resume",
        value(USER, "loaded", lambda state: fk.donate(state, samples=0)),
        "another run",
    ),
    Fault(
        "steps counted from zero",
        "resume",
        value(USER, "loaded", lambda state: fk.donate(state, step=0)),
        "another run",
    ),
]
