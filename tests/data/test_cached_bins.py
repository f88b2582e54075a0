"""Bins on disk are what ``pack`` gives, or they are not used."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from ranks import run_ranks

from forgekit.data.packing import Bins, cached_bins, open_bins, pack
from forgekit.data.token_files import write_tokens

LENGTHS = [3, 6, 4, 2, 9, 1, 1]
FRESH = pack(LENGTHS, 8)


def stamp(path):
    """Changes when a file is replaced."""
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
}


def test_other_arguments_are_other_bins(tmp_path):
    options = {"documents": LENGTHS, "capacity": 8}
    paths = [cached_bins(tmp_path, **{**options, **other}).path for other in [{}, *OTHER.values()]]
    assert len(set(paths)) == 7
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


def flipped(content, place, bit=0):
    damaged = bytearray(content)
    damaged[place] ^= 1 << bit
    return bytes(damaged)


def array_of(*shape):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(shape))
    return buffer.getvalue()


DAMAGE = {
    "truncated": lambda b: b[:-8],
    "foreign": lambda b: b"PK" + b[2:],
    "a bit of a length": lambda b: flipped(b, -24),
    "a bit of the capacity": lambda b: flipped(b, -8),
    "another shape": lambda b: array_of(3),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_bins_are_refused_and_made_anew(tmp_path, damage):
    file = cached_bins(tmp_path, LENGTHS, 8).path
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"bins-.*.npy (is damaged \(|has changed since it was)"):
        open_bins(file)
    bins = cached_bins(tmp_path, LENGTHS, 8)
    assert bins.fingerprint == FRESH.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_no_flipped_bit_goes_unnoticed(tmp_path):
    """Where one does no harm (a space of the header) the bins are still the same."""
    file = cached_bins(tmp_path, LENGTHS, 8).path
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(flipped(whole, place, place % 8))
        try:
            bins = open_bins(file)
        except ValueError:
            continue
        assert bins.fingerprint == FRESH.fingerprint, place


def test_bins_on_disk_are_pickled_by_their_path(tmp_path):
    bins = cached_bins(tmp_path, np.ones(5_000, dtype=np.int64), 8)
    pickled = pickle.dumps(bins)
    assert len(pickled) < 500
    assert pickle.loads(pickled).fingerprint == bins.fingerprint


def _cache(rank, world, folder):
    lengths = np.arange(200_000) % 997 + 1
    torch.distributed.barrier()
    bins = cached_bins(folder, lengths, 1024)
    return bins.fingerprint


def test_several_processes_at_once_get_the_same_bins(tmp_path):
    found = run_ranks(_cache, 4, tmp_path)
    assert len(set(found)) == 1
    assert found[0] == pack(np.arange(200_000) % 997 + 1, 1024).fingerprint
    assert len(list(tmp_path.iterdir())) == 1


def test_bins_without_a_path_are_pickled_whole():
    bins = Bins([0, 1], [0], [0], [3])
    assert pickle.loads(pickle.dumps(bins)).path is None
