"""Bins on disk are what ``pack`` gives, or they are not used."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time

import numpy as np
import pytest
import torch
from ranks import run_ranks

from forgekit.data.corpus.token_files import write_tokens
from forgekit.data.packing.bins import Bins, open_bins, save_bins
from forgekit.data.packing.cached_bins import cached_bins
from forgekit.data.packing.pack import pack

LENGTHS = [3, 6, 4, 2, 9, 1, 1]
FRESH = pack(LENGTHS, 8)


def stamp(path):
    """Changes when a directory is replaced."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def test_bins_are_found_again_and_mapped(tmp_path):
    bins = cached_bins(tmp_path / "a" / "bins", LENGTHS, 8)
    assert bins.fingerprint == FRESH.fingerprint
    assert not bins.lengths.flags.writeable
    before = stamp(bins.path)
    again = cached_bins(tmp_path / "a" / "bins", np.array(LENGTHS), np.int64(8), align=np.int8(1))
    assert (again.path, again.fingerprint) == (bins.path, bins.fingerprint)
    assert stamp(bins.path) == before
    assert [path.name for path in (tmp_path / "a" / "bins").iterdir()] == [bins.path.name]


def test_dropped_documents_and_empty_corpora_survive(tmp_path):
    bins = cached_bins(tmp_path, LENGTHS, 8, long="drop", align=2)
    assert (bins.dropped, bins.capacity, bins.align) == (1, 8, 2)
    for _ in range(2):
        assert len(cached_bins(tmp_path, [0, 0], 8)) == 0


OTHER = {
    "lengths": {"documents": [3, 6, 4, 2, 9, 1, 2]},
    "order": {"documents": LENGTHS[::-1]},
    "capacity": {"capacity": 16},
    "method": {"method": "sequential"},
    "align": {"align": 2},
    "long": {"long": "drop"},
    "group": {"group": [0, 0, 0, 1, 1, 1, 1]},
    "groups": {"group": [0, 0, 0, 1, 1, 1, 0]},
}


def test_other_arguments_are_other_bins(tmp_path):
    options = {"documents": LENGTHS, "capacity": 8}
    paths = [cached_bins(tmp_path, **{**options, **other}).path for other in [{}, *OTHER.values()]]
    assert len(set(paths)) == 9
    for other in OTHER.values():
        expected = {**options, **other}
        found = cached_bins(tmp_path, **expected)
        assert found.fingerprint == pack(expected.pop("documents"), **expected).fingerprint


def test_bins_of_a_token_file_follow_its_tokens_and_its_tokenizer(tmp_path):
    def write(documents):
        file = write_tokens(tmp_path / "a", documents, vocab_size=9, eos_id=0)
        return cached_bins(tmp_path / "bins", file, 8)

    first = write([[1, 2], [3]])
    assert first.lengths.tolist() == [3, 2]
    assert write([[1, 2], [3]]).path == first.path
    assert write([[1, 2], [4]]).path != first.path
    write([[1, 2], [3]])
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    with pytest.raises(FileExistsError, match=r"were not written here \(.*tokenizer.json\)"):
        write([[1, 2], [3]])
    (tmp_path / "a" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    file = write_tokens(tmp_path / "a", [[1, 2], [3]], vocab_size=9, eos_id=0)
    assert cached_bins(tmp_path / "bins", file, 8).path == first.path
    (tmp_path / "tokenizer.json").rename(tmp_path / "a" / "tokenizer.json")
    assert cached_bins(tmp_path / "bins", file, 8).path != first.path


def edit(name, change):
    def damage(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def edit_index(**changes):
    return edit("index.json", lambda old: json.dumps(json.loads(old) | changes).encode())


def other_bins(folder):
    """Bins that are whole, but of something else, as if a directory had been renamed."""
    save_bins(pack([1, 1, 1], 8), folder, {"key": "another"})


def flip(place):
    def change(old):
        bit = bytearray(old)
        bit[place] ^= 1
        return bytes(bit)

    return change


ARRAYS = ("offsets.npy", "documents.npy", "starts.npy", "lengths.npy")
DAMAGE = {
    "truncated": (
        edit("lengths.npy", lambda b: b[:-8]),
        "lengths.npy is missing or damaged .*. Pack again",
    ),
    "empty": (
        edit("starts.npy", lambda b: b""),
        r"starts.npy is missing or damaged \(No data left",
    ),
    "longer": (edit("documents.npy", lambda b: b + bytes(8)), None),
    "foreign": (
        edit("offsets.npy", lambda b: b"PK" + b[2:]),
        "offsets.npy is missing or damaged .* Pack",
    ),
    "bit": (edit("lengths.npy", flip(-8)), "fingerprint .*; its index.json says .* A file is dam"),
    "start": (edit("starts.npy", flip(-8)), "fingerprint .*; its index.json says"),
    "document": (edit("documents.npy", flip(-8)), "fingerprint .*; its index.json says"),
    "offset": (edit("offsets.npy", flip(-16)), "fingerprint .*; its index.json says"),
    "end": (edit("offsets.npy", flip(-8)), "the offsets of bins go from"),
    "type": (
        lambda folder: np.save(folder / "starts.npy", np.zeros(8)),
        r"starts.npy holds float64 \(8,\), not int64 \[n\]. Pack again",
    ),
    "missing": (
        lambda folder: (folder / "starts.npy").unlink(),
        r"starts.npy is missing or damaged \(.*No such file",
    ),
    "no index": (lambda folder: (folder / "index.json").unlink(), "No such file"),
    "json": (edit("index.json", lambda b: b[:20]), "index.json is not JSON .* Pack again"),
    "list": (edit("index.json", lambda b: b"[1]"), r"has magic \[1\], not 'forgekit-bins'"),
    "magic": (edit_index(magic="cats"), "has magic 'cats', not 'forgekit-bins'. Pack again"),
    "version": (edit_index(version=2), "has version 2, not 1"),
    "capacity": (edit_index(capacity=9), "fingerprint .*; its index.json says"),
    "number": (
        edit_index(dropped="no"),
        "has 'no' as .dropped.; it must be of type int",
    ),
    "key": (edit_index(key="another"), "has key 'another', not '"),
    "other": (other_bins, "has key 'another', not '"),
    "nothing": (lambda folder: [(folder / n).unlink() for n in (*ARRAYS, "index.json")], "No such"),
}
REMADE = ("longer", "no index", "nothing")
"""What is read as it is, or taken for a folder without bins."""


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(*row, id=name, marks=() if name in REMADE else pytest.mark.bad_input)
        for name, row in DAMAGE.items()
    ],
)
def test_damaged_and_stale_bins_are_refused_and_made_anew(tmp_path, damage, message):
    path = cached_bins(tmp_path, LENGTHS, 8).path
    key = json.loads((path / "index.json").read_text())["key"]
    damage(path)
    before = stamp(path)
    if message is not None:
        with pytest.raises((ValueError, OSError), match=message):
            open_bins(path, key=key)
    found = cached_bins(tmp_path, LENGTHS, 8)
    assert found.fingerprint == FRESH.fingerprint
    assert found.path == path
    assert (stamp(path) == before) == (message is None)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    """Where one does no harm (a space, a letter's case in JSON) the bins are still the same."""
    path = cached_bins(tmp_path, LENGTHS, 8).path
    for name in (*ARRAYS, "index.json"):
        whole = (path / name).read_bytes()
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            (path / name).write_bytes(damaged)
            try:
                bins = open_bins(path)
            except (ValueError, FileNotFoundError):
                continue
            assert bins.fingerprint == FRESH.fingerprint, (name, place)
        (path / name).write_bytes(whole)
    assert open_bins(path).fingerprint == FRESH.fingerprint


