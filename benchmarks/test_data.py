"""How long a step waits for its data, and what a batch costs over bare slicing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from pairs import Times, ratio, take_turns

import forgekit as fk
from forgekit.cli import recipes_folder

VOCAB_SIZE = 4096
TOKENS = 4_000_000
MOST_WAIT = 0.01
WAIT_ROUNDS = 12
ASKED, AHEAD = "loader, read when asked", "loader, 2 workers"
MIXED = "packed mixture with document masks, 2 workers"

ROWS, SEQ_LEN, PULLED = 8, 2048, 50
BATCH_ROUNDS = 60
SLICING = "numpy slicing"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A token file of random tokens."""
    rng = np.random.default_rng(0)
    documents = (rng.integers(1, VOCAB_SIZE, 4_000) for _ in range(TOKENS // 4_000))
    path = tmp_path_factory.mktemp("data") / "tokens"
    return fk.write_tokens(path, documents, vocab_size=VOCAB_SIZE, eos_id=0)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Callable[[int], Any]:
    """Two token files of documents of very different lengths, packed and mixed, by row length."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("mixed")

    def build(seq_len: int) -> Any:
        parts = {}
        for name, median in {"short": 40, "long": 400}.items():
            lengths = np.exp(rng.normal(np.log(median), 1.0, 2_000)).astype(int) + 1
            documents = (rng.integers(1, VOCAB_SIZE, length) for length in lengths)
            file = fk.write_tokens(folder / name, documents, vocab_size=VOCAB_SIZE, eos_id=0)
            parts[name] = fk.packed_dataset(file, fk.pack(np.diff(file.offsets), seq_len))
        order = fk.make_order({name: len(part) for name, part in parts.items()}, temperature=2.0)
        return fk.mixture_dataset(parts, order)

    return build


@attrs.frozen
class Waits:
    """Times of steps, and of each step the seconds spent waiting."""

    steps: Times
    waits: Times
    tokens: int

    def share(self, name: str) -> float:
        """Part of the time of an entry's steps that was waiting."""
        return sum(self.waits[name]) / sum(self.steps[name])


@pytest.fixture(scope="module")
def waits(tokens, mixed, tmp_path_factory, one_thread) -> Waits:
    """Steps of the recipe pretrain as it comes, all threads computing, as the workers' rivals."""
    torch.set_num_threads(one_thread)
    recipe = _pretrain()
    data = recipe.Data(path=tokens.path)
    config = recipe.Config(out=tmp_path_factory.mktemp("run"), data=data, device="cpu")
    built = recipe.setup(config)
    state, step, ahead = built.state, built.step, built.loader
    asked = fk.make_loader(ahead.dataset, config.batch_size, seed=1)
    packed = fk.make_loader(mixed(config.data.seq_len), config.batch_size, workers=2)
    waited: Times = {ASKED: [], AHEAD: [], MIXED: []}

    def one_step(name: str, batches, loader) -> None:
        nonlocal state
        before = loader.wait_seconds
        state, _ = step(state, next(batches))
        waited[name].append(loader.wait_seconds - before)

    with ahead, asked, packed:
        entries = {
            ASKED: partial(one_step, ASKED, fk.groups(asked, 1), asked),
            AHEAD: partial(one_step, AHEAD, fk.groups(ahead, 1), ahead),
            MIXED: partial(one_step, MIXED, fk.groups(packed, 1), packed),
        }
        steps = take_turns(entries, WAIT_ROUNDS)
    fk.shutdown()
    torch.set_num_threads(1)
    kept = {name: seconds[-WAIT_ROUNDS:] for name, seconds in waited.items()}
    return Waits(steps, kept, config.batch_size * config.data.seq_len)


@pytest.fixture(scope="module")
def batches(tokens) -> Times:
    dataset = fk.token_dataset(tokens, SEQ_LEN)
    with (
        fk.make_loader(dataset, ROWS) as asked,
        fk.make_loader(dataset, ROWS, workers=2) as ahead,
    ):
        entries = {
            SLICING: _pull(_sliced(tokens)),
            ASKED: _pull(iter(asked)),
            AHEAD: _pull(iter(ahead)),
        }
        return take_turns(entries, BATCH_ROUNDS)


@pytest.mark.parametrize("name", [ASKED, AHEAD, MIXED])
def test_data_wait(show, waits, one_thread, name):
    share = waits.share(name)
    here = ratio(waits.steps, name, ASKED)
    rate = waits.tokens / sorted(waits.steps[name])[WAIT_ROUNDS // 2]
    show(
        "step of the recipe pretrain, by where its batch comes from",
        waits.steps,
        name,
        ratio=here,
        wait_share=share,
        threads=one_thread,
        tokens_per_second=rate,
    )
    if name != ASKED:
        assert share <= MOST_WAIT, f"a step waits {share:.2%} of its time for data"


@pytest.mark.parametrize("name", [SLICING, ASKED, AHEAD])
def test_batches(show, batches, name):
    seconds = sorted(batches[name])[BATCH_ROUNDS // 2] / PULLED
    show(
        f"{PULLED} batches of {ROWS} x {SEQ_LEN}",
        batches,
        name,
        ratio=ratio(batches, name, SLICING),
        microseconds_per_batch=seconds * 1e6,
        tokens_per_second=ROWS * SEQ_LEN / seconds,
    )


def _pull(stream) -> Callable[[], None]:
    """Take batches and drop each at once; keeping them would measure page faults."""

    def run() -> None:
        for _ in range(PULLED):
            next(stream)

    return run


def _sliced(tokens):
    """Random rows of one memory-mapped array, the least that any loader has to do."""
    (shard,) = tokens.shards
    rng = np.random.default_rng(0)
    while True:
        place = np.empty((ROWS, SEQ_LEN + 1), dtype=np.int64)
        for row, number in enumerate(rng.integers((len(shard) - 1) // SEQ_LEN, size=ROWS).tolist()):
            place[row] = shard[number * SEQ_LEN : number * SEQ_LEN + SEQ_LEN + 1]
        batch = torch.from_numpy(place)
        yield batch[:, :-1], batch[:, 1:]


def _pretrain():
    spec = importlib.util.spec_from_file_location("pretrain", recipes_folder() / "pretrain.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe
