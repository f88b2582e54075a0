"""Documents packed into bins, and rows of them: against naive packers, token by token."""

from __future__ import annotations

import contextlib
import pickle
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import run_ranks

import forgekit as fk
from forgekit.data.packing import Bins, cached_bins, open_bins, pack
from forgekit.data.rows import packed_dataset
from forgekit.data.token_files import open_tokens, write_tokens

METHODS = ["best_fit", "sequential"]


def in_bins(bins, column="documents"):
    """Lists of one column's numbers, bin by bin."""
    inner = bins.offsets[1:-1]
    return [part.tolist() for part in np.split(getattr(bins, column), inner)] if len(bins) else []


def naive_best_fit(rooms, capacity):
    """How full each bin becomes, sorted: the largest first, each where it leaves the least room."""
    taken = []
    for room in sorted(rooms, reverse=True):
        fitting = [n for n, filled in enumerate(taken) if filled + room <= capacity]
        if fitting:
            taken[max(fitting, key=taken.__getitem__)] += room
        else:
            taken.append(room)
    return sorted(taken)


def naive_next_fit(rooms, capacity):
    bins = []
    for item, room in enumerate(rooms):
        if not bins or sum(rooms[other] for other in bins[-1]) + room > capacity:
            bins.append([])
        bins[-1].append(item)
    return bins


@st.composite
def problems(draw, longest=1.0):
    """Lengths, a capacity, and an alignment that divides it."""
    align = draw(st.integers(1, 4))
    capacity = align * draw(st.integers(1, 12))
    length = st.integers(0, int(capacity * longest))
    return draw(st.lists(length, max_size=60)), {"capacity": capacity, "align": align}