def test_bins_that_are_in_use_stay_as_they_are_while_others_are_written(tmp_path):
    bins = cached_bins(tmp_path, LENGTHS, 8)
    (bins.path / "index.json").write_text("damaged")
    cached_bins(tmp_path, LENGTHS, 8)
    assert bins.fingerprint == FRESH.fingerprint


def test_nothing_that_others_wrote_is_deleted(tmp_path):
    path = cached_bins(tmp_path, LENGTHS, 8).path
    (path / "index.json").write_text("damaged")
    (path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="holds files that were not written here"):
        cached_bins(tmp_path, LENGTHS, 8)
    assert (path / "thesis.txt").read_text() == "precious"


def test_bins_on_disk_are_pickled_by_their_path(tmp_path):
    bins = cached_bins(tmp_path, np.ones(5_000, dtype=np.int64), 8)
    pickled = pickle.dumps(bins)
    assert len(pickled) < 500
    assert pickle.loads(pickled).fingerprint == bins.fingerprint


def test_bad_arguments_leave_nothing(tmp_path):
    with pytest.raises(ValueError, match="capacity 0 must be at least 1"):
        cached_bins(tmp_path / "a", LENGTHS, 0)
    with pytest.raises(ValueError, match="document 4 has 9 tokens"):
        cached_bins(tmp_path / "a", LENGTHS, 8, long="error")
    assert not list((tmp_path / "a").iterdir())


def _cache(rank, world, folder):
    lengths = np.arange(200_000) % 997 + 1
    torch.distributed.barrier()
    bins = cached_bins(folder, lengths, 1024)
    return bins.fingerprint, (bins.path / "index.json").stat().st_ino


def test_of_several_processes_at_once_one_packs_and_all_get_its_bins(tmp_path):
    found = run_ranks(_cache, 4, tmp_path)
    assert len(set(found)) == 1
    assert found[0][0] == pack(np.arange(200_000) % 997 + 1, 1024).fingerprint
    assert len(list(tmp_path.iterdir())) == 1


MANY = np.arange(3_000_000) % 997 + 1


def _killed(rank, world, folder):
    """Kill a child when it has begun the second file of the new directory; returns its status."""
    child = os.fork()
    if child == 0:
        try:
            cached_bins(folder, MANY, 1024)
        finally:
            os._exit(1)
    while not list(folder.glob(".bins-*.new/documents.npy")):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child ended before it was killed"
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def test_a_kill_while_bins_are_written_leaves_nothing_that_is_used(tmp_path):
    """Most of the files is still to be written when the second one is begun."""
    assert run_ranks(_killed, 1, tmp_path, group=False) == [signal.SIGKILL]
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".bins-")
    bins = cached_bins(tmp_path, MANY, 1024)
    assert bins.tokens == MANY.sum()
    assert [path.name for path in tmp_path.iterdir()] == [bins.path.name]


def test_bins_without_a_path_are_pickled_whole():
    bins = Bins([0, 1], [0], [0], [3])
    assert pickle.loads(pickle.dumps(bins)).path is None
