"""Nothing that is loaded runs as code: each file of each artifact is replaced by one that would."""

from __future__ import annotations

import contextlib
import os
import pickle
import warnings
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from lab import SPEC, alone

import forgekit as fk
from forgekit.config import key, load_config


class Payload:
    """Whoever unpickles it makes a directory."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def model(seed=0):
    return fk.Transformer(SPEC, seed=seed)


def tuned(seed=0):
    return fk.add_lora(model(seed), rank=2, targets=("*.query",))


def write_tokens(folder):
    fk.write_tokens(folder, [np.arange(12) % 16] * 4, vocab_size=16, eos_id=0)


WRITE = {
    "checkpoint": lambda folder: fk.checkpoint_save(alone(model()), folder, blocking=True),
    "base": lambda folder: fk.save_huggingface(model(), folder),
    "adapter": lambda folder: fk.save_adapter(tuned(), folder),
    "token file": write_tokens,
}
READ = {
    "checkpoint": lambda folder: fk.checkpoint_load(alone(model(1)), folder),
    "base": lambda folder: fk.load_huggingface(model(1), folder),
    "adapter": lambda folder: fk.load_adapter(model(1), folder),
    "token file": lambda folder: fk.token_dataset(folder, 4)[0],
}


def replace_by_pickles(path, marker):
    """The file as a bare pickle, then as torch writes one, then as numpy does."""
    yield path.write_bytes(pickle.dumps(Payload(marker)))
    with path.open("wb") as file:
        torch.save({"weight": Payload(marker)}, file)
    yield
    with path.open("wb") as file:
        np.save(file, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    yield


@pytest.mark.parametrize("name", WRITE)
def test_no_file_of_an_artifact_is_unpickled(name, tmp_path):
    read, folder, marker = READ[name], tmp_path / "artifact", tmp_path / "ran"
    WRITE[name](folder)
    read(folder)
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) >= 2
    for path in files:
        original = path.read_bytes()
        for _ in replace_by_pickles(path, marker):
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(folder)
            assert not marker.exists(), path.name
        path.write_bytes(original)
    read(folder)


def test_the_pickles_of_the_test_above_would_run(tmp_path):
    path = tmp_path / "file"
    loaders = (
        lambda: pickle.loads(path.read_bytes()),
        lambda: torch.load(path, weights_only=False),
        lambda: np.load(path, allow_pickle=True),
    )
    for load, _ in zip(loaders, replace_by_pickles(path, tmp_path / "ran"), strict=True):
        load()
        (tmp_path / "ran").rmdir()


def test_a_value_of_the_command_line_is_never_evaluated(tmp_path):
    fields = {"__annotations__": {"out": Path}, "out": key(Path("runs"), "Run directory.")}
    config = attrs.frozen(kw_only=True)(type("Config", (), fields))
    call = f"__import__('os').mkdir({str(tmp_path / 'ran')!r})"
    assert load_config(config, [f"out={call}"]).out == Path(call)
    assert not (tmp_path / "ran").exists()
