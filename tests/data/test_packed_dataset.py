"""Packed rows against the documents themselves, token by token."""

from __future__ import annotations

import pickle
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import SPEC

import forgekit as fk
from forgekit.data.packing import Bins, cached_bins, pack
from forgekit.data.rows import packed_dataset
from forgekit.data.token_files import write_tokens

DOCUMENTS = [[11, 12, 13], [21, 22], [31, 32, 33, 34, 35], [], [41]]


def packed(documents=DOCUMENTS, capacity=4, transforms=(), **options):
    bins = pack([len(ids) for ids in documents], capacity, **options)
    return packed_dataset(documents, bins, transforms=transforms)


def file_of(path, documents=DOCUMENTS, **options):
    return write_tokens(path, documents, **{"vocab_size": 100, "eos_id": 0, **options})


def test_rows_by_hand():
    """Document 2 is cut: its last token is predicted in the row where the one before it lies."""
    dataset = packed(method="sequential", align=2, capacity=4)
    rows = {key: column.tolist() for key, column in dataset.__getitems__(range(4)).items()}
    assert rows == {
        "input_ids": [[11, 12, 13, 0], [21, 22, 0, 0], [31, 32, 33, 34], [35, 0, 41, 0]],
        "labels": [[12, 13, -100, -100], [22, *[-100] * 3], [32, 33, 34, 35], [-100] * 4],
        "doc_ids": [[0, 0, 0, -1], [0, 0, -1, -1], [0] * 4, [0, -1, 1, -1]],
        "position_ids": [[0, 1, 2, 0], [0, 1, 0, 0], [0, 1, 2, 3], [0] * 4],
    }


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
    method=st.sampled_from(["best_fit", "sequential"]),
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
        found = torch.stack([batch[key] for key in keys], dim=-1).tolist()
        assert found == [columns_of(held, bins, row, padding) for row in range(len(bins))]


def test_a_batch_is_its_rows(tmp_path):
    file = file_of(tmp_path / "a")
    dataset = packed_dataset(tmp_path / "a", pack(np.diff(file.offsets), 4))
    batch = dataset.__getitems__([2, 0])
    assert batch.batch_size == torch.Size([2])
    for place, row in enumerate((2, 0)):
        assert all(column[place].equal(dataset[row][key]) for key, column in batch.items())
    batch["labels"].zero_()
    assert batch["input_ids"].equal(dataset.__getitems__([2, 0])["input_ids"])
    assert dataset.__getitems__([]).batch_size == torch.Size([0])


def add(row, key, value):
    row["input_ids"][0] = row["input_ids"][0] * 10 + value
    return row.set(key, torch.tensor(value))


def test_transforms_are_applied_to_rows_in_order():
    dataset = packed(transforms=[partial(add, key="a", value=1), partial(add, key="b", value=2)])
    assert dataset[0]["input_ids"][0] == 3112
    batch = dataset.__getitems__([1, 0])
    assert batch.batch_size == torch.Size([2])
    assert batch["a"].tolist() == [1, 1]
    assert batch["input_ids"][:, 0].tolist() == [1112, 3112]
    assert packed()[0]["input_ids"][0] == 31


def test_the_dataset_says_what_it_is(tmp_path):
    file = file_of(tmp_path / "a", metadata={"text_bytes": 32})
    rows = packed_dataset(file, pack(np.diff(file.offsets), 4))
    assert (rows.vocab_size, rows.file, rows.bytes_per_token) == (100, file, 2.0)
    assert rows.held_out() is None
    rows = packed()
    assert (rows.vocab_size, rows.file, rows.bytes_per_token) == (42, None, None)
    assert rows.held_out() is None


def test_the_fingerprint_is_of_tokens_bins_and_transforms(tmp_path):
    file = file_of(tmp_path / "a")
    lengths = np.diff(file.offsets)
    first = packed_dataset(file, pack(lengths, 4))
    assert packed_dataset(tmp_path / "a", pack(lengths, 4)).fingerprint == first.fingerprint
    changed = [[9, 12, 13], *DOCUMENTS[1:]]
    others = [
        packed_dataset(file, pack(lengths, 8)),
        packed_dataset(file_of(tmp_path / "b", changed), pack(lengths, 4)),
        *(
            packed_dataset(file, pack(lengths, 4), transforms=[transform])
            for transform in (fk.shift_labels, *(partial(add, key="a", value=n) for n in (1, 2)))
        ),
        packed(),
        packed(changed),
    ]
    assert len({dataset.fingerprint for dataset in [first, *others]}) == 8
    assert packed().fingerprint == packed([np.array(ids, int) for ids in DOCUMENTS]).fingerprint


def test_held_out_documents_are_packed_alike(tmp_path):
    file = file_of(tmp_path / "a")
    file_of(tmp_path / "a" / "heldout", [[51, 52], [61], [71, 72, 73, 74, 75]])
    dataset = packed_dataset(
        file, pack(np.diff(file.offsets), 4, align=2), transforms=[partial(add, key="a", value=1)]
    )
    held_out = dataset.held_out()
    assert (held_out.seq_len, held_out.bins.align, held_out[0]["a"]) == (4, 2, 1)
    tokens = torch.stack([row["labels"] for row in held_out]).flatten().tolist()
    assert sorted(token for token in tokens if token != -100) == [0, 0, 0, 52, 72, 73, 74, 75]


def test_a_dataset_of_a_token_file_is_pickled_by_its_path(tmp_path):
    file = file_of(tmp_path / "a", [list(range(90))] * 200)
    bins = cached_bins(tmp_path / "bins", file, 128)
    dataset = packed_dataset(file, bins, transforms=[partial(add, key="a", value=1)])
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[3]["input_ids"].equal(dataset[3]["input_ids"])


BAD_BINS = {
    "1 tokens from token 0 of document 5, .* 5 docu": Bins([0, 1], [5], [0], [1]),
    "name 3 tokens from token 0 of document 1": Bins([0, 2], [0, 1], [0, 0], [3, 3]),
    "name 2 tokens from token -1 of document 1": Bins([0, 1], [1], [-1], [2]),
    "name 0 tokens from token 0 of document 3": Bins([0, 1], [3], [0], [0]),
}


@pytest.mark.parametrize("message", BAD_BINS)
def test_bins_of_other_documents_are_refused(message):
    with pytest.raises(ValueError, match=message):
        packed_dataset(DOCUMENTS, BAD_BINS[message])


def logits_of(row, network):
    places = {key: row[key][None] for key in ("doc_ids", "position_ids")}
    with torch.no_grad():
        return network(row["input_ids"][None], **places)[0]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_changed_document_leaves_the_logits_of_the_others_bit_equal(changed):
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 30, size) for size in (7, 4, 2)]
    other = [*documents]
    other[changed] = documents[changed] + 7
    network = fk.Transformer(SPEC).double().eval()
    row, changed_row = (packed(each, 16, align=4)[0] for each in (documents, other))
    before, after = logits_of(row, network), logits_of(changed_row, network)
    there = row["doc_ids"] == changed
    elsewhere = ~there & (row["doc_ids"] != -1)
    assert elsewhere.sum() == sum(len(ids) for ids in documents) - len(documents[changed])
    assert before[elsewhere].equal(after[elsewhere])
    assert not before[there].equal(after[there])
    with torch.no_grad():
        alone = network(torch.from_numpy(documents[changed])[None])[0]
    torch.testing.assert_close(before[there], alone, rtol=0, atol=1e-13)
