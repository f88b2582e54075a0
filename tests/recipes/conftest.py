"""Data for tiny runs."""

from __future__ import annotations

import numpy as np
import pytest

import forgekit as fk
from forgekit.cli import recipes_folder

pytest.register_assert_rewrite("runs")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A token file and its held-out part, without a tokenizer: counting, from random starts."""
    path = tmp_path_factory.mktemp("data") / "tokens"
    draw = np.random.default_rng(0)
    for folder, count in ((path, 60), (path / "heldout", 5)):
        documents = [
            (draw.integers(63) + np.arange(draw.integers(20, 60))) % 63 for _ in range(count)
        ]
        size = {"text_bytes": 2 * sum(map(len, documents))}
        fk.write_tokens(folder, documents, vocab_size=64, eos_id=63, metadata=size)
    return path


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """``pretrain`` for other processes; it prints in its loop and draws nothing at its end."""
    text = (recipes_folder() / "pretrain.py").read_text()
    loop, end = "            if must_roll_back(", "        if run.end(state):\n"
    assert text.count(loop) == text.count(end) == 1
    text = text.replace(loop, f"            print('step', state.step)\n{loop}")
    path = tmp_path_factory.mktemp("recipe") / "pretrain.py"
    path.write_text(text.replace(end, "        if run.end(state) and False:\n"))
    return path
