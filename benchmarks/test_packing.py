"""What packing costs and what it saves: finding bins, building rows, training on them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pairs import Times, ratio, take_turns
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

import forgekit as fk

CAPACITY, MANY = 8192, 2_000_000
NAIVE, BEST_FIT, LARGE = "numpy first-fit", "best_fit", "best_fit, 2,000,000"
METHODS = ["best_fit", "sequential"]
MOST_BINS, LOWER_BOUND = 23_829, 23_828
MOST_TIME, MOST_GROWTH = 0.15, 6.0
PACKING_ROUNDS = 10

ROWS, SEQ_LEN, PULLED = 8, 2048, 50
SLICING, PACKED, LOADED = "numpy slicing", "packed rows", "packed rows, loader"
LEAST_SPEED = 0.15
ROW_ROUNDS = 60

DOCUMENTS, VOCAB_SIZE = 64, 256
PADDING, PACKING = "padding to the longest row", "packing"
LEAST_GAIN = 2.5
TRAIN_ROUNDS = 10


def lognormal(documents: int, *, median: float, longest: int) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1.2, documents)
    return lengths.clip(1, longest).astype(np.int64)


@pytest.fixture(scope="module")
def packings() -> tuple[Times, dict[str, int]]:
    lengths = lognormal(200_000, median=500, longest=CAPACITY)
    many = lognormal(MANY, median=500, longest=CAPACITY)
    assert -(-int(lengths.sum()) // CAPACITY) == LOWER_BOUND
    bins = {}

    def count(name, find):
        bins[name] = find()

    entries = {
        **{m: lambda m=m: len(fk.pack(lengths, CAPACITY, method=m)) for m in METHODS},
        NAIVE: partial(first_fit, lengths, CAPACITY),
        LARGE: lambda: len(fk.pack(many, CAPACITY)),
    }
    turns = {name: partial(count, name, find) for name, find in entries.items()}
    return take_turns(turns, PACKING_ROUNDS, warmup=1), bins


@pytest.mark.parametrize("name", [NAIVE, *METHODS, LARGE])
def test_packing(show, packings, name):
    times, bins = packings
    here, growth = ratio(times, name, NAIVE), ratio(times, name, BEST_FIT)
    show("bins of 200,000 documents", times, name, ratio=here, bins=bins[name])
    if name == BEST_FIT:
        assert bins[name] <= MOST_BINS
        assert here <= MOST_TIME, f"{here:.3f} of the naive packer's time"
    if name == LARGE:
        assert growth <= MOST_GROWTH, f"{growth:.2f} of the time of a tenth of the documents"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> tuple[Times, fk.data.Bins]:
    rng = np.random.default_rng(0)
    lengths = lognormal(8_000, median=300, longest=SEQ_LEN - 1)
    folder = tmp_path_factory.mktemp("rows")
    documents = (rng.integers(1, VOCAB_SIZE, length) for length in lengths)
    file = fk.write_tokens(folder / "tokens", documents, vocab_size=VOCAB_SIZE, eos_id=0)
    bins = fk.data.cached_bins(folder / "bins", file, SEQ_LEN)
    dataset = fk.packed_dataset(file, bins)
    (shard,) = file.shards
    with fk.make_loader(dataset, ROWS) as loader:
        entries = {
            SLICING: partial(pull, sliced(shard)),
            PACKED: partial(pull, drawn(dataset)),
            LOADED: partial(pull, iter(loader)),
        }
        return take_turns(entries, ROW_ROUNDS), bins


@pytest.mark.parametrize("name", [SLICING, PACKED, LOADED])
def test_rows(show, rows, name):
    times, bins = rows
    speed = 1 / ratio(times, name, SLICING)
    seconds = sorted(times[name])[ROW_ROUNDS // 2] / PULLED
    show(
        f"{PULLED} batches of {ROWS} x {SEQ_LEN}, packed",
        times,
        name,
        speed=speed,
        microseconds_per_batch=seconds * 1e6,
        documents_per_batch=ROWS * len(bins.documents) / len(bins),
    )
    if name == PACKED:
        assert speed >= LEAST_SPEED, f"{speed:.3f} of the speed of slicing"


@pytest.fixture(scope="module")
def training() -> tuple[Times, int]:
    """One epoch over the same documents, in micro-batches of about as many targets."""
    rng = np.random.default_rng(0)
    lengths = lognormal(DOCUMENTS, median=300, longest=SEQ_LEN)
    documents = [rng.integers(VOCAB_SIZE, size=length) for length in lengths]
    dataset = fk.packed_dataset(documents, fk.pack(lengths, SEQ_LEN))
    epochs = {
        PADDING: [padded(documents[at : at + 8]) for at in range(0, DOCUMENTS, 8)],
        PACKING: [
            dataset.__getitems__(range(at, min(at + 2, len(dataset))))
            for at in range(0, len(dataset), 2)
        ],
    }
    targets = int(lengths.sum()) - DOCUMENTS
    for batches in epochs.values():
        assert sum(int((batch["labels"] != -100).sum()) for batch in batches) == targets
    entries = {name: trainer(batches) for name, batches in epochs.items()}
    return take_turns(entries, TRAIN_ROUNDS), targets


@pytest.mark.parametrize("name", [PADDING, PACKING])
def test_training(show, training, name):
    times, targets = training
    gain = 1 / ratio(times, name, PADDING)
    rate = targets / sorted(times[name])[TRAIN_ROUNDS // 2]
    show(f"an epoch of {DOCUMENTS} documents", times, name, gain=gain, targets_per_second=rate)
    if name == PACKING:
        assert gain >= LEAST_GAIN, f"{gain:.2f} times the targets per second of padding"


def first_fit(lengths: np.ndarray, capacity: int) -> int:
    """Deal from the longest to the shortest, one ``argmax`` over the open bins per document."""
    left, opened = np.empty(len(lengths), dtype=np.int64), 0
    for length in np.sort(lengths)[::-1]:
        found = int((left[:opened] >= length).argmax()) if opened else 0
        if not opened or left[found] < length:
            found, opened = opened, opened + 1
            left[found] = capacity
        left[found] -= length
    return opened


def pull(stream) -> None:
    """Take batches and drop each at once; keeping them would measure page faults."""
    for _ in range(PULLED):
        next(stream)


def sliced(shard):
    """Random rows of one memory-mapped array, the least that any loader has to do."""
    rng = np.random.default_rng(0)
    while True:
        place = np.empty((ROWS, SEQ_LEN + 1), dtype=np.int64)
        for row, number in enumerate(rng.integers((len(shard) - 1) // SEQ_LEN, size=ROWS).tolist()):
            place[row] = shard[number * SEQ_LEN : number * SEQ_LEN + SEQ_LEN + 1]
        batch = torch.from_numpy(place)
        yield batch[:, :-1], batch[:, 1:]


def drawn(dataset):
    rng = np.random.default_rng(0)
    while True:
        yield dataset.__getitems__(rng.integers(len(dataset), size=ROWS).tolist())


def padded(documents) -> TensorDict:
    """A row for each document, as long as the longest of them."""
    ids = [torch.from_numpy(document) for document in documents]
    return TensorDict(
        input_ids=pad_sequence(ids, True),
        labels=pad_sequence([F.pad(i[1:], (0, 1), value=-100) for i in ids], True, -100),
        batch_size=[len(ids)],
    )


def trainer(epoch):
    """One optimizer step over the micro-batches of an epoch."""
    spec = fk.TransformerSpec(
        vocab_size=VOCAB_SIZE,
        dim=64,
        layers=2,
        heads=4,
        kv_heads=2,
        ffn_dim=168,
        max_seq_len=SEQ_LEN,
    )
    model = fk.Transformer(spec)
    state = fk.TrainState.create(model, fk.adamw(model))
    step = fk.make_step(loss_fn, schedule=fk.constant(1e-3))

    def run() -> None:
        nonlocal state
        state, _ = step(state, epoch)

    return run


def loss_fn(model, batch) -> fk.Loss:
    head = partial(fk.linear_cross_entropy, labels=batch["labels"])
    where = {key: batch[key] for key in ("position_ids", "doc_ids") if key in batch}
    return model(batch["input_ids"], **where, head=head)
