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

import forgekit as fk
from forgekit.config import key, load_config

SPEC = fk.TransformerSpec(
    vocab_size=16, dim=16, layers=1, heads=2, kv_heads=1, ffn_dim=24, max_seq_len=16
)


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


def state(seed=0):
    built = model(seed)
    return fk.TrainState.create(built, fk.adamw(built))


def write_tokens(folder):
    fk.write_tokens(folder, [np.arange(12) % 16] * 4, vocab_size=16, eos_id=0)


ARTIFACTS = {
    "checkpoint": (
        lambda folder: fk.checkpoint_save(state(), folder, blocking=True),
        lambda folder: fk.checkpoint_load(state(1), folder),
    ),
    "base": (
        lambda folder: fk.save_huggingface(model(), folder),
        lambda folder: fk.load_huggingface(model(1), folder),
    ),
    "adapter": (
        lambda folder: fk.save_adapter(tuned(), folder),
        lambda folder: fk.load_adapter(model(1), folder),
    ),
    "token file": (write_tokens, lambda folder: fk.token_dataset(folder, 4)[0]),
}
"""How each is written and read."""


def replace_by_pickles(path, marker):
    """The file as a bare pickle, then as torch writes one, then as numpy does."""
    yield path.write_bytes(pickle.dumps(Payload(marker)))
    with path.open("wb") as file:
        torch.save({"weight": Payload(marker)}, file)
    yield
    with path.open("wb") as file:
        np.save(file, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    yield


@pytest.mark.parametrize("name", ARTIFACTS)
def test_no_file_of_an_artifact_is_unpickled(name, tmp_path):
    write, read = ARTIFACTS[name]
    folder, marker = tmp_path / "artifact", tmp_path / "ran"
    write(folder)
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
