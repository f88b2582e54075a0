"""What was reported as written is there after a crash of the machine, whatever the disk lost."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

import pytest
import torch
from crash_states import recorded, replay
from lab import alone, lay_out
from pool import run_again
from saved import everything
from torch import nn

import forgekit as fk
from forgekit.data import open_tokens, prepare


def net(seed, create=alone):
    torch.manual_seed(seed)
    return create(nn.Sequential(nn.Linear(4, 2, bias=False)).double())


def trained(state):
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3 + state.step)
    state.optimizer.step()
    return fk.donate(state, step=state.step + 1, samples=state.samples + 4)


def digest(state):
    """The step and all tensors."""
    return state.step, digest_of(everything(state).values())


def digest_of(tensors):
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def load(root):
    state = fk.checkpoint_load(net(5), root / "runs" / "a" / "checkpoints")
    return None if state.step == 0 else digest(state)


def save(state, recorder, directory, rank=0, *, blocking=False, turns="new new again"):
    """Saves with ``keep=1``, and of the same step once more with other values."""
    mark = recorder.mark if rank == 0 else lambda *_: None
    for turn in turns.split():
        if turn == "new":
            state = trained(state)
        else:
            with torch.no_grad():
                next(iter(state.model.parameters())).add_(1.0)
        value = digest(state)
        mark("begun", value)
        fk.checkpoint_save(state, directory, keep=1, blocking=blocking).wait()
        mark("reported", value)


def without_exchanges(monkeypatch):
    """As on NFS and Lustre, where two names cannot be exchanged at once."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_checkpoint_that_was_reported_is_loaded_after_any_crash(tmp_path, exchanges, monkeypatch):
    if not exchanges:
        without_exchanges(monkeypatch)
    (root := tmp_path / "root").mkdir()
    turns = "new again" if exchanges else "new new again"
    with recorded(root, tmp_path / "log") as recorder:
        directory = root / "runs" / "a" / "checkpoints"
        save(net(0), recorder, directory, blocking=not exchanges, turns=turns)
    assert replay(tmp_path / "log", tmp_path / "state", load) > 30  # states


def save_on_two(rank, world, folder):
    folder = Path(folder)
    state = net(0, lay_out)
    with recorded(folder / "root", folder / "log") as recorder:
        directory = folder / "root" / "runs" / "a" / "checkpoints"
        save(state, recorder, directory, rank, turns="new")


def test_a_checkpoint_of_two_ranks_is_loaded_after_any_crash(tmp_path):
    (tmp_path / "root").mkdir()
    run_again(save_on_two, 2, str(tmp_path))
    assert replay(tmp_path / "log", tmp_path / "state", load) > 30


SPEC = fk.TransformerSpec(
    vocab_size=5, dim=4, layers=1, heads=2, kv_heads=1, ffn_dim=3, max_seq_len=8
)


def values(model):
    return digest_of(model.state_dict().values())


def read_export(path):
    fk.load_huggingface(model := fk.Transformer(SPEC, seed=9), path)
    return values(model)


def read_tokens(path):
    return tuple(open_tokens(path).read(0, 4).tolist())


def write_export(path, seed):
    fk.save_huggingface(model := fk.Transformer(SPEC, seed=seed), path)
    return values(model)


def write_tokens(path, seed):
    fk.write_tokens(path, [[seed, 2, 3]], vocab_size=9, eos_id=0)
    return (seed, 2, 3, 0)


def prepare_text(path, seed):
    source = path.parents[2] / f"text{seed}"
    source.mkdir(exist_ok=True)
    (source / "a.txt").write_text(f"{seed} and {seed}\n" * 40)
    prepared = prepare(source, path, vocab_size=260)
    return tuple(prepared.train.read(0, 4).tolist())


WRITERS = {
    "export": (write_export, read_export, (1, 2)),
    "token file": (write_tokens, read_tokens, (1, 2)),
    "prepare": (prepare_text, read_tokens, (1,)),
}


@pytest.mark.parametrize(
    ("kind", "exchanges"), [*((kind, False) for kind in WRITERS), ("token file", True)]
)
def test_what_was_written_is_there_after_any_crash(tmp_path, kind, exchanges, monkeypatch):
    """The first one, then another in its place; each is there when its writer has returned."""
    write, read, seeds = WRITERS[kind]

    def load(root):
        path = root / "a" / "b"
        try:
            return read(path)
        except (fk.CheckpointError, FileNotFoundError):
            if path.exists() or any(root.glob("a/*.old")):
                raise
            return None

    if not exchanges:  # their readers have to find what was set aside
        without_exchanges(monkeypatch)
    (root := tmp_path / "root").mkdir()
    expected = [write(tmp_path / "once" / "a" / "b", seed) for seed in seeds]
    with recorded(root, tmp_path / "log") as recorder:
        for seed, value in zip(seeds, expected, strict=True):
            recorder.mark("begun", value)
            assert write(root / "a" / "b", seed) == value
            recorder.mark("reported", value)
    assert replay(tmp_path / "log", tmp_path / "state", load) > 30