@given(problems())
@settings(max_examples=100, deadline=None)
def test_bins_are_those_of_the_naive_packers(problem):
    """Of best fit the rooms that are left: which of two with equal room is taken, is open."""
    lengths, options = problem
    capacity, align = options.values()
    there = [i for i, length in enumerate(lengths) if length]
    room_of = [-(-length // align) * align for length in lengths]
    rooms = [room_of[i] for i in there]
    taken = [sum(room_of[i] for i in each) for each in in_bins(pack(lengths, **options))]
    assert sorted(taken) == naive_best_fit(rooms, capacity)
    sequential = in_bins(pack(lengths, method="sequential", **options))
    assert sequential == [[there[i] for i in each] for each in naive_next_fit(rooms, capacity)]


@pytest.mark.parametrize("method", METHODS)
@given(problem=problems(longest=3.5))
@settings(max_examples=50, deadline=None)
def test_every_token_is_in_a_bin_once_and_every_rule_is_kept(method, problem):
    lengths, options = problem
    bins, (capacity, align) = pack(lengths, method=method, **options), options.values()
    assert (bins.capacity, bins.align) == (capacity, align)
    pieces = zip(bins.documents.tolist(), bins.starts.tolist(), bins.lengths.tolist(), strict=True)
    tokens = [(d, token) for d, start, n in pieces for token in range(start, start + n)]
    assert sorted(tokens) == [(d, token) for d, n in enumerate(lengths) for token in range(n)]
    whole = [d for d, n in enumerate(lengths) if 0 < n <= capacity]
    assert [bins.documents.tolist().count(d) for d in whole] == [1] * len(whole)
    for documents, sizes in zip(in_bins(bins), in_bins(bins, "lengths"), strict=True):
        assert sum(-(-size // align) * align for size in sizes) <= capacity
        assert documents == sorted(set(documents))
    if method == "sequential":
        assert np.lexsort((bins.starts, bins.documents)).tolist() == list(range(len(bins.starts)))


def test_bins_of_a_corpus_come_within_one_of_the_lower_bound():
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(500), 1.2, 100_000).clip(1, 8192).astype(np.int64)
    bins = pack(lengths, 8192)
    assert len(bins) <= 1 + -(-int(lengths.sum()) // 8192)
    assert bins.tokens == lengths.sum()
    assert bins.fill > 0.9998


def test_bins_are_the_same_on_every_machine_and_version():
    """A cache or a resumed run would otherwise go on with other rows."""
    lengths = (np.arange(1, 5000) ** 2 % 3001).astype(np.uint16)
    names = [pack(lengths, 2048, method=each, align=4).fingerprint[:16] for each in METHODS]
    assert names == ["94668e7e450a3ba7", "fabfeee0c86b5c35"]


LENGTHS = [3, 6, 4, 2, 9, 1, 1]


def test_bins_on_disk_are_those_of_their_arguments_and_found_again(tmp_path):
    folder, paths = tmp_path / "a" / "bins", set()
    others = [{}, {"capacity": 16}, {"method": "sequential"}, {"align": 2}]
    for lengths, other in [([*LENGTHS[:-1], 2], {}), *((LENGTHS, other) for other in others)]:
        bins = cached_bins(folder, lengths, **{"capacity": 8, **other})
        expected = pack(lengths, **{"capacity": 8, **other})
        assert bins.fingerprint == expected.fingerprint
        assert not bins.lengths.flags.writeable
        paths.add(bins.path)
    assert ({*folder.iterdir()}, len(paths)) == (paths, 5)
    inodes = {path.stat().st_ino for path in paths}
    again = cached_bins(folder, np.array(LENGTHS), np.int64(8), align=np.int8(1))
    assert again.fingerprint == pack(LENGTHS, 8).fingerprint
    assert {path.stat().st_ino for path in folder.iterdir()} == inodes
    assert [len(cached_bins(folder, [0, 0], 8)) for _ in range(2)] == [0, 0]


def test_bins_of_a_token_file_follow_its_tokens_and_its_tokenizer(tmp_path):
    def bins_of_file(*documents):
        file = write_tokens(tmp_path / "a", documents, vocab_size=9, eos_id=0)
        return cached_bins(tmp_path / "bins", file, 8)

    other, first = bins_of_file([1, 2], [4]), bins_of_file([1, 2], [3])
    assert first.lengths.tolist() == [3, 2]
    assert bins_of_file([1, 2], [3]).path == first.path
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    tokenized = cached_bins(tmp_path / "bins", open_tokens(tmp_path / "a"), 8)
    assert len({other.path, first.path, tokenized.path}) == 3


def test_no_damage_of_bins_goes_unnoticed_and_they_are_made_anew(tmp_path):
    """Where a flipped bit does no harm (a space of the header) the bins are still the same."""
    whole, fresh = cached_bins(tmp_path, LENGTHS, 8), pack(LENGTHS, 8)
    content = whole.path.read_bytes()
    for damaged in (content[:-8], b"PK" + content[2:], b""):
        whole.path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"bins-.*.npy cannot be read \("):
            open_bins(whole.path)
        assert cached_bins(tmp_path, LENGTHS, 8).fingerprint == fresh.fingerprint
    for at in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        whole.path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            assert open_bins(whole.path).fingerprint == fresh.fingerprint, at


def _cache(rank, world, folder):
    torch.distributed.barrier()
    return cached_bins(folder, np.arange(200_000) % 997 + 1, 1024).fingerprint


def test_several_processes_at_once_get_the_same_bins(tmp_path):
    expected = pack(np.arange(200_000) % 997 + 1, 1024).fingerprint
    assert run_ranks(_cache, 2, tmp_path) == [expected] * 2
    assert len(list(tmp_path.iterdir())) == 1


DOCUMENTS = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35], [], [41]]


def packed(documents=DOCUMENTS, capacity=4, transforms=(), **options):
    bins = pack([len(ids) for ids in documents], capacity, **options)
    return packed_dataset(documents, bins, transforms=transforms)


def file_of(path, documents=DOCUMENTS, **options):
    return write_tokens(path, documents, **{"vocab_size": 100, "eos_id": 0, **options})


def columns_of(documents, bins, row, padding):
    """Of each position its token, the next one of the document, the piece, and the place in it."""
    columns = []
    for number, piece in enumerate(range(*bins.offsets[row : row + 2])):
        ids, start = documents[bins.documents[piece]], bins.starts[piece]
        following = [*ids[1:], -100]
        for place in range(bins.lengths[piece]):
            at = start + place
            columns.append([ids[at], following[at], number, place])
        columns += [[padding, -100, -1, 0]] * (-bins.lengths[piece] % bins.align)
    return columns + [[padding, -100, -1, 0]] * (bins.capacity - len(columns))


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(any),
    units=st.integers(1, 8),
    align=st.integers(1, 3),
    method=st.sampled_from(METHODS),
    shard_tokens=st.integers(7, 300),
)
@settings(max_examples=15, deadline=None)
def test_rows_hold_the_pieces_of_their_bins(
    tmp_path_factory, sizes, units, align, method, shard_tokens
):
    """No two tokens are equal, so that each tells its document and place."""
    firsts = np.cumsum([0, *sizes]).tolist()
    documents = [list(range(a, b)) for a, b in pairwise(firsts)]
    sizes = {"vocab_size": 2000, "eos_id": 1999, "shard_tokens": shard_tokens}
    file = write_tokens(tmp_path_factory.mktemp("tokens") / "a", documents, **sizes)
    closed = [[*ids, 1999] for ids in documents]  # as the file has them
    for source, held, padding in ((documents, documents, 0), (file, closed, 1999)):
        lengths = [len(ids) for ids in held]
        bins = pack(lengths, units * align, align=align, method=method)
        batch = packed_dataset(source, bins).__getitems__(range(len(bins)))
        fk.check_batch(batch)
        keys = ("input_ids", "labels", "doc_ids", "position_ids")
        columns = torch.stack([batch[key] for key in keys], dim=-1).tolist()
        assert columns == [columns_of(held, bins, row, padding) for row in range(len(bins))]


