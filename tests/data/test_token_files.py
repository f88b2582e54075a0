"""Token files come back as written, appear whole or not at all, and are refused when damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forgekit.data.rows import token_dataset
from forgekit.data.token_files import open_tokens, write_tokens

DOCUMENTS = [[5, 6, 7], [8], [], [9, 10, 11, 12, 13]]
STREAM = [5, 6, 7, 0, 8, 0, 0, 9, 10, 11, 12, 13, 0]


def write(path, documents=DOCUMENTS, **options):
    return write_tokens(path, documents, **{"vocab_size": 100, "eos_id": 0, **options})


@pytest.mark.parametrize("shard_tokens", [1, 5, 13, 100])
def test_tokens_and_offsets_come_back_whatever_the_shards(tmp_path, shard_tokens):
    file = write(tmp_path / "a", shard_tokens=shard_tokens)
    assert file.read(0, 13).tolist() == STREAM
    assert file.read(3, 9).tolist() == STREAM[3:9]
    assert file.offsets.tolist() == [0, 4, 6, 7, 13]
    assert (file.tokens, file.documents, file.vocab_size, file.eos_id) == (13, 4, 100, 0)
    assert len(list((tmp_path / "a").glob("shard_*"))) == -(-13 // shard_tokens)


@pytest.mark.parametrize(
    ("vocab_size", "size", "convert"),
    [(2**16, 2, list), (2**16 + 1, 4, np.array), (2**32, 4, torch.tensor)],
)
def test_the_vocabulary_chooses_the_width_and_the_largest_id_survives(
    tmp_path, vocab_size, size, convert
):
    file = write(tmp_path / "a", [convert([vocab_size - 1, 0])], vocab_size=vocab_size)
    assert file.read(0, 3).tolist() == [vocab_size - 1, 0, 0]
    assert (tmp_path / "a" / "shard_00000.npy").stat().st_size == 128 + 3 * size


def test_the_fingerprint_is_of_the_content(tmp_path):
    same = [write(tmp_path / "a"), write(tmp_path / "b", shard_tokens=2, metadata={"x": 1})]
    other = [
        write(tmp_path / "c", [[5, 6], [7], [8], [], [9, 10, 11, 12, 13]]),
        write(tmp_path / "d", DOCUMENTS[::-1]),
        write(tmp_path / "e", vocab_size=101),
        write(tmp_path / "f", vocab_size=2**17),
    ]
    assert len({file.fingerprint for file in same}) == 1
    assert len({file.fingerprint for file in [same[0], *other]}) == 5


def test_documents_are_pulled_one_at_a_time_and_old_files_stay_until_the_end(tmp_path):
    def documents(meanwhile=KeyboardInterrupt):
        yield [1, 2, 3]
        if meanwhile is KeyboardInterrupt:
            raise meanwhile
        assert meanwhile().tokens == 13
        yield [1]

    write(path := tmp_path / "a")
    assert write(path, documents(lambda: open_tokens(path))).tokens == 6
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert write(path, documents(lambda: write(path))).documents == 2
    for name in "ab":
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / name, documents(), shard_tokens=2)
    for left in (".a.0123456789ab.new", ".a.0123456789ab.old", ".a.new", ".b.0123456789ab.new"):
        (tmp_path / left).mkdir()  # by writers that were killed
        (tmp_path / left / "half").write_text("")
    assert open_tokens(tmp_path / "a").documents == 2
    write(tmp_path / "a")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".a.new", ".b.0123456789ab.new", "a"]


def test_nothing_but_a_token_file_is_replaced(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError, match="file is a file"):
        write(tmp_path / "file")
    write(tmp_path / "a")
    (tmp_path / "a" / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match=r"were not written here \(.*thesis.txt\)"):
        write(tmp_path / "a")
    assert (tmp_path / "a" / "thesis.txt").read_text() == "precious"
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty").tokens == 13


BAD = {
    "document 1 has token ids from 100 to 100; they": {"documents": [[1], [100]]},
    r"document 0 is float64 of shape \(1,\)": {"documents": [[1.5]]},
    "there are no documents": {"documents": []},
    "eos_id 100 must be at most 99": {"eos_id": 100},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_documents_and_sizes_are_refused(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "a", **BAD[message])
    assert not list(tmp_path.iterdir())


def edit(name, change):
    def damage(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def edit_index(**changes):
    return edit("index.json", lambda old: json.dumps(json.loads(old) | changes).encode())


def flip(byte):
    return lambda old: bytes(old[:byte] + bytes([old[byte] ^ 1]) + old[byte:][1:])


SHARD = "shard_00002.npy"
CHANGED = "differs from its checksum"
DAMAGE = {
    r"00002.npy cannot be read \(mmap length is": edit(SHARD, lambda old: old[:-3]),
    "00002.npy .*it has float16": edit(SHARD, lambda old: old.replace(b"<u2", b"<f2")),
    "has 12 tokens in .* index.json says 13": edit(SHARD, lambda old: old.replace(b"(3,", b"(2,")),
    r"13 tokens .* up to \[7\]": edit("offsets.npy", lambda old: old.replace(b"(5,)", b"(4,)")),
    "index.json is not an index of forgekit-tokens version 3": edit_index(version=1),
    f"shard_00002.npy {CHANGED}": edit(SHARD, flip(-1)),
    f"offsets.npy {CHANGED}": edit("offsets.npy", flip(128 + 9)),
    f"shard_00000.npy {CHANGED}": edit_index(checksums={}),
    "shard_00002.npy cannot be read .*No such file": lambda folder: (folder / SHARD).unlink(),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_files_are_refused_with_what_was_read(tmp_path, message):
    write(tmp_path / "a", shard_tokens=5)
    assert open_tokens(tmp_path / "a", verify=True).tokens == 13
    DAMAGE[message](tmp_path / "a")
    if CHANGED in message:  # found by reading all bytes only
        open_tokens(tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        open_tokens(tmp_path / "a", verify=CHANGED in message)


@given(
    documents=st.lists(st.lists(st.integers(1, 9), max_size=9), min_size=1, max_size=6),
    seq_len=st.integers(1, 12),
    shard_tokens=st.integers(1, 20),
)
@settings(max_examples=25, deadline=None)
def test_every_token_but_the_first_is_a_target_once(
    tmp_path_factory, documents, seq_len, shard_tokens
):
    stream = [token for ids in [*documents, [3]] for token in [*ids, 0]]
    folder = tmp_path_factory.mktemp("tokens") / "a"
    file = write(folder, [*documents, [3]], shard_tokens=shard_tokens)
    rows = list(token_dataset(file, seq_len))
    labels = torch.cat([row["labels"] for row in rows])
    inputs = torch.cat([row["input_ids"] for row in rows])
    assert labels[labels != -100].tolist() == stream[1:]
    assert inputs[labels != -100].tolist() == stream[:-1]
    assert inputs[labels == -100].eq(0).all()
    assert len(rows) == -(-(len(stream) - 1) // seq_len)


def test_documents_and_positions_within_a_row(tmp_path):
    """Of 5 6 7 0 | 8 0 | 0 | 9 10 11 12 13 0 the rows are cut after every fifth token."""
    dataset = token_dataset(write(tmp_path / "a"), seq_len=5, doc_ids=True)
    batch = dataset.__getitems__(range(3))
    documents = [[0, 0, 0, 0, 1], [0, 1, 2, 2, 2], [0, 0, -1, -1, -1]]
    assert batch["doc_ids"].tolist() == documents
    positions = [[0, 1, 2, 3, 0], [0, 0, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch["position_ids"].tolist() == positions


def test_rows_and_tokens_out_of_range_are_refused(tmp_path):
    dataset = token_dataset(write(tmp_path / "a"), seq_len=5)
    for row in (3, -1):
        with pytest.raises(IndexError, match=rf"row {row} must lie in range\(3\)"):
            dataset[row]
    with pytest.raises(IndexError, match="tokens 5:14 must lie within 0:13"):
        dataset.file.read(5, 14)
    with pytest.raises(FileNotFoundError, match=r"not a token file: it has no index.json"):
        open_tokens(tmp_path)


def test_a_link_to_a_directory_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for _ in range(2):
        write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert open_tokens(tmp_path / "disk").tokens == 13
