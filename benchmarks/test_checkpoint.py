"""How long a save keeps training waiting, and what it leaves on disk."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from bare import Size, our_state
from pairs import Times, band, ratio, take_turns

import forgekit as fk
from forgekit.checkpoints.state_dict import collect

# 16.7 million parameters and both moments: 200 MB.
SIZE = Size(dim=512, layers=4, seq_len=16, vocab_size=4096, heads=8, rows=1, micro_batches=1)
ROUNDS = 16
MOST_BLOCKED = 2.0
MOST_BYTES = 1.1
COPY, AGAIN, OURS, TORCH = "one copy", "one copy again", "checkpoint_save", "torch.save"


@attrs.frozen
class Saves:
    """Times of all entries, and the bytes of the state and of its checkpoint."""

    times: Times
    state_bytes: int
    disk_bytes: int


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> Saves:
    folder = tmp_path_factory.mktemp("checkpoints")
    state = our_state(SIZE)
    tensors = list(collect(state)[0].values())
    entries = {
        COPY: _copier(tensors),
        AGAIN: _copier(tensors),
        OURS: lambda: fk.checkpoint_save(state, folder / "ours", keep=1),
        TORCH: lambda: torch.save(
            {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()},
            folder / "theirs.pt",
        ),
    }
    times = take_turns(entries, ROUNDS, between=fk.checkpoints.wait_for_saves)
    fk.checkpoints.wait_for_saves()
    state_bytes = sum(tensor.nbytes for tensor in tensors)
    return Saves(times, state_bytes, _size(fk.latest_checkpoint(folder / "ours")))


@pytest.mark.parametrize("name", [COPY, AGAIN, OURS, TORCH])
def test_blocked_time(show, saves, name):
    here, noise = ratio(saves.times, name, COPY), band(saves.times, AGAIN, COPY)
    gigabytes = saves.state_bytes / 1e9
    rate = gigabytes / sorted(saves.times[name])[ROUNDS // 2]
    on_disk = saves.disk_bytes / saves.state_bytes
    show(
        "time that a save of 200 MB blocks",
        saves.times,
        name,
        ratio=here,
        band=noise,
        gb_per_second=rate,
        disk_ratio=on_disk,
    )
    if name == OURS:
        assert here <= MOST_BLOCKED + noise, f"{here:.2f} of one copy, A/A {noise:.2f}"
        assert on_disk <= MOST_BYTES, f"{on_disk:.3f} of the state's bytes are on disk"


def _copier(tensors: list[torch.Tensor]):
    """Copy a state into memory that was used before, as a warm save does."""
    copies = [torch.empty_like(tensor) for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(copies, tensors, strict=True):
            target.copy_(tensor)

    return copy


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