def add(row, value):
    row["input_ids"][0] = row["input_ids"][0] * 10 + value
    return row.set("a", torch.tensor(value))


ADD = [partial(add, value=1), partial(add, value=2)]


def test_a_batch_is_its_rows_and_transforms_are_applied_to_rows_in_order():
    dataset = packed()
    batch = dataset.__getitems__([2, 0])
    for number, row in enumerate((2, 0)):
        assert (batch[number] == dataset[row]).all()
    batch["labels"].zero_()
    assert not dataset[2]["labels"].equal(batch["labels"][0])
    assert dataset.__getitems__([]).batch_size == torch.Size([0])
    batch = packed(transforms=ADD).__getitems__([1, 0])
    assert batch["a"].tolist() == [2, 2]
    assert batch["input_ids"][:, 0].tolist() == [1112, 3112]
    assert packed()[0]["input_ids"][0] == 31


def test_the_fingerprint_is_of_tokens_bins_and_transforms(tmp_path):
    file = file_of(tmp_path / "a")
    bins = pack(np.diff(file.offsets), 4)
    first = packed_dataset(file, bins)
    assert packed_dataset(tmp_path / "a", bins).fingerprint == first.fingerprint
    changed = [[9, 12, 13], *DOCUMENTS[1:]]
    others = [
        packed_dataset(file, pack(np.diff(file.offsets), 8)),
        packed_dataset(file_of(tmp_path / "b", changed), bins),
        *(packed_dataset(file, bins, transforms=[each]) for each in (fk.shift_labels, *ADD)),
        packed(),
        packed(changed),
    ]
    assert len({dataset.fingerprint for dataset in [first, *others]}) == 8
    assert packed().fingerprint == packed([np.array(ids, int) for ids in DOCUMENTS]).fingerprint


def test_the_dataset_says_what_it_is_and_held_out_documents_are_packed_alike(tmp_path):
    file = file_of(tmp_path / "a", metadata={"text_bytes": 32})
    rows = packed_dataset(file, pack(np.diff(file.offsets), 4, align=2), transforms=ADD)
    assert (rows.vocab_size, rows.file, rows.bytes_per_token) == (100, file, 2.0)
    plain = packed()
    assert (plain.vocab_size, plain.file, plain.bytes_per_token) == (42, None, None)
    assert rows.held_out() is plain.held_out() is None
    file_of(tmp_path / "a" / "heldout", [[51, 52], [61], [71, 72, 73, 74, 75]])
    held_out = rows.held_out()
    assert (held_out.seq_len, held_out.bins.align, held_out[0]["a"]) == (4, 2, 2)
    labels = torch.stack([row["labels"] for row in held_out])
    assert sorted(labels[labels != -100].tolist()) == [0, 0, 0, 52, 72, 73, 74, 75]


def test_a_dataset_of_a_token_file_is_pickled_by_its_path(tmp_path):
    file = file_of(tmp_path / "a", [list(range(90))] * 200)
    dataset = packed_dataset(file, cached_bins(tmp_path / "bins", file, 128), transforms=ADD[:1])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[3]["input_ids"].equal(dataset[3]["input_ids"])


def bins_of(documents, starts, lengths):
    return lambda: packed_dataset(DOCUMENTS, Bins([0, len(starts)], documents, starts, lengths))


BAD = {
    "capacity 100 must be divisible by align 16": lambda: pack([3], 100, align=16),
    r"document 1 has 20 tokens; a bin has 8 pos": lambda: pack([3, 20, 9], 8, long="error"),
    "length -2 must be at least 0": lambda: pack([1, -2], 8),
    "Cannot cast array data": lambda: pack([1.5], 8),
    "offsets of bins must go from 0": lambda: Bins([0, 1], [0, 2], [0, 0], [5, 2]),
    "refer to 1 tokens from token 0 of document 5, which": bins_of([5], [0], [1]),
    "refer to 3 tokens from token 0 of document 1": bins_of([0, 1], [0, 0], [3, 3]),
    "refer to 2 tokens from token -1 of document 1": bins_of([1], [-1], [2]),
    "refer to 0 tokens from token 0 of document 3": bins_of([3], [0], [0]),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_packed_is_refused(message):
    with pytest.raises((ValueError, TypeError), match=message):
        BAD[message]()
