"""What happens to a checkpoint between a save and a load, and what a load has to bring back.

Two ranks train, save after each step, and a second run goes on. It has to end bitwise where a run
without a stop ends; what is damaged is told, and never taken for whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from faults.folders import by_rank_0, shared_folder
from faults.planting import Plant, value
from faults.table import Check, Fault, saying
from lab import SPEC, full_tensors, global_batch, lay_out, logits_loss

import forgekit as fk

SAVES, STEPS = 3, 5
USER: dict[str, Any] = {
    "happens": lambda directory: None,
    "optimizer": fk.adamw,
    "spec": lambda: SPEC,
    "fingerprint": lambda: {"data": "a"},
    "loaded": lambda state: state,
}
"""What a user passes, and what the world does; faults change the second run."""


def _begin(*, is_second: bool) -> fk.TrainState:
    """The first run's state; the second one's has other weights until it loads."""
    spec = USER["spec"]() if is_second else SPEC
    build = USER["optimizer"] if is_second else fk.adamw
    return lay_out(fk.Transformer(spec, seed=9 if is_second else 3), build=build)


def _train(state: fk.TrainState, until: int, directory: Path | None = None) -> fk.TrainState:
    step = fk.make_step(logits_loss, schedule=fk.warmup_cosine(peak=0.05, warmup=2, total=9))
    while state.step < until:
        batches = global_batch(2, seed=state.samples)
        state, _ = step(state, [row[dist.get_rank()] for row in batches])
        if directory is not None:
            fk.checkpoint_save(state, directory, fingerprint={"data": "a"}, blocking=True)
    return state


def _weights(state: fk.TrainState) -> list[Any]:
    return [tensor.tolist() for tensor in full_tensors(state.model).values()]


@saying
def _resume(rank: int, world: int) -> str:
    whole = _weights(_train(_begin(is_second=False), STEPS))
    with shared_folder() as folder:
        _train(_begin(is_second=False), SAVES, folder)
        by_rank_0(USER["happens"], folder)
        state = _begin(is_second=True)
        state = fk.checkpoint_load(state, folder, fingerprint=USER["fingerprint"]())
    step, state = state.step, USER["loaded"](state)
    said = [f"loaded step {step}"] * (step != SAVES)
    is_same = _weights(_train(state, STEPS)) == whole
    return ", ".join(said + ["another run than without a stop"] * (not is_same))


def _files(directory: Path, step: int = SAVES) -> list[Path]:
    """Files of a checkpoint from the largest, the weights, to the smallest."""
    folder = directory / f"step_{step:08d}"
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(files, key=lambda path: (-path.stat().st_size, path.name))


def _to_file(change: Callable[[Path], None], place: int = 0) -> Plant:
    """The largest file; from behind, those that say what is in the others."""
    return value(USER, "happens", lambda directory: change(_files(directory)[place]))


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


def _other_optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


CHECKS = {"resume": Check(measure=_resume, timeout_s=60)}
RESUME, BEFORE, REFUSED = "resume", "^loaded step 2$", "^CheckpointError"
MIXED, ALL_TORN = value(USER, "happens", _mix), value(USER, "happens", _truncate_all)
OTHER_DATA = value(USER, "fingerprint", lambda: {"data": "b"})
OTHER_MODEL = value(USER, "spec", lambda: attrs.evolve(SPEC, ffn_dim=48))
SGD, LOADED = value(USER, "optimizer", _other_optimizer), partial(value, USER, "loaded")
NO_SAMPLES = LOADED(lambda state: fk.donate(state, samples=0))
NO_STEPS = LOADED(lambda state: fk.donate(state, step=0))
FAULTS = [
    Fault("a torn file", RESUME, _to_file(_truncate), BEFORE),
    Fault("a flipped bit", RESUME, _to_file(_flip), BEFORE),
    Fault("an empty file of weights", RESUME, _to_file(_empty), BEFORE),
    Fault("a file that is gone", RESUME, _to_file(Path.unlink), BEFORE),
    Fault("a mixture of two saves", RESUME, MIXED, BEFORE),
    Fault("the smallest file empty", RESUME, _to_file(_empty, -1), BEFORE),
    Fault("the second smallest empty", RESUME, _to_file(_empty, -2), BEFORE),
    Fault("the smallest file torn", RESUME, _to_file(_truncate, -1), BEFORE),
    Fault("all checkpoints torn", RESUME, ALL_TORN, REFUSED),
    Fault("other data", RESUME, OTHER_DATA, f"{REFUSED}.*other data"),
    Fault("another model", RESUME, OTHER_MODEL, f"{REFUSED}.*another model"),
    Fault("another optimizer, whose state is not there", RESUME, SGD, REFUSED),
    Fault("moments lost", RESUME, LOADED(_moments_lost), "another run"),
    Fault("moments swapped", RESUME, LOADED(_moments_swapped), "another run"),
    Fault("samples counted from zero", RESUME, NO_SAMPLES, "another run"),
    Fault("steps counted from zero", RESUME, NO_STEPS, "another run"),
]
